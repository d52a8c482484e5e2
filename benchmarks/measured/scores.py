"""How near predicted figures come to published ones: of a source, and over all with every source weighing the same.

A row is a mapping: `published_bytes` (None where the run ran out of memory, or has no figure but `ran`),
`predicted_bytes` (None where the simulated run ran out of memory), `error` where both have a figure, `failed` where the
recording ended with an error, and `seconds`. `unsafe` says that the run would be out of memory with its estimate as the
limit, `unsafe_at_upper` that it would with the upper end of its `interval`. `limits` are those that the run was
repeated with: bytes, whether it ran, and whether the recorded step does; `reserved_bytes` is what it reserved without
one, and `caps` the limits that the estimate and the upper end of its interval set. Rows with the same `bracket` are a
size that ran and the next larger one, which did not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def of_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Of one source's rows.

    Returns:
        `rows`, those with two figures; `median` and `p90` of their absolute relative errors, `worst` and `bias`, the
        mean of the errors; `verdicts`, how many said rightly whether the run fits, of `asked`; `low`, the share of the
        figures that are below the published ones; `failed`; and `seconds`, the median of a row. Of `capped` rows, for
        which it is known whether the run goes well with its estimate as the limit or the verdict was wrong already,
        `failures` is how many do not: xMem's measure. `failures_at_upper` is the same with the upper end of the
        interval as the limit, where there is one. `expected_failures` is how many of both would be expected
        (`expected_failures`). Of `limits` that runs were repeated with, `limits_right` is how many
        of the outcomes the recorded step has as well. Of `brackets`, `hit` are those whose two verdicts are right,
        `below` those where the size that ran is said not to, and `above` the rest.
    """
    errors = [row["error"] for row in rows if "error" in row]
    asked = [row for row in rows if "predicted_bytes" in row]
    fitted = [bool(row.get("ran")) or row["published_bytes"] is not None for row in asked]
    right = sum((row["predicted_bytes"] is not None) == ran for row, ran in zip(asked, fitted, strict=True))
    scores: dict[str, Any] = {"rows": len(errors)}
    if errors:
        absolute = [abs(error) for error in errors]
        scores |= {
            "median": weighted_quantile(absolute, [1.0] * len(errors), 0.5),
            "p90": weighted_quantile(absolute, [1.0] * len(errors), 0.9),
            "worst": max(absolute),
            "bias": statistics.mean(errors),
            "low": sum(error < 0 for error in errors) / len(errors),
        }
    scores |= {"verdicts": right, "asked": len(asked), "failed": sum("failed" in row for row in rows)}
    wrong = len(asked) - right
    if any("unsafe" in row for row in asked):
        scores["capped"] = sum("unsafe" in row or "error" not in row for row in asked)
        scores["failures"] = wrong + sum(bool(row.get("unsafe")) for row in asked)
        if any("unsafe_at_upper" in row for row in asked):
            at_upper = [row.get("unsafe_at_upper", row.get("unsafe")) for row in asked]
            scores["failures_at_upper"] = wrong + sum(map(bool, at_upper))
    outcomes = [ran == said for row in rows for _, ran, said in row.get("limits", ())]
    if outcomes:
        scores |= {"limits": len(outcomes), "limits_right": sum(outcomes)}
        scores["expected_failures"] = [round(wrong + each, 1) for each in expected_failures(rows)]
    scores |= _of_brackets(asked)
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    if seconds:
        scores["seconds"] = statistics.median(seconds)
    return scores


_BANDS = (-0.05, -0.03, -0.01, 0.0)
"""How far below what a run reserved a limit may lie, for `expected_failures`."""


