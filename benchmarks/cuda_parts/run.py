"""From the options to the result: looks at the card, does the parts in their order, sums up."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchfinder.devices import device_for, find_gpu
from batchfinder.errors import BatchFinderError
from batchfinder.measure.child_probe import GpuFacts, look_at
from benchmarks.cuda_parts import part_callback, part_cells, part_maxima, part_tests, part_traces
from benchmarks.cuda_parts.check import Check
from benchmarks.cuda_parts.clock import ENDS, Clock
from benchmarks.cuda_parts.machine import hardware, versions
from benchmarks.cuda_parts.prediction import Card, Predictions
from benchmarks.cuda_parts.report import DRY_RUN, has_failed, report, summary
from benchmarks.cuda_parts.result_file import ResultFile
from benchmarks.cuda_parts.wheels import ROOT

MINUTES, DRY_RUN_MINUTES = 8.0, 30.0

# What would change the allocator or the attention kernels behind the prediction's back.
_UNSET = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


def run(arguments: argparse.Namespace) -> int:
    """Check the card; returns the exit code.

    Args:
        arguments: the options of `benchmarks/cuda_check.py`.
    """
    minutes = arguments.minutes or (DRY_RUN_MINUTES if arguments.dry_run else MINUTES)
    clock = Clock(60 * minutes)
    unset = {name: os.environ.pop(name) for name in _UNSET if name in os.environ}
    parts = [part for part in ENDS if part in arguments.parts]
    try:
        facts = None if arguments.dry_run else look_at(arguments.device)
        card = _catalogued(arguments.gpu) if facts is None else _present(facts)
    except BatchFinderError as error:
        print(f"cuda_check: {error} With --dry-run all that needs no card is run.", file=sys.stderr)
        return 1
    result: dict[str, Any] = {
        "benchmark": "cuda_check",
        "dry_run": DRY_RUN if arguments.dry_run else False,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(facts),
        "versions": versions(facts),
        "predicted_for": {"name": card.name, "total_bytes": card.total_bytes, "free_bytes": card.free_bytes},
        "config": {"minutes": minutes, "parts": parts, "only": arguments.only.pattern, "unset": unset},
        **{name: [] for name in ("cells", "maxima", "traces", "callback", "errors", "not_reached")},
        "tests": {},
        "summary": {},
    }
    file = ResultFile(arguments.out or _usual_path(card.name, arguments.dry_run), result)
    predictions = Predictions(card)
    device = "cpu" if arguments.dry_run else arguments.device
    check = Check(device, arguments.dry_run, card, predictions, clock, file, arguments.only, arguments.keep)
    try:
        _do(check, parts)
    finally:
        check.far.close()
        predictions.close()
        result["summary"] = summary(result)
        result["seconds"] = round(clock.passed, 1)
        file.save()
    print(report(result))
    print(f"\n{file.path}, after {result['seconds']} s")
    return 1 if has_failed(result) else 0


def _do(check: Check, parts: list[str]) -> None:
    asking = {part.NAME: part.ask(check) for part in (part_cells, part_traces, part_maxima) if part.NAME in parts}
    for part in parts:
        print(f"cuda_check: {part}", file=sys.stderr)
        try:
            if part == part_cells.NAME:
                part_cells.run(check, asking[part])
            elif part == part_maxima.NAME:
                part_maxima.run(check, asking[part])
            elif part == part_traces.NAME:
                part_traces.run(check, asking[part])
            elif part == part_callback.NAME:
                part_callback.run(check)
            else:
                part_tests.run(check)
        except Exception as error:
            check.file.failed(part, error)


def _catalogued(name: str) -> Card:
    device = device_for(find_gpu(name))
    return Card(device.name, device.total_bytes, device.usable_bytes, device.compute_capability)


def _present(facts: GpuFacts) -> Card:
    return Card(facts.name, facts.total_bytes, facts.free_bytes, facts.compute_capability)


def _usual_path(card: str, dry_run: bool) -> Path:
    """Results are for what was measured; a dry run's go to a folder that is not kept."""
    if dry_run:
        return ROOT / "build" / "cuda_check-dry-run.json"
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"cuda_check-{name}.json"
