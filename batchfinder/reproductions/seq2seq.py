"""`reproduce seq2seq`: the thread "High GPU memory usage problem", stage by stage through two training steps."""

from __future__ import annotations

from typing import Any

from batchfinder.measure.child_probe import ChildProcessProbe
from batchfinder.report.table import Table
from batchfinder.reproductions.bert_2019 import without_workspaces
from batchfinder.reproductions.published import Context, Reproduction, published_seq2seq, row
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import SMALL_BLOCK_BYTES, Block, DeviceMemory, round_up
from batchfinder.simulator.replay import Timeline, replay
from batchfinder.simulator.segments import CudaMallocSegments, RisingAddresses
from batchfinder.simulator.steady_state import smallest_usable_bytes
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB, KIB, MIB, format_bytes

_LARGE_STEP_BYTES = 128 * KIB  # kRoundLarge
_SMALL_SEGMENT_BYTES = MIB  # kSmallAlloc


class Allocator2018(CachingAllocator):
    """The caching allocator of PyTorch 0.4 and 1.0.

    It rounds large blocks to 128 KiB, where today's rounds to 512 B, and takes each large segment as large as its
    block. The other rules are today's: best fit, split if more than 1 MiB is left of a large block, merge free
    neighbours. Source: `round_size` and `malloc` in
    https://github.com/pytorch/pytorch/blob/v1.0.0/aten/src/THC/THCCachingAllocator.cpp (read in a copy of 2018).

    Args:
        memory: the card; None for one that is never full.
    """

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        super().__init__(memory)
        self._segments = CudaMallocSegments(
            self.taken,
            lambda size: _SMALL_SEGMENT_BYTES if size <= SMALL_BLOCK_BYTES else size,
            RisingAddresses(),  # where the driver of 2018 put segments is not known
        )

    def allocate(self, nbytes: int, stream: int = 0) -> Block | None:
        """Hand out a block, as `CachingAllocator.allocate` does."""
        return super().allocate(nbytes if nbytes < SMALL_BLOCK_BYTES else round_up(nbytes, _LARGE_STEP_BYTES), stream)


NAME = "seq2seq"
COUNTERS = ("allocated", "max_allocated", "reserved", "max_reserved")
LARGEST = "step 1 optimizer max_allocated"
"""The cell that a measured peak stands beside: nothing comes after it."""
SMALLEST = "smallest card"
WORKLOAD = WorkloadSpec("batchfinder.reproductions.models:build_seq2seq")
# The thread names no card. Nothing in this model depends on which it is but the cuBLAS workspaces, which are left out.
_CAPABILITY = (6, 1)
_HIDDEN, _FP32_BYTES = 1000, 4
_CUDNN = "aten._cudnn_rnn.default"


NEEDED_BYTES = 5 * GIB
"""Somewhat more than the most that the thread's process reserved, 4,468 MiB, for today's cuBLAS workspaces."""


def reproduce(context: Context) -> Reproduction:
    """Find all four counters after each stage of both steps, and the smallest card."""
    thread = published_seq2seq()
    context.status("recording the model of the thread")
    recorded = context.source(WORKLOAD, StepConfig(), _CAPABILITY, []).recorded(thread.batch_size, thread.length)
    trace = without_workspaces(recorded)
    timeline = replay(trace.structure, trace.sizes, Allocator2018())
    measured = None
    if context.device is not None:
        context.status("training the model of the thread")
        with ChildProcessProbe(WORKLOAD, StepConfig(), context.device, NEEDED_BYTES) as probe:
            measured = probe(thread.batch_size, Shape(thread.length)).peak_allocated_bytes
    smallest = smallest_usable_bytes(trace.structure, trace.sizes, AllocatorSettings())
    rows = []
    for published in thread.stages:
        # Our counters after the stage; before the first one there is the model alone.
        wanted = (-1, "model") if published.stage == "begin" else (published.step, published.stage)
        (ours,) = (stage for stage in timeline.stages if (stage.step, stage.stage) == wanted)
        for counter in COUNTERS:
            cell = f"step {published.step} {published.stage} {counter}"
            more: dict[str, Any] = {"unit": "MiB"}
            if context.device is not None and cell == LARGEST:
                more["measured"] = None if measured is None else round(measured / MIB)
            rows.append(row(cell, getattr(published, counter), round(getattr(ours, f"{counter}_bytes") / MIB), **more))
    return _reproduction(rows, trace, timeline, smallest)


