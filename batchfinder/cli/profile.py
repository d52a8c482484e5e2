"""`profile`: the memory of one training step, stage by stage, for one model, batch size and GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from batchfinder.cli.options import asked_card, check_file, step_options, whole_number, write_file
from batchfinder.devices import without_bf16
from batchfinder.memory_use.breakdown import bytes_over_time
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation
from batchfinder.report.made_by import made_by
from batchfinder.report.page import PageCell, check_page, page_of
from batchfinder.report.plots import check_picture, draw_profile
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.report.terminal import tell
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.memory_viz import pickled, take_snapshot
from batchfinder.simulator.steady_state import SimulatedProbe, SteadyState
from batchfinder.sizing.recorder import take_with_recorder
from batchfinder.training.spec import recorder_in_words, seq_lens_of, torch_of
from batchfinder.units import format_bytes

# Moving the model and the batch is not shown.
STAGES = ("zero_grad", "forward", "loss", "backward", "optimizer")
_FIGURES = ("allocated_bytes", "max_allocated_bytes", "reserved_bytes", "max_reserved_bytes")


def main(arguments: argparse.Namespace) -> int:
    """Profile one size; that it runs out of memory is a result, not an error."""
    model, options = arguments.model, step_options(arguments)
    batch_size = whole_number("--batch-size", arguments.batch_size)
    micro_batches = whole_number("--accumulation", arguments.accumulation)
    asked = tuple(whole_number("--seq-len", each) for each in (arguments.seq_len or "").split(",") if arguments.seq_len)
    card, note = asked_card(arguments, whole_number("--gpus", arguments.gpus))
    device = card.device.among_others(options.communicators)
    check_model_name(model)
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
        check_file("--plot", arguments.plot)
    if arguments.html is not None:
        check_page("--html", arguments.html)
        check_file("--html", arguments.html)
    if arguments.snapshot is not None:
        check_file("--snapshot", arguments.snapshot)
    spec, step = options.workload(model), options.step(micro_batches)
    if note:
        tell(f"batchfinder: {note}")
    if len(asked) > 1:
        step = replace(step, lengths=asked, steps=len(asked))
    with StatusLine() as line:

        def record(by: str) -> tuple[int | None, SimulatedProbe, AllocatorSettings, SteadyState, str]:
            with Simulation(spec, step, by) as simulation:
                line.update(f"building {model}")
                facts = simulation.facts()
                seq_len = seq_lens_of(model, asked, facts)[-1]
                line.update(f"recording {model}")
                settings = AllocatorSettings.from_environment(torch_of(by))
                probe = simulation.probe(device, [seq_len], settings)
                steady = probe.steady_state(batch_size, Shape(seq_len), exact=True)
                return seq_len, probe, settings, steady, recorder_in_words(by, facts.versions["torch"])

        seen, instead = take_with_recorder(arguments.recorder, options, [card], record)
    seq_len, probe, settings, later, recorded = seen
    timeline, unmodelled = later.timeline, (*probe.unmodelled, *([instead] if instead else []))
    lengths = ", then ".join(map(str, step.lengths or (seq_len,)))
    size = f"batch size {batch_size}" + ("" if seq_len is None else f", sequence length {lengths}")
    title = f"{model} at {size} on {device.name}, simulated"
    memory = bytes_over_time(probe.trace(batch_size, Shape(seq_len), exact=True))
    if arguments.plot is not None:
        draw_profile(memory, device.usable_bytes, title, arguments.plot)
    if arguments.html is not None:
        facts = [("peak reserved", format_bytes(timeline.max_reserved_bytes))]
        facts += [("usable", format_bytes(device.usable_bytes)), ("steady state", "yes" if later.settled else "no")]
        facts.append(("recorder", recorded))
        facts += [] if timeline.oom is None else [("out of memory", " ".join(timeline.oom.message.split()))]
        words = ", ".join(options.words())
        cell = PageCell(
            model,
            device.name,
            seq_len,
            words,
            batch_size,
            title,
            facts=facts,
            over_time=memory,
            usable_bytes=device.usable_bytes,
            unmodelled=unmodelled,
        )
        write_file("--html", arguments.html, page_of(title, words, [cell]))
    if arguments.snapshot is not None:
        trace = probe.trace(batch_size, Shape(seq_len), exact=True)
        snapshot = take_snapshot(trace, CachingAllocator(probe.memory, settings))
        write_file("--snapshot", arguments.snapshot, pickled(snapshot))
    names = ("step", "stage", "micro_batch", *_FIGURES)
    stages: list[dict[str, Any]] = [
        {name: getattr(stage, name) for name in names} for stage in timeline.stages if stage.stage in STAGES
    ]
    oom = timeline.oom
    if arguments.json:
        died = oom and {
            "step": oom.moment.step,
            "stage": oom.moment.stage,
            "tried_bytes": oom.tried_bytes,
            "allocated_bytes": oom.allocated_bytes,
            "reserved_bytes": oom.reserved_bytes,
            "message": oom.message,
        }
        found = {
            "made_by": made_by(),
            "stages": stages,
            "oom": died,
            "settled": later.settled,
            "recorder": recorded,
            "unmodelled": list(unmodelled),
        }
        print(json.dumps(found, indent=1))
        return 0
    columns: Columns = {"step": [str(stage["step"]) for stage in stages]}
    if micro_batches > 1:
        columns["micro-batch"] = [
            str(stage["micro_batch"]) if stage["stage"] in ("forward", "loss", "backward") else "" for stage in stages
        ]
    columns["stage"] = [stage["stage"] for stage in stages]
    for figure in _FIGURES:
        columns[figure.removesuffix("_bytes").replace("_", " ")] = [format_bytes(stage[figure]) for stage in stages]
    notes = []
    if oom is not None:
        words = " ".join(oom.message.split())
        notes.append(f"out of memory in {oom.moment.stage} of step {oom.moment.step}: {words}")
    if not later.settled:
        notes.append("does not fit: every further step would have to release the allocator's cache (thrashing)")
    notes += without_bf16(options.precision, [device])
    notes += assumptions(unmodelled, arguments.explain)
    details = (", ".join(options.words()), f"{format_bytes(device.usable_bytes)} usable", f"recorder: {recorded}")
    Table(title, details, columns, tuple(notes)).show()
    return 0
