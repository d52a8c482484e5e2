"""A published figure, and what batchfinder says for the training it was measured in.

Each source has a folder here: `rows.csv` holds its figures as published, README.md where they are from and which
settings of the run were read where, and `cases.py` makes `Case`s of them with a function `cases()`.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchfinder.devices import device_for, find_gpu
from batchfinder.recording.simulation import RecordingClient
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory
from batchfinder.simulator.replay import replay
from batchfinder.simulator.steady_state import repeat_last_step
from batchfinder.simulator.trace import Trace, TraceStructure
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec

ALLOCATED = "peak allocated"
"""`torch.cuda.max_memory_allocated()`."""

RESERVED = "peak reserved"
"""`torch.cuda.max_memory_reserved()`."""


@dataclass(frozen=True)
class Case:
    """One published figure and how its training is recorded.

    Attributes:
        name: which row of the source.
        technique: `eager`, `checkpointing`, `LoRA`, `QLoRA`, `compile`, `Liger`, ...: what the row stands for.
        gpu: the card that it was measured on, by its name in the catalog.
        statistic: `ALLOCATED` or `RESERVED`.
        published_bytes: the figure; None where the run ran out of memory, or where all that is known is that it ran.
        workload: how the model is built; a builder is `module:function`, which returns a `Workload`.
        step: how the step is taken.
        batch_size: samples in a micro-batch.
        seq_len: tokens per sample; None for data of one fixed shape.
        outside_bytes: what the figure holds beside the allocator's memory, such as a CUDA context.
        without: kinds of blocks that the figure does not hold, such as `workspace`.
        empties_cache: whether the run empties the allocator's cache between steps: other segments are taken then, and
            the figure is the most reserved before and after that.
        note: what is to be known of the row, such as why it is off.
        ran: whether the run went well although there is no figure.
        context_bytes: what the CUDA context took of the card; None for what the catalog says of today's.
        other_contexts: more of them, with which the verdict is asked for as well.
        limits_tried: limits on what the allocator may reserve that the run was repeated with, and whether it ran.
        bracket: of a pair of sizes of which one ran and the next did not, what they are a pair of.
    """

    name: str
    technique: str
    gpu: str
    statistic: str
    published_bytes: int | None
    workload: WorkloadSpec
    step: StepConfig
    batch_size: int
    seq_len: int | None
    outside_bytes: int = 0
    without: tuple[str, ...] = ()
    empties_cache: bool = False
    note: str = ""
    ran: bool = False
    context_bytes: int | None = None
    other_contexts: tuple[int, ...] = ()
    limits_tried: tuple[tuple[int, bool], ...] = ()
    bracket: str = ""

    def predicted_bytes(self, trace: Trace) -> int | None:
        """The same figure of a recorded step; None where it runs out of memory on that card."""
        device = device_for(find_gpu(self.gpu))
        usable = device.usable_bytes if self.context_bytes is None else device.total_bytes - self.context_bytes
        memory = DeviceMemory(device.total_bytes, usable)
        sizes = self.sizes(trace)
        if self.empties_cache:
            return reserved_with_emptied_cache(trace.structure, sizes, CachingAllocator(memory)) + self.outside_bytes
        timeline = replay(trace.structure, sizes, CachingAllocator(memory))
        if timeline.oom is not None:
            return None
        peak = timeline.max_allocated_bytes if self.statistic == ALLOCATED else timeline.max_reserved_bytes
        return peak + self.outside_bytes

    def sizes(self, trace: Trace) -> list[int]:
        """Of the blocks of a recorded step, in bytes; 0 for those that the figure does not hold."""
        return [
            0 if kind in self.without else size for kind, size in zip(trace.structure.kinds, trace.sizes, strict=True)
        ]

    def is_unsafe(self, trace: Trace, predicted_bytes: int) -> bool:
        """Whether the run would be out of memory if the allocator could reserve no more than was predicted.

        That is what `torch.cuda.set_per_process_memory_fraction` does. Where the run was repeated with a limit, and no
        limit in between is open, it is known. Elsewhere the recorded step is replayed with a limit that is lower by as
        much as the prediction is below the figure: as if all that it is short of had been in use.
        """
        if any(ran and limit <= predicted_bytes for limit, ran in self.limits_tried):
            return False
        if any(not ran and limit >= predicted_bytes for limit, ran in self.limits_tried):
            return True
        short = max(0, (self.published_bytes or 0) - predicted_bytes)
        limit = max(1, predicted_bytes - self.outside_bytes - short)
        return replay(trace.structure, self.sizes(trace), CachingAllocator(DeviceMemory(limit, limit))).oom is not None


def reserved_with_emptied_cache(structure: TraceStructure, sizes: Sequence[int], allocator: CachingAllocator) -> int:
    """The most reserved in the recorded steps and four more, where the cache is emptied before the first and the third.

    The gradients are there when it is, as at the end of a loop's body.

    Raises:
        RuntimeError: the last step cannot be repeated, or memory runs out.
    """
    longer = repeat_last_step(structure, 4)
    if longer is None:
        raise RuntimeError("what its last step releases was not allocated in the step before")
    recorded = structure.marks[-1].step + 1
    structure, origins = longer
    starts = {step: min(mark.position for mark in structure.marks if mark.step == step) for step in range(recorded + 3)}
    emptied = {starts[recorded], starts[recorded + 2]}
    live: dict[int, Block | None] = {}
    for position, event in enumerate(structure.order):
        if position in emptied:
            allocator.empty_cache()
        if event < 0:
            allocator.free(live.pop(~event))
        else:
            live[event] = allocator.allocate(sizes[origins[event]])
    return allocator.max_reserved


def record(cases: Sequence[Case]) -> Iterable[tuple[Case, Trace | Exception]]:
    """The trace of each case, or the error that its recording ended with.

    One process has imported everything and built the first case's model; the other models are built in its forks, as
    many at a time as there are cores.
    """
    if not cases:
        return
    with contextlib.closing(RecordingClient(cases[0].workload)) as client:
        futures = []
        for case in cases:
            capability = device_for(find_gpu(case.gpu)).compute_capability
            workload = None if case.workload == client.spec else case.workload
            job = RecordingJob(case.step, capability, case.batch_size, case.seq_len, workload)
            futures.append(client.submit(job))
        for case, future in zip(cases, futures, strict=True):
            try:
                yield case, future.result()
            except Exception as error:
                yield case, error


def read_rows(source: Path) -> list[dict[str, str]]:
    """The rows of a source's rows.csv, by column; lines before the header that start with # are comments."""
    lines = (source / "rows.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
