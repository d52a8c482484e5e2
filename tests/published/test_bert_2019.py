"""Seventeen figures that a Tesla K80 printed in 2019, and the eight batch sizes at which its ladders ended."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block
from batchfinder.simulator.memory import DeviceMemory, SimulatedOutOfMemory
from batchfinder.simulator.replay import replay
from batchfinder.simulator.source import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.job import RecordingJob
from batchfinder.tracing.recorder import Recorder
from batchfinder.units import GIB, MIB

TABLE = tomllib.loads((Path(__file__).parents[1] / "data" / "bert_2019.toml").read_text())
K80 = DeviceMemory(int(TABLE["total_gib"] * GIB), int(TABLE["usable_gib"] * GIB))
MODELS = (("classification", "base"), ("classification", "large"), ("pretraining", "base"), ("pretraining", "large"))
LADDER = (4, 8, 16, 32, 64, 128, 256, 512)
Sources = dict[tuple[str, str, str], TraceSource]


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    """Recordings of the four models, by head, size and mode."""
    recorders = {
        model: Recorder(WorkloadSpec("tests.builders.bert_2019:build", dict(zip(("head", "size"), model, strict=True))))
        for model in MODELS
    }

    def submit(model: tuple[str, str], mode: str, batch_size: int, seq_len: int | None) -> Future[Trace]:
        return recorders[model].submit(RecordingJob({"mode": mode}, (3, 7), batch_size, seq_len))

    by_model = {
        (*model, mode): TraceSource(partial(submit, model, mode), [128, 512] if mode == "forward" else [512])
        for model in MODELS
        for mode in ("forward", "inference")
    }
    yield by_model
    for recorder in recorders.values():
        recorder.close()


def without_workspaces(trace: Trace) -> Trace:
    """The trace as torch 1.2 had it, whose cuBLAS took no memory from PyTorch's allocator."""
    kinds = trace.structure.kinds
    return replace(trace, sizes=tuple(0 if k == "workspace" else n for k, n in zip(kinds, trace.sizes, strict=True)))


def run_notebook(source: TraceSource, cells: list[tuple[int, int]]) -> list[int]:
    """Each forward's allocated MiB, one after the other in one process: the allocator keeps its cache between them.

    As in the notebook, a ladder of batch sizes goes on until one does not fit.
    """
    allocator = CachingAllocator(K80)
    first = without_workspaces(source.at(*cells[0])).structure
    (start,) = (mark.position for mark in first.marks if mark.stage == "batch")
    parameters = source.at(*cells[0]).sizes
    for event in first.order[:start]:
        allocator.allocate(parameters[event])
    figures = []
    following = [*cells[1:], (0, 0)]
    for (batch_size, seq_len), (_, next_len) in zip(cells, following, strict=True):
        figures.append(run_forward(allocator, without_workspaces(source.at(batch_size, seq_len)), start))
        if batch_size > 1 and next_len != seq_len:
            with pytest.raises(SimulatedOutOfMemory):
                run_forward(allocator, without_workspaces(source.at(2 * batch_size, seq_len)), start)
    return figures


def run_forward(allocator: CachingAllocator, trace: Trace, start: int) -> int:
    """MiB allocated (rounded down, as the notebook does) at the end of a forward; then all but the model is freed."""
    order, marks = trace.structure.order, trace.structure.marks
    live: dict[int, Block | None] = {}
    try:
        for event in order[start : marks[-1].position]:
            if event >= 0:
                live[event] = allocator.allocate(trace.sizes[event])
            else:
                allocator.free(live.pop(~event))
        return allocator.allocated // MIB
    finally:
        for block in live.values():
            allocator.free(block)


def figures(sources: Sources) -> dict[tuple[str, str, int, int], tuple[int, int]]:
    """Published and simulated MiB of each of the table's cells."""
    found = {}
    for model in MODELS:
        rows = [row for row in TABLE["forward"] if tuple(row[:2]) == model]
        ours = run_notebook(sources[(*model, "forward")], [(row[2], row[3]) for row in rows])
        found |= {tuple(row[:4]): (row[4], mib) for row, mib in zip(rows, ours, strict=True)}
    return found


def test_figures(sources: Sources) -> None:
    """All 17 figures are met: within 1 %, half of them within 0.4 %; those of a fresh process's models to the MiB."""
    cells = figures(sources)
    assert len(cells) == 17
    deviations = {cell: ours / published - 1 for cell, (published, ours) in cells.items()}
    assert max(map(abs, deviations.values())) < 0.004, deviations
    assert statistics.median(map(abs, deviations.values())) < 0.004, deviations
    # The notebook had other models in the process before these two: it says 425 MB for a model of 421.
    leftovers = {("pretraining", "base", 4, 512), ("pretraining", "base", 8, 512)}
    assert {cell for cell, (published, ours) in cells.items() if published != ours} <= leftovers, cells


@pytest.mark.parametrize(("head", "size", "seq_len", "no_grad", "published"), TABLE["ladder"])
def test_ladders(sources: Sources, head: str, size: str, seq_len: int, no_grad: bool, published: int) -> None:
    """Doubling the batch size from 4 ends where it ended on the K80."""
    source = sources[head, size, "inference" if no_grad else "forward"]

    def fits(batch_size: int) -> bool:
        trace = without_workspaces(source.at(batch_size, seq_len))
        return replay(trace.structure, trace.sizes, CachingAllocator(K80)).fits

    largest = 0
    for batch_size in LADDER:
        if not fits(batch_size):
            break
        largest = batch_size
    assert largest == published
