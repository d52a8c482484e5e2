"""The JSON file of results, the figures that sum it up, and the table printed at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchfinder.devices import driver_version, host_name
from batchfinder.measure.child_probe import GpuFacts
from batchfinder.units import format_bytes
from batchfinder.versions import installed

DRY_RUN = "dry run, nothing measured"
_KINDS = ("allocated", "reserved")
_VERSIONS = ("torch", "transformers", "pytorch-lightning", "triton", "tenacity", "batchfinder")
Rows = list[list[str]]


class ResultFile:
    """A JSON file, complete on disk whenever something has been added to the result.

    Args:
        path: of the file; its folder is made.
        result: JSON values; changed by the checks, which then `save`.
    """

    def __init__(self, path: Path, result: dict[str, Any]) -> None:
        self.path = path
        self.result = result
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        """Replace the file."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def hardware(facts: GpuFacts | None) -> dict[str, Any]:
    """This machine's CPU, GPU and driver; no GPU in a dry run."""
    gpu = None if facts is None else {key: value for key, value in asdict(facts).items() if key != "versions"}
    return {"cpu": host_name(), "cores": os.cpu_count(), "gpu": gpu, "driver": driver_version()}


def versions(facts: GpuFacts | None) -> dict[str, str]:
    """Versions of Python, of the packages that take part and, but in a dry run, of CUDA."""
    found = {"python": platform.python_version(), **dict.fromkeys(_VERSIONS, "not installed"), **installed(*_VERSIONS)}
    return {**found, **({} if facts is None else facts.versions)}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Errors of the predictions in per cent of what was measured. Stand-ins do not count."""
    measured = [cell for cell in result["cells"] if "measured" in cell and not cell["stand_in"]]
    found: dict[str, Any] = {"cells_measured": len(measured)}
    for kind in _KINDS:
        errors = [abs(_ratio(cell, kind) - 1) * 100 for cell in measured]
        if errors:
            found[f"{kind}_error_percent"] = _median_and_max(errors)
    maxima = [row for row in result["maxima"] if "true" in row and not row["stand_in"]]
    found["maxima_measured"] = len(maxima)
    if maxima:
        errors = [abs(row["predicted"] - row["true"]) / max(1, row["true"]) * 100 for row in maxima]
        found["maxima_error_percent"] = _median_and_max(errors)
    return found


def _median_and_max(errors: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(errors), 3), "max": round(max(errors), 3)}


def _ratio(cell: dict[str, Any], kind: str) -> float:
    """Predicted over measured."""
    return float(cell["predicted"][f"peak_{kind}_bytes"] / cell["measured"][f"peak_{kind}_bytes"])


def has_failed(result: dict[str, Any]) -> bool:
    """Whether a check, a row or a test ended with an error; a row skipped for want of memory did not."""
    rows = [row for part in ("cells", "maxima", "traces", "callback") for row in result[part]]
    return bool(result["errors"] or result["tests"].get("not_passed") or any("error" in row for row in rows))


def report(result: dict[str, Any]) -> str:
    """The result, which has its summary, as text."""
    parts = [_head(result)]
    parts += [_table("cells: peak allocated, peak reserved", _cells(result["cells"]))] if result["cells"] else []
    parts += [_table("largest batch", _maxima(result["maxima"]))] if result["maxima"] else []
    parts += [_traces(result["traces"])] if result["traces"] else []
    parts += [_table("callback", _callback(result["callback"]))] if result["callback"] else []
    parts += [_tests(result["tests"])] if result["tests"] else []
    parts += [f"not reached: {', '.join(result['not_reached'])}"] if result["not_reached"] else []
    parts += [f"failed: {row['what']}: {row['error']}" for row in result["errors"]]
    parts.append(_last(result))
    return "\n\n".join(parts)


def _head(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    where = f"predicted for {result['predicted_for']['name']}, {result['config']['minutes']} minutes"
    return f"{DRY_RUN + '; ' if result['dry_run'] else ''}{where}\n{versions}"


def _last(result: dict[str, Any]) -> str:
    if result["dry_run"]:
        return f"{DRY_RUN}: figures beside a prediction are a stand-in's on the CPU, not a GPU's"
    return "\n".join(f"{name.replace('_', ' ')}: {_flat(value)}" for name, value in result["summary"].items())


def _flat(value: Any) -> str:
    return ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)


def _cells(rows: list[dict[str, Any]]) -> Rows:
    table = [["cell", "predicted", "measured", "ratio", "predicted", "measured", "ratio"]]
    for row in rows:
        line = [row["name"]]
        for kind in _KINDS:
            key = f"peak_{kind}_bytes"
            line.append(format_bytes(row["predicted"][key]) if "predicted" in row else "")
            line.append(format_bytes(row["measured"][key]) if "measured" in row else "")
            line.append(f"{_ratio(row, kind):.4f}" if "measured" in row else "")
        table.append(line + _remark(row))
    return table


def _maxima(rows: list[dict[str, Any]]) -> Rows:
    table = [["step", "budget", "expandable", "predicted", "true", "predicted, no retries", "true, no retries"]]
    for row in rows:
        budget = format_bytes(row["budget_bytes"]) if "budget_bytes" in row else ""
        names = ("predicted", "true", "predicted_without_retries", "true_without_retries")
        figures = [str(row.get(name, "")) for name in names]
        table.append([row["name"], budget, "yes" if row["expandable_segments"] else "no", *figures, *_remark(row)])
    return table


def _traces(rows: list[dict[str, Any]]) -> str:
    table = [["trace", "requests", "recorded", "matched", "missed", "bytes missed at the peak", "too many", "against"]]
    missed = []
    for row in rows:
        if "requests" not in row:
            table.append([row["name"], *[""] * 6, *_remark(row)])
            continue
        figures = (row["requests"]["real"], row["requests"]["recorded"], row["matched"], row["missed"]["count"])
        at_peak = format_bytes(row["at_the_real_peak"]["missed_bytes"])
        line = [row["name"], *map(str, figures), at_peak, str(row["too_many"]["count"]), row["against"]]
        table.append(line + _remark({"stand_in": row["stand_in"]}))
        for one in row["missed"]["largest"][:4]:
            size = f"{one['times']} x {format_bytes(one['bytes'])}"
            missed.append(f"  {row['name']}: {size} after {one['operator']} in {one['stage']} {one['where']}".rstrip())
    return "\n".join([_table("recorded steps beside the allocator's history", table), *missed])


def _callback(rows: list[dict[str, Any]]) -> Rows:
    names = ("batch_size", "probes", "out_of_memory", "seconds", "losses_equal", "weights_equal", "answer_trains")
    table = [["case", *(name.replace("_", " ") for name in names), "second start's probes"]]
    for row in rows:
        again = str(row["second_start"]["probes"]) if "second_start" in row else ""
        table.append([row["name"], *(str(row.get(name, "")) for name in names), again, *_remark(row)])
    return table


def _tests(tests: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tests["counts"].items()) or "none ran"
    others = [f"  {outcome}: {name}" for name, outcome in tests["not_passed"].items()]
    return "\n".join([f"tests marked gpu: {counts}{'' if tests['ended'] else ' before the time was over'}", *others])


def _remark(row: dict[str, Any]) -> list[str]:
    words = [str(row[name]).strip().splitlines()[-1][:120] for name in ("skipped", "error") if row.get(name)]
    return ["; ".join([*(["stand-in"] if row.get("stand_in") else []), *words])]


def _table(title: str, rows: Rows) -> str:
    widths = [max(len(row[n]) if n < len(row) else 0 for row in rows) for n in range(max(map(len, rows)))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return "\n".join([title, *lines])
