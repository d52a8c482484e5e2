"""The memory of one training step, stage by stage, for one model, batch size and GPU."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from batchfinder.cli.options import (
    add_json_option,
    add_step_options,
    allocator_settings,
    card,
    how_to_step,
    whole_number,
    workload_spec,
)
from batchfinder.errors import InvalidValue
from batchfinder.outcome import Shape
from batchfinder.report.rows import Columns
from batchfinder.report.table import rich_table
from batchfinder.simulator.timeline import Timeline
from batchfinder.tracing.simulation import Simulation
from batchfinder.units import format_bytes

# What a reader of `torch.cuda.memory_allocated()` would print after; moving the model and the batch is no stage.
STAGES = ("zero_grad", "forward", "loss", "backward", "optimizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    what = parser.add_argument_group("what is profiled")
    what.add_argument("--model", default="bert-base", metavar="NAME|PATH|MODULE:FACTORY", help="default: bert-base")
    what.add_argument("--batch-size", default="8", metavar="N", help="samples in a micro-batch (default: 8)")
    what.add_argument("--seq-len", metavar="N", help="tokens, or pixels for images (default: 128 or 224)")
    what.add_argument("--gpu", metavar="NAME", help="default: Titan X, unless a budget is given")
    what.add_argument("--budget", metavar="SIZE", help="bytes that may be used, such as 12GiB")
    what.add_argument("--accumulation", default="1", metavar="N", help="micro-batches per optimizer step (default: 1)")
    add_step_options(parser)
    add_json_option(parser)


def main(arguments: argparse.Namespace) -> int:
    """Profile one size; running out of memory is a finding, not a failure."""
    batch_size = whole_number("--batch-size", arguments.batch_size)
    how = how_to_step(arguments, whole_number("--accumulation", arguments.accumulation))
    asked = None if arguments.seq_len is None else whole_number("--seq-len", arguments.seq_len)
    gpu = arguments.gpu or (None if arguments.budget else "titan x")
    device = card(gpu, arguments.budget).device
    settings = allocator_settings()
    if allocator_notes := ", ".join(settings.unmodelled):
        print(f"batchfinder: allocator settings that are not modelled: {allocator_notes}", file=sys.stderr)
    with Simulation(workload_spec(arguments.model, arguments), how) as simulation:
        facts = simulation.facts()
        if asked is not None and facts.max_seq_len is not None and asked > facts.max_seq_len:
            raise InvalidValue("--seq-len", asked, f"at most {facts.max_seq_len} {facts.seq_len_unit}")
        seq_len = asked or {"pixels": 224, "none": None}.get(facts.seq_len_unit, 128)
        probe = simulation.probe(device, [seq_len], settings)
        timeline = probe.exact_timeline(batch_size, Shape(seq_len))
        unmodelled = probe.unmodelled
    if arguments.json:
        print(json.dumps(_json(timeline), indent=1))
        return 0
    console = Console()
    where = f"{arguments.model}, batch size {batch_size}" + (f", sequence length {seq_len}" if seq_len else "")
    console.print(
        rich_table(_columns(timeline), f"{where}, on a simulated {device.name} ({how.precision}, {how.optimizer})")
    )
    if timeline.oom is not None:
        console.print(
            f"out of memory in {timeline.oom.moment.stage} of step {timeline.oom.moment.step}:", style="bold red"
        )
        console.print(timeline.oom.message, highlight=False, soft_wrap=True)
    for note in unmodelled:
        console.print(f"  left out: {note}", style="dim", highlight=False, soft_wrap=True)
    return 0


def _stages(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "step": stage.step,
            "stage": stage.stage,
            "micro_batch": stage.micro_batch,
            "allocated_bytes": stage.allocated_bytes,
            "max_allocated_bytes": stage.max_allocated_bytes,
            "reserved_bytes": stage.reserved_bytes,
            "max_reserved_bytes": stage.max_reserved_bytes,
        }
        for stage in timeline.stages
        if stage.stage in STAGES
    ]


def _json(timeline: Timeline) -> dict[str, Any]:
    oom = timeline.oom
    return {
        "stages": _stages(timeline),
        "oom": None
        if oom is None
        else {
            "step": oom.moment.step,
            "stage": oom.moment.stage,
            "tried_bytes": oom.tried_bytes,
            "allocated_bytes": oom.allocated_bytes,
            "reserved_bytes": oom.reserved_bytes,
            "message": oom.message,
        },
    }


def _columns(timeline: Timeline) -> Columns:
    stages = _stages(timeline)
    table: Columns = {
        "step": [str(stage["step"]) for stage in stages],
        "stage": [stage["stage"] for stage in stages],
    }
    for heading in ("allocated", "max_allocated", "reserved", "max_reserved"):
        table[heading.replace("_", " ")] = [format_bytes(stage[f"{heading}_bytes"]) for stage in stages]
    return table
