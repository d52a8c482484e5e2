"""(d) The callback on a real trainer, and on what it is tried."""

from __future__ import annotations

from typing import Any

from batchfinder.units import GIB
from benchmarks.cuda_parts.check import Check

NAME = "callback"

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What `torch.use_deterministic_algorithms` asks for on a card."""

_SIZES = {
    "transformer": {"rows": 4096, "seq_len": 128, "width": 256},
    "conv net": {"rows": 4096, "side": 64, "width": 64},
}
_TINY = {"transformer": {"rows": 64, "seq_len": 8, "width": 16}, "conv net": {"rows": 64, "side": 8, "width": 4}}

CASES: tuple[dict[str, Any], ...] = tuple(
    {"net": net, "precision": precision, "accelerator": "gpu", "size": _SIZES[net], "budget_bytes": 2 * GIB}
    for precision in ("32-true", "16-mixed", "bf16-mixed")
    for net in _SIZES
)

STAND_IN_CASES: tuple[dict[str, Any], ...] = tuple(
    {"net": net, "precision": "32-true", "accelerator": "cpu", "size": size, "max_batch_size": 8}
    for net, size in _TINY.items()
)


def case_name(case: dict[str, Any]) -> str:
    """For reports, and for `--only`.

    Args:
        case: one of the above.
    """
    return f"{case['net']} {case['precision']}"


def run(check: Check) -> None:
    """Try each case, in a process of its own for all of them.

    Args:
        check: the run.
    """
    with check.new_far_end({} if check.dry_run else _ENVIRONMENT) as other:
        far = check.far if check.dry_run else other
        for case in STAND_IN_CASES if check.dry_run else CASES:
            name = case_name(case)
            if not check.wanted(name) or not check.in_time(NAME, name):
                continue
            row: dict[str, Any] = {"name": name, "stand_in": check.dry_run}
            try:
                row |= check.ask(far, {"callback": case}, NAME)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            check.found(NAME, row)
