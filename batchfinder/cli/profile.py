"""`profile`: the memory of one training step, stage by stage, for one model, batch size and GPU."""

from __future__ import annotations

import argparse
import json
from typing import Any

from batchfinder.cli.options import DEFAULT_GPU, card, check_file, seq_lens_of, step_options, whole_number, write_file
from batchfinder.estimate.breakdown import bytes_over_time
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation
from batchfinder.report.plots import check_picture, draw_profile
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.memory_viz import pickled, take_snapshot
from batchfinder.simulator.replay import OomEvent, Timeline
from batchfinder.units import format_bytes

# Moving the model and the batch is not shown.
STAGES = ("zero_grad", "forward", "loss", "backward", "optimizer")
_FIGURES = ("allocated_bytes", "max_allocated_bytes", "reserved_bytes", "max_reserved_bytes")


def main(arguments: argparse.Namespace) -> int:
    """Profile one size; that it runs out of memory is a result, not an error."""
    model, options = arguments.model, step_options(arguments)
    batch_size = whole_number("--batch-size", arguments.batch_size)
    micro_batches = whole_number("--accumulation", arguments.accumulation)
    asked = whole_number("--seq-len", arguments.seq_len)
    device = card(arguments.gpu or (None if arguments.budget else DEFAULT_GPU), arguments.budget).device
    settings = AllocatorSettings.from_environment()
    check_model_name(model)
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
    if arguments.snapshot is not None:
        check_file("--snapshot", arguments.snapshot)
    spec, step = options.workload(model), options.step(micro_batches)
    with StatusLine() as line, Simulation(spec, step) as simulation:
        line.update(f"building {model}")
        (seq_len,) = seq_lens_of(model, () if asked is None else (asked,), simulation.facts())
        line.update(f"recording {model}")
        probe = simulation.probe(device, [seq_len], settings)
        later = probe.steady_state(batch_size, Shape(seq_len), exact=True)
    timeline = later.timeline
    size = f"batch size {batch_size}" + ("" if seq_len is None else f", sequence length {seq_len}")
    title = f"{model} at {size} on {device.name}, simulated"
    if arguments.plot is not None:
        memory = bytes_over_time(probe.trace(batch_size, Shape(seq_len), exact=True))
        draw_profile(memory, device.usable_bytes, title, arguments.plot)
    if arguments.snapshot is not None:
        trace = probe.trace(batch_size, Shape(seq_len), exact=True)
        snapshot = take_snapshot(trace, CachingAllocator(probe.memory, settings))
        write_file("--snapshot", arguments.snapshot, pickled(snapshot))
    if arguments.json:
        found = {"stages": _stages(timeline), "oom": _oom(timeline.oom), "settled": later.settled}
        print(json.dumps({**found, "unmodelled": list(probe.unmodelled)}, indent=1))
        return 0
    details = (", ".join(options.words()), f"{format_bytes(device.usable_bytes)} usable")
    notes = [] if timeline.oom is None else [_out_of_memory(timeline.oom)]
    if not later.settled:
        notes.append("thrashing: every further step has to free the allocator's cache, which counts as not fitting")
    notes += assumptions(probe.unmodelled, arguments.explain)
    Table(title, details, _columns(timeline, micro_batches), tuple(notes)).show()
    return 0


def _stages(timeline: Timeline) -> list[dict[str, Any]]:
    names = ("step", "stage", "micro_batch", *_FIGURES)
    return [{name: getattr(stage, name) for name in names} for stage in timeline.stages if stage.stage in STAGES]


def _oom(oom: OomEvent | None) -> dict[str, Any] | None:
    if oom is None:
        return None
    return {
        "step": oom.moment.step,
        "stage": oom.moment.stage,
        "tried_bytes": oom.tried_bytes,
        "allocated_bytes": oom.allocated_bytes,
        "reserved_bytes": oom.reserved_bytes,
        "message": oom.message,
    }


def _out_of_memory(oom: OomEvent) -> str:
    return f"out of memory in {oom.moment.stage} of step {oom.moment.step}: {' '.join(oom.message.split())}"


def _columns(timeline: Timeline, micro_batches: int) -> Columns:
    stages = _stages(timeline)
    table: Columns = {"step": [str(stage["step"]) for stage in stages]}
    if micro_batches > 1:
        table["micro-batch"] = [
            str(stage["micro_batch"]) if stage["stage"] in ("forward", "loss", "backward") else "" for stage in stages
        ]
    table["stage"] = [stage["stage"] for stage in stages]
    for figure in _FIGURES:
        table[figure.removesuffix("_bytes").replace("_", " ")] = [format_bytes(stage[figure]) for stage in stages]
    return table
