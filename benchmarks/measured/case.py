"""A published figure, and what batchfinder says for the training it was measured in.

Each source has a folder here: `rows.csv` holds its figures as published, README.md where they are from and which
settings of the run were read where, and `cases.py` makes `Case`s of them with a function `cases()`.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from batchfinder.devices import device_for, find_gpu
from batchfinder.recording.client import RecordingClient
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.simulator.replay import Timeline, replay
from batchfinder.simulator.steady_state import repeat_last_step
from batchfinder.simulator.trace import Trace, TraceStructure
from batchfinder.stub_cards import recording_card
from batchfinder.training.spec import FAKE_DEVICE, STRATEGIES, RecordingJob, StepConfig, WorkloadSpec, is_cuda_build

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
        empties_cache: how often the run empties the allocator's cache between steps, as it does before the first one:
            other segments are taken then, and the figure is the most reserved in any of the steps.
        comes_later: whether such a run takes smaller steps first, as where the longest of many batches counts: by then
            its cache has been emptied between steps, and what the recorded first steps reserve does not count.
        less_model: whether a first reading that is taken off the figure came when the model had been moved to the card
            and the optimizer made: what the allocator had reserved then is not in the figure.
        note: what is to be known of the row, such as why it is off.
        ran: whether the run went well although there is no figure.
        total_bytes: what the card had, where the source shows it; None for what the catalog says.
        context_bytes: what the CUDA context took of the card; None for what the catalog says of today's.
        other_contexts: more of them, with which the verdict is asked for as well.
        limits_tried: limits on what the allocator may reserve that the run was repeated with, and whether it ran.
        limit_step_bytes: what such limits are whole multiples of.
        bracket: of a pair of sizes of which one ran and the next did not, what they are a pair of.
        expandable_segments: whether the run set `expandable_segments:True`.
        draws: the lengths of the run's steps, where they are drawn at random: as many draws of them, of which the
            figure is the median.
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
    empties_cache: int = 0
    comes_later: bool = False
    less_model: bool = False
    note: str = ""
    ran: bool = False
    context_bytes: int | None = None
    total_bytes: int | None = None
    other_contexts: tuple[int, ...] = ()
    limits_tried: tuple[tuple[int, bool], ...] = ()
    limit_step_bytes: float = 1
    bracket: str = ""
    expandable_segments: bool = False
    draws: tuple[tuple[int, ...], ...] = ()

    def drawn(self) -> list[tuple[int, Case]]:
        """Each of the draws as a case of its own, and how often it was drawn; itself where there are none."""
        if not self.draws:
            return [(1, self)]
        steps = {lengths: replace(self.step, lengths=lengths) for lengths in self.draws}
        return [(self.draws.count(lengths), replace(self, step=step, draws=())) for lengths, step in steps.items()]

    def predicted_bytes(self, trace: Trace, by_address: bool = True) -> int | None:
        """The same figure of a recorded step; None where it runs out of memory on that card.

        Args:
            by_address: as `AllocatorSettings` has it; by default what PyTorch did before 2.12, with which all were run.
        """
        memory, sizes = self.card(), self.sizes(trace)
        if self.empties_cache:
            allocator = self.allocator(memory, by_address)
            reserved = reserved_with_emptied_cache(
                trace.structure, sizes, allocator, self.empties_cache, comes_later=self.comes_later
            )
            return None if reserved is None else reserved + self.outside_bytes
        timeline = replay(trace.structure, sizes, self.allocator(memory, by_address))
        if timeline.oom is not None:
            return None
        peak = timeline.max_allocated_bytes if self.statistic == ALLOCATED else timeline.max_reserved_bytes
        return peak - self.taken_off(timeline) + self.outside_bytes

    def taken_off(self, timeline: Timeline) -> int:
        """What the allocator holds when the model is on the card, where the figure is less that."""
        if not self.less_model:
            return 0
        return max(stage.reserved_bytes for stage in timeline.stages if stage.stage == "model")

    def with_model(self, trace: Trace, figure: int) -> int:
        """What the allocator has reserved where the figure is this: more by what was taken off."""
        return figure + self.taken_off(replay(trace.structure, self.sizes(trace), self.allocator()))

    def allocator(self, memory: DeviceMemory | None = None, by_address: bool = True) -> CachingAllocator:
        """With the run's settings, for `memory` or a card that is never full."""
        settings = AllocatorSettings(expandable_segments=self.expandable_segments, by_address=by_address)
        return CachingAllocator(memory, settings)

    def card(self) -> DeviceMemory:
        """What its card has, and what the CUDA context and other GPUs' communicators leave."""
        device = device_for(find_gpu(self.gpu), self.context_bytes)
        if self.total_bytes is not None:
            taken = device.total_bytes - device.usable_bytes
            device = replace(device, total_bytes=self.total_bytes, usable_bytes=self.total_bytes - taken)
        if self.step.gpus > 1:
            strategy = self.step.strategy
            device = device.among_others(STRATEGIES[strategy].communicators if strategy is not None else 1)
        return DeviceMemory(device.total_bytes, device.usable_bytes)

    def sizes(self, trace: Trace) -> list[int]:
        """Of the blocks of a recorded step, in bytes; 0 for those that the figure does not hold."""
        return [
            0 if kind in self.without else size for kind, size in zip(trace.structure.kinds, trace.sizes, strict=True)
        ]

    def is_unsafe(self, trace: Trace, predicted_bytes: int, cap_bytes: int | None = None) -> bool:
        """Whether the run would be out of memory if the allocator could reserve no more than was predicted.

        That is what `torch.cuda.set_per_process_memory_fraction` does. Where the run was repeated with a limit, and no
        limit in between is open, it is known. Elsewhere the recorded step is replayed with a limit that is lower by as
        much as the prediction is below the figure: as if all that it is short of had been in use.

        Args:
            cap_bytes: what it could reserve, where that is not the prediction; as the figure counts, like that.
        """
        limit = self.limit_of(self.with_model(trace, predicted_bytes if cap_bytes is None else cap_bytes))
        if any(ran and tried <= limit for tried, ran in self.limits_tried):
            return False
        if any(not ran and tried >= limit for tried, ran in self.limits_tried):
            return True
        short = max(0, (self.published_bytes or 0) - predicted_bytes)
        return not self.runs_within(trace, limit - short)

    def limit_of(self, predicted_bytes: int) -> int:
        """The limit that is set for an estimate."""
        return int(round(predicted_bytes / self.limit_step_bytes) * self.limit_step_bytes)

    def runs_within(self, trace: Trace, limit_bytes: int) -> bool:
        """Whether a recorded step runs where the allocator may reserve so much, all that the figure holds counted."""
        limit, sizes = min(max(1, limit_bytes - self.outside_bytes), self.card().capacity_bytes), self.sizes(trace)
        if self.empties_cache:
            allocator = self.allocator()
            reserved = reserved_with_emptied_cache(
                trace.structure, sizes, allocator, self.empties_cache, limit, self.comes_later
            )
            return reserved is not None
        return replay(trace.structure, sizes, self.allocator(DeviceMemory(limit, limit))).oom is None


