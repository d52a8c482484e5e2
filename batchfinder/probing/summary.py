"""What came of one shape, in words."""

from __future__ import annotations

from batchfinder.accumulation import AccumulationPlan
from batchfinder.outcome import Outcome
from batchfinder.units import format_bytes


def summary(
    outcome: Outcome, plan: AccumulationPlan | None, limit_bytes: int, reserve_bytes: int, seconds: float
) -> str:
    """Say what was found, at what peak, with what headroom, how it is accumulated, and what it took.

    Args:
        outcome: what was found; its source is `cache` where nothing was searched.
        plan: how the target is made up; None without one.
        limit_bytes: what training could take.
        reserve_bytes: what of it was kept free.
        seconds: what it took.
    """
    length = "" if outcome.shape.seq_len is None else f" at seq_len {outcome.shape.seq_len}"
    parts = [f"batch size {outcome.max_batch_size}{length}"]
    peak = None
    if outcome.measurement is not None:
        seen = outcome.measurement
        peak = seen.peak_allocated_bytes if seen.peak_reserved_bytes is None else seen.peak_reserved_bytes
    parts.append(
        f"limit {format_bytes(limit_bytes)}"
        if peak is None
        else f"peak {format_bytes(peak)} of {format_bytes(limit_bytes)}"
    )
    if reserve_bytes:
        parts.append(f"headroom {format_bytes(reserve_bytes)}")
    if plan is not None:
        parts.append(f"accumulation {plan}")
    probes = sum(trial.batch_size > 0 for trial in outcome.trials)
    how = "from the cache" if outcome.source == "cache" and not probes else f"{probes} probe{'s' * (probes != 1)}"
    if outcome.source == "cache" and probes:
        how = f"from the cache, certified with {how}"
    parts.append(f"{how} in {seconds:.2f} s")
    return "; ".join(parts)
