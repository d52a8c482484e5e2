"""The memory of one training step, stage by stage, for one model, batch size and GPU."""

from __future__ import annotations

import argparse
import json
from typing import Any

from batchfinder.cli.files import check_file, write_file
from batchfinder.cli.options import (
    DEFAULT_GPU,
    allocator_notes,
    allocator_settings,
    card,
    check_model_name,
    how_to_step,
    one_seq_len,
    optional_number,
    whole_number,
    workload_spec,
)
from batchfinder.estimate.breakdown import over_time
from batchfinder.recording.simulation import Simulation
from batchfinder.report.plots import check_picture, draw_profile
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Columns, Table
from batchfinder.results import Shape
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.memory_viz import pickled, take_snapshot
from batchfinder.simulator.replay import OomEvent, Timeline
from batchfinder.units import format_bytes

# What a reader of `torch.cuda.memory_allocated()` would print after; moving the model and the batch is no stage.
STAGES = ("zero_grad", "forward", "loss", "backward", "optimizer")
_FIGURES = ("allocated_bytes", "max_allocated_bytes", "reserved_bytes", "max_reserved_bytes")


def main(arguments: argparse.Namespace) -> int:
    """Profile one size; running out of memory is a finding, not a failure."""
    model = arguments.model
    batch_size = whole_number("--batch-size", arguments.batch_size)
    how = how_to_step(arguments, whole_number("--accumulation", arguments.accumulation))
    asked = optional_number("--seq-len", arguments.seq_len)
    device = card(arguments.gpu or (None if arguments.budget else DEFAULT_GPU), arguments.budget).device
    settings = allocator_settings()
    check_model_name(model)
    check_picture("--plot", arguments.plot)
    check_file("--snapshot", arguments.snapshot)
    with StatusLine() as activity, Simulation(workload_spec(model, arguments), how) as simulation:
        activity.doing(f"building {model}")
        seq_len = one_seq_len(asked, simulation.facts())
        activity.doing(f"recording {model}")
        probe = simulation.probe(device, [seq_len], settings)
        later = probe.exact_outlook(batch_size, Shape(seq_len))
    timeline = later.timeline
    size = f"batch size {batch_size}" + ("" if seq_len is None else f", sequence length {seq_len}")
    title = f"{model} at {size} on {device.name}, simulated"
    if arguments.plot is not None:
        memory = over_time(probe.exact_trace(batch_size, Shape(seq_len)))
        draw_profile(memory, device.usable_bytes, title, arguments.plot)
    if arguments.snapshot is not None:
        trace = probe.exact_trace(batch_size, Shape(seq_len))
        snapshot = take_snapshot(trace, CachingAllocator(probe.memory, settings))
        write_file("--snapshot", arguments.snapshot, pickled(snapshot))
    if arguments.json:
        print(json.dumps({"stages": _stages(timeline), "oom": _oom(timeline.oom), "settled": later.settled}, indent=1))
        return 0
    details = (
        ", ".join([how.precision, *([how.optimizer] if how.mode == "train" else [how.mode])]),
        f"{format_bytes(device.usable_bytes)} usable",
    )
    notes = [] if timeline.oom is None else [_out_of_memory(timeline.oom)]
    if not later.settled:
        notes.append("each further step gives back all cached memory to go on, which counts as not fitting")
    notes += [f"left out: {text}" for text in (*probe.unmodelled, *allocator_notes(settings))]
    Table(title, details, _columns(timeline, how.micro_batches), tuple(notes)).show()
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
