"""What a person reads when a size was found: one line per length."""

from __future__ import annotations

from batchfinder.accumulation import AccumulationPlan
from batchfinder.outcome import Outcome
from batchfinder.probing.summary import summary


def summary_line(
    stage: str,
    outcome: Outcome,
    plan: AccumulationPlan | None,
    limit_bytes: int,
    reserve_bytes: int,
    seconds: float,
) -> str:
    """Say what was found, at what peak, with what headroom, how it is accumulated, and what it took.

    Args:
        stage: `train`, `validate`, `test` or `predict`.
        outcome: what was found; its source is `cache` where nothing was searched.
        plan: how the target is made up; None without one.
        limit_bytes: what training could take.
        reserve_bytes: what of it was kept free.
        seconds: what it took.
    """
    return f"BatchFinder: {stage} {summary(outcome, plan, limit_bytes, reserve_bytes, seconds)}."
