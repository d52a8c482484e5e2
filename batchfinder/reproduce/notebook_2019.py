"""The notebook of 2019 on a simulated K80: forwards one after the other in one process, and ladders of batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchfinder.outcome import Shape
from batchfinder.published.bert_2019 import RUNGS, Figure
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block
from batchfinder.simulator.memory import DeviceMemory, SimulatedOutOfMemory
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.source import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.units import MIB


class Torch12Probe(SimulatedProbe):
    """A probe without the cuBLAS workspaces, which torch 1.2 did not take from its own allocator."""

    def trace(self, batch_size: int, shape: Shape) -> Trace:
        """The step's trace at one size."""
        return without_workspaces(super().trace(batch_size, shape))


def without_workspaces(trace: Trace) -> Trace:
    """A trace whose cuBLAS workspaces take nothing."""
    kinds = trace.structure.kinds
    return replace(trace, sizes=tuple(0 if k == "workspace" else n for k, n in zip(kinds, trace.sizes, strict=True)))


def last_rung(probe: SimulatedProbe, seq_len: int) -> int:
    """The last of the ladder's batch sizes before the first that does not fit; 0 if that is the first."""
    largest = 0
    for batch_size in RUNGS:
        if not probe(batch_size, Shape(seq_len)).fits:
            break
        largest = batch_size
    return largest


class NotebookProcess:
    """One model on the card and its forwards, whose allocator keeps its cache from one to the next.

    Args:
        traces: of the model's forward, its graph kept.
        memory: the card.
    """

    def __init__(self, traces: TraceSource, memory: DeviceMemory) -> None:
        self._traces = traces
        self._allocator = CachingAllocator(memory)

    def model_mib(self, seq_len: int) -> int:
        """Move the model to the card: MiB allocated then, rounded down.

        Args:
            seq_len: of any trace; the model is the same in all.
        """
        trace = self._trace(2, seq_len)
        for block in trace.structure.order[: _start(trace)]:
            self._allocator.allocate(trace.sizes[block])
        return self._allocator.allocated // MIB

    def allocated_mib(self, figures: Sequence[Figure]) -> list[int]:
        """MiB allocated after each forward, rounded down as the notebook does.

        Its batch sizes go up until one does not fit, and then to the next length: a failure leaves its mark on the
        cache, so it is run here too.
        """
        found = []
        for figure, following in zip(figures, [*figures[1:], None], strict=True):
            found.append(self._forward(figure.batch_size, figure.seq_len))
            last = following is None or following.seq_len != figure.seq_len
            if last and figure.batch_size > 1:
                self._forward(2 * figure.batch_size, figure.seq_len)
        return found

    def _trace(self, batch_size: int, seq_len: int) -> Trace:
        return without_workspaces(self._traces.at(batch_size, seq_len))

    def _forward(self, batch_size: int, seq_len: int) -> int:
        """MiB allocated at the end of a forward, or where the card was full; then all but the model is freed."""
        trace = self._trace(batch_size, seq_len)
        end = trace.structure.marks[-1].position
        live: dict[int, Block | None] = {}
        try:
            for event in trace.structure.order[_start(trace) : end]:
                if event >= 0:
                    live[event] = self._allocator.allocate(trace.sizes[event])
                else:
                    self._allocator.free(live.pop(~event))
        except SimulatedOutOfMemory:
            pass
        allocated = self._allocator.allocated // MIB
        for block in live.values():
            self._allocator.free(block)
        return allocated


def _start(trace: Trace) -> int:
    """Where the batch begins: all before is the model's."""
    (start,) = (mark.position for mark in trace.structure.marks if mark.stage == "batch")
    return start