_STEPS_BETWEEN = 2  # and what is reserved no longer changes


def reserved_with_emptied_cache(
    structure: TraceStructure,
    sizes: Sequence[int],
    allocator: CachingAllocator,
    times: int,
    limit_bytes: int | None = None,
    comes_later: bool = False,
) -> int | None:
    """The most reserved in steps, where the cache is emptied before the first one and so many times between them.

    The gradients are there when it is, as at the end of a loop's body. None where memory runs out; `limit_bytes` is all
    that there is from the first step on, or where it comes later from when the cache is emptied between steps.

    Raises:
        RuntimeError: the last step cannot be repeated.
    """
    longer = repeat_last_step(structure, times * _STEPS_BETWEEN)
    if longer is None:
        raise RuntimeError("what its last step releases was not allocated in the step before")
    recorded = structure.marks[-1].step + 1
    structure, origins = longer
    starts: dict[int, int] = {}
    for mark in structure.marks:
        starts[mark.step] = min(mark.position, starts.get(mark.step, mark.position))
    emptied = [starts[0], *(starts[recorded + number * _STEPS_BETWEEN] for number in range(times))]
    if comes_later:
        del emptied[0]
    live: dict[int, Block | None] = {}
    for position, event in enumerate(structure.order):
        if position in emptied:
            allocator.empty_cache()
        if position == emptied[0]:
            allocator.reset_peak()
            allocator.taken.limit = limit_bytes or allocator.taken.limit
        if event < 0:
            allocator.free(live.pop(~event))
            continue
        try:
            live[event] = allocator.allocate(sizes[origins[event]])
        except SimulatedOutOfMemory:
            return None
    return allocator.max_reserved


def as_pytorch_sums_today(builder: str, arguments: dict[str, Any]) -> Any:
    """A case's workload for PyTorch's CUDA build, in which autograd sums gradients anew as of 2.10."""
    module, _, function = builder.partition(":")
    return replace(getattr(import_module(module), function)(**arguments), sums_in_place=False)


def record(cases: Sequence[Case], recorder: str = FAKE_DEVICE) -> Iterable[tuple[Case, Trace | Exception]]:
    """The trace of each case, or the error that its recording ended with.

    One process has imported everything and built the first case's model; the other models are built in its forks, as
    many at a time as there are cores.

    Args:
        recorder: by PyTorch's CUDA build gradients are summed as it does, whatever the PyTorch of the figure did.
    """
    if not cases:
        return
    if is_cuda_build(recorder):
        name = f"{__name__}:{as_pytorch_sums_today.__name__}"
        specs = [{"builder": case.workload.builder, "arguments": case.workload.arguments} for case in cases]
        cases = [replace(case, workload=WorkloadSpec(name, spec)) for case, spec in zip(cases, specs, strict=True)]
    with contextlib.closing(RecordingClient(cases[0].workload, recorder=recorder)) as client:
        futures = []
        for case in cases:
            device = device_for(find_gpu(case.gpu))
            workload = None if case.workload == client.spec else case.workload
            card = recording_card(device) if is_cuda_build(recorder) else ""
            job = RecordingJob(case.step, device.compute_capability, case.batch_size, case.seq_len, workload, card)
            futures.append(client.submit(job))
        for case, future in zip(cases, futures, strict=True):
            try:
                yield case, future.result().on(device_for(find_gpu(case.gpu)).reduces_on)
            except Exception as error:
                yield case, error


def read_rows(source: Path) -> list[dict[str, str]]:
    """The rows of a source's rows.csv, by column; lines before the header that start with # are comments."""
    lines = (source / "rows.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
