"""`reproduce bert-2019`: the notebook "Bert Memory Consumption" of 2019, on the K80 that it ran on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchfinder.devices import find_gpu
from batchfinder.measure.child_probe import ChildProcessProbe
from batchfinder.probe import Probe
from batchfinder.recording.answers import search_simulated
from batchfinder.report.table import Table
from batchfinder.reproductions.published import (
    RUNGS,
    Context,
    Figure,
    Reproduction,
    published_bert_2019,
    row,
)
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import BEFORE_2_12
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import MIB, format_bytes


def without_workspaces(trace: Trace) -> Trace:
    """A trace whose cuBLAS workspaces take nothing: torch 1.2 did not take them from its own allocator."""
    kinds = trace.structure.kinds
    return replace(trace, sizes=tuple(0 if k == "workspace" else n for k, n in zip(kinds, trace.sizes, strict=True)))


def last_rung(probe: Probe, seq_len: int, rungs: Sequence[int] = RUNGS) -> int:
    """The last of a ladder's batch sizes before the first that does not fit; 0 if that is the first."""
    largest = 0
    for batch_size in rungs:
        if not probe(batch_size, Shape(seq_len)).fits:
            break
        largest = batch_size
    return largest


def allocated_mib(traces: TraceSource, memory: DeviceMemory, figures: Sequence[Figure]) -> tuple[int, list[int]]:
    """Run one model's forwards in one process, whose allocator keeps its cache from one to the next.

    The notebook's batch sizes go up until one does not fit, and then to the next length: a failure leaves its mark on
    the cache, so it is run here too.

    Returns:
        MiB allocated once the model is there, and after each forward or where the card was full; rounded down.
    """
    allocator = CachingAllocator(memory, BEFORE_2_12)

    def traced(batch_size: int, seq_len: int) -> tuple[Trace, int]:
        """A trace, and where its batch begins: all before is the model's."""
        trace = without_workspaces(traces.at(batch_size, seq_len))
        (start,) = (mark.position for mark in trace.structure.marks if mark.stage == "batch")
        return trace, start

    trace, start = traced(2, figures[0].seq_len)  # the model is the same in all
    for number in trace.structure.order[:start]:
        allocator.allocate(trace.sizes[number])
    model = allocator.allocated // MIB
    runs: list[tuple[int, int, bool]] = []  # batch size, length, and whether it is one of the figures
    for figure, following in zip(figures, [*figures[1:], None], strict=True):
        runs.append((figure.batch_size, figure.seq_len, True))
        last = following is None or following.seq_len != figure.seq_len
        if last and figure.batch_size > 1:
            runs.append((2 * figure.batch_size, figure.seq_len, False))
    found = []
    for batch_size, seq_len, printed in runs:
        trace, start = traced(batch_size, seq_len)
        live: dict[int, Block | None] = {}
        with contextlib.suppress(SimulatedOutOfMemory):
            for event in trace.structure.order[start : trace.structure.marks[-1].position]:
                if event >= 0:
                    live[event] = allocator.allocate(trace.sizes[event])
                else:
                    allocator.free(live.pop(~event))
        if printed:
            found.append(allocator.allocated // MIB)
        for block in live.values():  # all but the model
            allocator.free(block)
    return model, found


NAME = "bert-2019"
_CAPABILITY = find_gpu("K80").compute_capability or (3, 7)


def _workload(head: str, size: str) -> WorkloadSpec:
    return WorkloadSpec("batchfinder.reproductions.bert_2019_model:build", {"head": head, "size": size})


WORKLOAD = _workload("classification", "base")


NEEDED_BYTES = published_bert_2019().usable_bytes
"""What the notebook's card left to PyTorch's allocator."""


def reproduce(context: Context) -> Reproduction:
    """Find all 17 figures and 8 ladders."""
    notebook = published_bert_2019()
    card = DeviceMemory(notebook.total_bytes, notebook.usable_bytes)
    context.status("recording the BERTs of 2019")
    traces: dict[tuple[str, str, str], TraceSource] = {}  # by head, size and mode
    for model in notebook.model_mib:
        no_grad = {each.seq_len for each in notebook.ladders if each.no_grad and (each.head, each.size) == model}
        lengths = {"forward": {figure.seq_len for figure in notebook.figures}, "inference": no_grad}
        for mode, seq_lens in lengths.items():
            if seq_lens:
                how = StepConfig(mode=mode)
                traces[*model, mode] = context.source(_workload(*model), how, _CAPABILITY, sorted(seq_lens))

    rows: list[dict[str, Any]] = []
    models = {}
    for head, size in notebook.model_mib:
        figures = [figure for figure in notebook.figures if (figure.head, figure.size) == (head, size)]
        models[head, size], found = allocated_mib(traces[head, size, "forward"], card, figures)
        for figure, mib in zip(figures, found, strict=True):
            cell = f"forward {head} {size} {figure.batch_size}x{figure.seq_len}"
            more: dict[str, Any] = {"unit": "MiB"}
            if context.device is not None:
                context.status(f"running {cell}")
                step = StepConfig(mode="forward")
                with ChildProcessProbe(_workload(head, size), step, context.device, NEEDED_BYTES) as real:
                    peak = real(figure.batch_size, Shape(figure.seq_len)).peak_allocated_bytes
                more["measured_peak"] = None if peak is None else peak // MIB
            rows.append(row(cell, figure.allocated_mib, mib, **more))
    ladders = []
    for ladder in notebook.ladders:
        mode = "inference" if ladder.no_grad else "forward"
        cell = f"ladder {ladder.head} {ladder.size} {ladder.seq_len}" + (" no_grad" if ladder.no_grad else "")
        probe = SimulatedProbe(traces[ladder.head, ladder.size, mode], card, BEFORE_2_12, edit=without_workspaces)
        more = {"unit": "samples", "exact_maximum": search_simulated(probe, Shape(ladder.seq_len)).max_batch_size}
        if context.device is not None:
            context.status(f"running {cell}")
            workload = _workload(ladder.head, ladder.size)
            with ChildProcessProbe(workload, StepConfig(mode=mode), context.device, NEEDED_BYTES) as real:
                more["measured"] = last_rung(real, ladder.seq_len)
        ladders.append(row(cell, ladder.largest, last_rung(probe, ladder.seq_len), **more))
    return _reproduction(rows, ladders, models)


def _reproduction(
    figures: list[dict[str, Any]], ladders: list[dict[str, Any]], models: dict[tuple[str, str], int]
) -> Reproduction:
    """The rows with the tables and notes that are made of them."""
    notebook = published_bert_2019()
    usable = f"{format_bytes(notebook.usable_bytes)} usable of {format_bytes(notebook.total_bytes)}"
    memory = {
        "cell": [row["cell"] for row in figures],
        "published": [str(row["published"]) for row in figures],
        "ours": [str(row["ours"]) for row in figures],
        "off by": [f"{row['ratio'] - 1:+.2%}" if row["ratio"] != 1 else "0" for row in figures],
    }
    steps = {
        "cell": [row["cell"] for row in ladders],
        "published": [str(row["published"]) for row in ladders],
        "ours": [str(row["ours"]) for row in ladders],
        "exact maximum": [str(row["exact_maximum"]) for row in ladders],
    }
    if "measured_peak" in figures[0]:
        memory["measured peak"] = [
            "-" if row["measured_peak"] is None else str(row["measured_peak"]) for row in figures
        ]
        steps["measured"] = [str(row["measured"]) for row in ladders]
    tables = (
        Table(
            "BERT of 2019: MiB allocated after one forward pass on a Tesla K80, simulated",
            ("fp32, eval mode; the output and its graph are alive", usable),
            memory,
        ),
        Table(
            f"BERT of 2019: largest batch of {', '.join(map(str, RUNGS))} on a Tesla K80, simulated",
            ("fp32, eval mode, one forward pass; exact maximum: of all batch sizes", usable),
            steps,
        ),
    )
    k80, v100 = find_gpu("K80"), find_gpu("V100 16GB")
    larger = [
        f"{published} MiB for {head} {size}, which takes {models[head, size]}"
        for (head, size), published in notebook.model_mib.items()
        if published != models[head, size]
    ]
    notes = (
        'published: the notebook "Bert Memory Consumption" (krishan), run on 2019-09-18 with pytorch-transformers on '
        "PyTorch 1.2",
        "an error in the source: its text speaks of an Azure NC24s v3 with four V100s. Every out-of-memory message it "
        f"prints says {format_bytes(notebook.total_bytes)} total capacity, which is a Tesla K80's "
        f"({k80.memory_bytes:,} bytes); a V100 has {format_bytes(v100.memory_bytes)}. So this was a K80",
        "an error in the source: its ladder doubles the batch, so that an answer can be nearly half of what fits: see "
        "the exact maximum, the next size above which does not fit",
        f"an error in the source: before any forward it prints {' and '.join(larger)}. Other models were in the "
        "process; the figures that are off are off by what these left behind",
        "emulated: PyTorch 1.2's softmax, which kept its input for the backward, and its matmul, which copied its "
        "operands; the layer normalisation written out in Python of pytorch-transformers 1.0 and 1.1; cuBLAS without a "
        "workspace in PyTorch's allocator. The model is batchfinder/reproductions/bert_2019_model.py",
        "forwards of one model run one after the other in one process and share the allocator's cache, as in the "
        "notebook; each ladder starts afresh",
    )
    return Reproduction(NAME, (*figures, *ladders), tables, notes)
