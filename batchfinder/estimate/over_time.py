"""What memory is for, event by event through a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchfinder.estimate.kinds import NAMES, kind_of
from batchfinder.simulator.trace import Mark, Trace


@dataclass(frozen=True)
class OverTime:
    """Bytes that tensors hold, after each event.

    Attributes:
        by_kind: one figure per event, by kind, in the order in which kinds are shown; kinds that never hold anything
            are left out.
        marks: where each stage starts.
        peak: the event after which tensors hold most; the first such one.
        peak_bytes: what they hold then.
    """

    by_kind: Mapping[str, tuple[int, ...]]
    marks: tuple[Mark, ...]
    peak: int
    peak_bytes: int


def over_time(trace: Trace) -> OverTime:
    """Sum what is alive by kind after each event.

    Args:
        trace: the step.
    """
    now = dict.fromkeys(NAMES, 0)
    series: dict[str, list[int]] = {kind: [] for kind in now}
    totals: list[int] = []
    total = 0
    for event in trace.structure.order:
        block = event if event >= 0 else ~event
        change = trace.sizes[block] if event >= 0 else -trace.sizes[block]
        now[kind_of(trace, block)] += change
        total += change
        totals.append(total)
        for kind, size in now.items():
            series[kind].append(size)
    peak = max(range(len(totals)), key=totals.__getitem__, default=0)
    return OverTime(
        by_kind={kind: tuple(sizes) for kind, sizes in series.items() if any(sizes)},
        marks=trace.structure.marks,
        peak=peak,
        peak_bytes=max(totals, default=0),
    )
