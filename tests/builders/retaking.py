"""A recorded step that never settles on a card of 20 MiB."""

from __future__ import annotations

from concurrent.futures import Future

from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import MIB


def retaking(batch_size: int, seq_len: int | None) -> Future[Trace]:
    """Steps that take 8 MiB in small blocks, give them back, and then take a large one of 1 MiB per sample."""
    order: list[int] = []
    marks = [StageMark(0, -1, "model")]
    for step in (0, 1):
        marks.append(StageMark(len(order), step, "forward"))
        small, large = range(9 * step, 9 * step + 8), 9 * step + 8
        order.extend([*small, *(~block for block in small), large, ~large])
        marks += [StageMark(len(order), step, "loss"), StageMark(len(order), step, "optimizer")]
    marks.append(StageMark(len(order), 1, "end"))
    operators = (*["small"] * 8, "large") * 2
    structure = TraceStructure(tuple(order), tuple(marks), operators, ("",) * 18, ("",) * 18)
    future: Future[Trace] = Future()
    future.set_result(Trace(batch_size, seq_len, structure, (*[MIB] * 8, batch_size * MIB) * 2, ()))
    return future