def expected_failures(rows: Sequence[Row]) -> tuple[float, float]:
    """How many runs would be out of memory with their estimate as the limit, and with the upper end of its interval.

    Where the run was repeated with a limit, and none in between is open, it is known. Elsewhere it is as likely as
    it was in all repeated runs whose limit was as near to what that run had reserved without one.
    """

    def band(limit: float, row: Row) -> int:
        return sum(limit / row["reserved_bytes"] - 1 >= edge for edge in _BANDS)

    rows = [row for row in rows if "caps" in row]
    outcomes: dict[int, list[bool]] = {}
    for row in rows:
        for limit, ran, _ in row["limits"]:
            outcomes.setdefault(band(limit, row), []).append(not ran)
    totals = [0.0, 0.0]
    for row in rows:
        for end, cap in enumerate(row["caps"]):
            if any(ran and limit <= cap for limit, ran, _ in row["limits"]):
                continue
            if any(not ran and limit >= cap for limit, ran, _ in row["limits"]):
                totals[end] += 1
            else:
                near = outcomes.get(band(cap, row), [cap < row["reserved_bytes"]])
                totals[end] += sum(near) / len(near)
    return totals[0], totals[1]


def _of_brackets(rows: Sequence[Row]) -> dict[str, Any]:
    """How many pairs of sizes there are, and on which side of them the largest size that is said to run lies."""
    pairs: dict[str, dict[bool, bool]] = {}
    for row in rows:
        if "bracket" in row:
            ran = bool(row.get("ran")) or row.get("published_bytes") is not None
            pairs.setdefault(row["bracket"], {})[ran] = row["predicted_bytes"] is not None
    whole = [pair for pair in pairs.values() if len(pair) == 2]
    if not whole:
        return {}
    below = sum(not pair[True] for pair in whole)
    above = sum(pair[True] and pair[False] for pair in whole)
    return {"brackets": len(whole), "hit": len(whole) - below - above, "below": below, "above": above}


def of_all(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """The same over all sources, each of which weighs the same, however many rows it has."""
    weighed = []
    for found in rows.values():
        errors = [row["error"] for row in found if "error" in row]
        weighed += [(error, 1 / len(errors)) for error in errors]
    everything = of_rows([row for found in rows.values() for row in found])
    if not weighed:
        return everything
    weights = [weight for _, weight in weighed]
    absolute = [abs(error) for error, _ in weighed]
    total = sum(weights)
    return {
        **everything,
        "median": weighted_quantile(absolute, weights, 0.5),
        "p90": weighted_quantile(absolute, weights, 0.9),
        "bias": sum(error * weight for error, weight in weighed) / total,
        "low": sum(weight for error, weight in weighed if error < 0) / total,
    }


def weighted_quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The least value such that values up to it have this share of the weight; between two such values, their mean."""
    ordered = sorted(zip(values, weights, strict=True))
    goal, passed = share * sum(weights), 0.0
    for number, (value, weight) in enumerate(ordered):
        passed += weight
        if abs(passed - goal) < 1e-9 and number + 1 < len(ordered):
            return (value + ordered[number + 1][0]) / 2
        if passed > goal:
            return value
    return ordered[-1][0]


def table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each name."""
    columns = ("median", "p90", "worst", "bias")
    heads = f"{'':<20} {'rows':>5} {' '.join(f'{each:>8}' for each in columns)} {'low':>6}"
    lines = [f"{heads} {'verdicts':>9} {'s/row':>6} {'failures':>9} {'brackets':>9}"]
    for name, score in scores.items():
        figures = " ".join(f"{score[each]:8.2%}" if each in score else f"{'':>8}" for each in columns)
        low = f"{score['low']:6.0%}" if "low" in score else f"{'':>6}"
        verdicts = f"{score['verdicts']}/{score['asked']}"
        seconds = f"{score['seconds']:6.1f}" if "seconds" in score else f"{'':>6}"
        failures = f"{score['failures']}/{score['capped']}" if "capped" in score else ""
        if "failures_at_upper" in score:
            failures = f"{score['failures']}, {score['failures_at_upper']}/{score['capped']}"
        brackets = f"{score['hit']}/{score['brackets']}" if "brackets" in score else ""
        counts = f"{verdicts:>9} {seconds} {failures:>9} {brackets:>9}".rstrip()
        lines.append(f"{name:<20} {score['rows']:>5} {figures} {low} {counts}")
    return "\n".join(lines)