def _reproduction(rows: list[dict[str, Any]], trace: Trace, timeline: Timeline, smallest: int) -> Reproduction:
    """The rows with the tables and notes that are made of them."""
    thread = published_seq2seq()
    conditions = f"fp32, Adam, batch size {thread.batch_size}, {thread.length} words on both sides; MiB"
    by_cell = {row["cell"]: row for row in rows}
    largest = by_cell[LARGEST]
    beside = (f"max allocated of both steps, measured: {largest['measured'] or '-'}",) if "measured" in largest else ()
    tables = []
    for title, counters, more in (
        ("A sequence-to-sequence model with attention: allocated after each stage, simulated", COUNTERS[:2], beside),
        ("The same: reserved after each stage, simulated", COUNTERS[2:], ()),
    ):
        off = [row["ratio"] - 1 for row in rows if row["cell"].rpartition(" ")[2] in counters]
        columns = {"stage": [f"step {figures.step} {figures.stage}" for figures in thread.stages]}
        for counter in counters:
            heading = counter.replace("_", " ")
            cells = [by_cell[f"{stage} {counter}"] for stage in columns["stage"]]
            columns[f"{heading}, published"] = [str(cell["published"]) for cell in cells]
            columns[f"{heading}, ours"] = [str(cell["ours"]) for cell in cells]
        tables.append(Table(title, (conditions, f"off by {max(off, key=abs):+.2%} at most", *more), columns))
    # The largest block that a module made; of cuDNN's forward that is its reserve space.
    logits = max(n for n, module in zip(trace.sizes, trace.structure.modules, strict=True) if module == "logits")
    reserve = max(n for n, made_by in zip(trace.sizes, trace.structure.operators, strict=True) if made_by == _CUDNN)
    tanh = thread.batch_size * thread.length * _HIDDEN * _FP32_BYTES
    peak = timeline.allocated_peak
    assert peak is not None
    first, second = (by_cell[f"step {step} optimizer max_allocated"]["ours"] for step in (0, 1))
    today = replay(trace.structure, trace.sizes, CachingAllocator())
    notes = (
        f'published: the thread "{thread.source.partition(",")[0]}" on discuss.pytorch.org '
        "(https://discuss.pytorch.org/t/high-gpu-memory-usage-problem/34694), with the PyTorch of that time; it names "
        "no card",
        f"what it shows: the peak comes in step {peak.step}, {peak.stage}, when Adam's state is there. A tool that "
        f"probes one step finds {first} MiB, and the second step takes {second}: {1 - first / second:.0%} too little",
        "what it shows: parameters and activations are not the peak. The backward begins with the gradients of the "
        f"log-softmax and of the logits, {format_bytes(logits)} each, while the forward's buffers are still there",
        "what it shows: zero_grad frees nothing where it fills the gradients with zeros; and what a variable holds "
        f"stays: {format_bytes(logits)} of logits, until the next forward puts others in their place",
        "what it shows: the highest reserved figure is not what a step needs, as the allocator frees its cache before "
        f"it gives up. With today's allocator this step reserves {format_bytes(today.max_reserved_bytes)}, of which "
        f"{format_bytes(today.max_allocated_bytes)} is allocated, and runs on {format_bytes(smallest)} beside the CUDA "
        "context. A reply in the thread measured a ResNet-50 that reserved 6220 MB and ran as well on 900 MB",
        "emulated: the allocator of PyTorch 1.0, which rounded large blocks up to 128 KiB; its GRU cell, which kept a "
        "workspace of 5 numbers per unit and not the products that go into it; Adam parameter by parameter; zero_grad "
        "in place; cuBLAS without a workspace in PyTorch's allocator. The model is "
        "batchfinder/reproductions/models.py",
        "chosen: the mask and the lengths are of full sentences, so packing copies all; the target's words are "
        "embedded at once; states and contexts are stacked after the last step, and alive with the keys until the "
        "logits are made",
        f"where ours is off: from the forward to the backward ours has {format_bytes(tanh)} less, one buffer of "
        f"[{thread.batch_size}, {thread.length}, {_HIDDEN}]. Within the forward the most is the same, so the script "
        "kept for its backward a buffer of that size, such as the keys, that is given back here when the forward ends",
        "modelled: cuDNN's reserve space of the encoder, "
        f"{format_bytes(reserve)}, 6 numbers per unit, step and direction, as users saw it in 2017; the "
        "figures above agree with it",
    )
    least = row(SMALLEST, None, round(smallest / MIB), unit="MiB")
    return Reproduction(NAME, (*rows, least), tuple(tables), notes)
