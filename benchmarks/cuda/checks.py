"""The five checks of `cuda_check.py`, and the run of them all."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchfinder.devices import Multiprocessors, device_for, find_gpu, resident_threads
from batchfinder.errors import BatchFinderError
from batchfinder.measure.child_probe import GpuFacts, query_gpu
from batchfinder.simulator.alloc_conf import DEFAULT_SETTINGS, AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.trace import Trace
from benchmarks.cuda import cells
from benchmarks.cuda.cells import Cell, Ladder
from benchmarks.cuda.context import CHECKS, Card, CardProcess, Context, Predictions, RequestFailed
from benchmarks.cuda.report import DRY_RUN, ResultFile, hardware, has_failed, report, summary, versions
from benchmarks.cuda.traces import compare, peaks, predicted_and_measured, simulated_history

ROOT = Path(__file__).resolve().parents[2]
MINUTES, DRY_RUN_MINUTES = 8.0, 30.0
MAXIMUM_STEPS = 3
REACH = 3
"""Sizes on either side of the largest batch that are tried."""

# They would change the allocator or the attention kernels, which the predictions would not see.
_UNSET = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
_MAX_SHARE_OF_FREE = 0.97
_GPU_MARK = re.compile(r"\bpytest\.mark\.gpu\b")
_PYTEST_LINE = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_DESELECTED = (
    "not test_measured_on_a_gpu"  # takes up to an hour; `batchfinder reproduce bert-2019 --measured` is the same
)
_OUTPUT_TAIL = 6000

Traces = list[tuple[Cell, "Future[Trace]"]]
Maxima = list[tuple[Ladder, bool, "Future[list[dict[str, Any]]]"]]


def run(arguments: argparse.Namespace) -> int:
    """Run the checks that `cuda_check.py`'s options ask for; returns the exit code."""
    started = time.monotonic()
    minutes = arguments.minutes or (DRY_RUN_MINUTES if arguments.dry_run else MINUTES)
    unset = {name: os.environ.pop(name) for name in _UNSET if name in os.environ}
    names = [name for name in CHECKS if name in arguments.parts]
    try:
        facts = None if arguments.dry_run else query_gpu(arguments.device)
        card = _card(facts, arguments.gpu)
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
        "config": {"minutes": minutes, "parts": names, "only": arguments.only.pattern, "unset": unset},
        **{name: [] for name in ("cells", "maxima", "traces", "callback", "errors", "not_reached")},
        "tests": {},
        "summary": {},
    }
    file = ResultFile(arguments.out or default_path(card.name, arguments.dry_run), result)
    predictions = Predictions(card)
    device = "cpu" if arguments.dry_run else arguments.device
    context = Context(device, predictions, file, 60 * minutes, arguments.only, arguments.keep, started)
    try:
        _run_checks(context, names)
    finally:
        context.process.close()
        predictions.close()
        result["summary"] = summary(result)
        result["seconds"] = round(context.elapsed, 1)
        file.save()
    print(report(result))
    print(f"\n{file.path}, after {result['seconds']} s")
    return 1 if has_failed(result) else 0


def _card(facts: GpuFacts | None, gpu: str) -> Card:
    """The card that is there; in a dry run one of the catalog."""
    if facts is not None:
        multiprocessors = Multiprocessors(facts.multiprocessors, resident_threads(facts.compute_capability))
        return Card(facts.name, facts.total_bytes, facts.free_bytes, facts.compute_capability, multiprocessors)
    device = device_for(find_gpu(gpu))
    return Card(device.name, device.total_bytes, device.usable_bytes, device.compute_capability, device.reduces_on)


def default_path(card: str, dry_run: bool) -> Path:
    """Where a result goes: for a card benchmarks/results, for a dry run a folder that git ignores."""
    if dry_run:
        return ROOT / "build" / "cuda_check-dry-run.json"
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"cuda_check-{name}.json"


def _run_checks(context: Context, names: list[str]) -> None:
    # All predictions are submitted first: they are made while the card is measured.
    stand_ins = (cells.STAND_IN_CELLS, cells.STAND_IN_TRACED) if context.dry_run else ((), ())
    measured = _submit_traces(context, (*stand_ins[0], *cells.CELLS) if "cells" in names else ())
    recorded = _submit_traces(context, (*stand_ins[1], *cells.TRACED) if "traces" in names else ())
    searched = _submit_maxima(context) if "maxima" in names else []
    checks: dict[str, Callable[[], None]] = {
        "cells": lambda: check_cells(context, measured),
        "traces": lambda: check_traces(context, recorded),
        "maxima": lambda: check_maxima(context, searched),
        "callback": lambda: check_callback(context),
        "tests": lambda: check_gpu_tests(context),
    }
    for name in names:
        print(f"cuda_check: {name}", file=sys.stderr)
        try:
            checks[name]()
        except Exception as error:
            context.file.result["errors"].append({"what": name, "error": _text(error)})
            context.file.save()


def _submit_traces(context: Context, listed: tuple[Cell, ...]) -> Traces:
    return [(cell, context.predictions.trace(cell)) for cell in listed if context.selected(cell.name)]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def check_cells(context: Context, predicted: Traces) -> None:
    """Predicted and measured memory of training steps, stage by stage."""
    context.process.start()
    for cell, trace in predicted:
        if not context.in_time("cells", cell.name):
            continue
        model = cell.name.split()[0]
        row: dict[str, Any] = {"name": cell.name, **asdict(cell), "model": model, "stand_in": cell.stand_in}
        try:
            row |= _cell(context, cell, context.await_result(trace, "cells"))
        except Exception as error:
            row["error"] = _text(error)
        context.add("cells", row)


def _cell(context: Context, cell: Cell, trace: Trace) -> dict[str, Any]:
    row: dict[str, Any] = {"unmodelled": list(trace.unmodelled)}
    predicted, message = context.predictions.stages(trace)
    # A step that is predicted to reserve nearly all of the card is not tried: its failure would show nothing.
    if message or peaks(predicted)["peak_reserved_bytes"] > _MAX_SHARE_OF_FREE * context.predictions.card.free_bytes:
        return {**row, "skipped": "predicted to need more than the card has free"}
    row["predicted"] = peaks(predicted)
    if context.dry_run and not cell.stand_in:
        return row
    answer = context.ask(context.process, {"measure": {"cell": asdict(cell), "steps": 2}}, "cells")
    if answer["ran"]:
        row["measured"] = peaks(answer["stages"])
        row["stages"] = predicted_and_measured(predicted, answer["stages"])
    else:
        row["error"] = answer["message"]
    row["details"] = {name: answer[name] for name in answer if name not in ("stages", "ran", "message")}
    return row


def check_traces(context: Context, recorded: Traces) -> None:
    """Recorded steps and the memory history of the card's allocator."""
    for cell, trace in recorded:
        if not context.in_time("traces", cell.name):
            continue
        row: dict[str, Any] = {"name": cell.name, "stand_in": cell.stand_in}
        try:
            row |= _compared(context, cell, context.await_result(trace, "traces"))
        except Exception as error:
            row["error"] = _text(error)
        context.add("traces", row)


def _compared(context: Context, cell: Cell, trace: Trace) -> dict[str, Any]:
    if context.dry_run and not cell.stand_in:  # the trace's own history in place of a card's
        history = simulated_history(trace, CachingAllocator(context.predictions.card.memory()))
        return {"against": "the simulator's own snapshot", **compare(trace, history)}
    with tempfile.TemporaryDirectory(prefix="batchfinder-") as folder:
        path = Path(folder) / "history.json.gz"
        request = {"history": {"cell": asdict(cell), "steps": 2}, "path": str(path)}
        answer = context.ask(context.process, request, "traces")
        if not answer["ran"]:
            return {"error": answer["message"]}
        if context.keep is not None:
            context.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, context.keep / f"{cell.name.replace(' ', '-')}.json.gz")
        with gzip.open(path, "rt") as file:
            return {"against": context.device, **compare(trace, json.load(file))}


def _submit_maxima(context: Context) -> Maxima:
    pairs = [(ladder, False) for ladder in (cells.STAND_IN_LADDERS if context.dry_run else ())]
    pairs += [(ladder, expandable) for expandable in (False, True) for ladder in cells.LADDERS]
    settings = {False: DEFAULT_SETTINGS, True: AllocatorSettings(expandable_segments=True)}
    return [
        (ladder, expandable, context.predictions.largest(ladder, settings[expandable]))
        for ladder, expandable in pairs
        if context.selected(ladder.name)
    ]


def check_maxima(context: Context, predicted: Maxima) -> None:
    """Predicted and true largest batches under budgets, with and without expandable segments."""
    _ladders(context, context.process, [one for one in predicted if not one[1]])
    context.process.close()  # its context takes memory on the card
    # PyTorch reads the variable when a process first allocates.
    with context.new_process({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as process:
        _ladders(context, process, [one for one in predicted if one[1]])


def _ladders(context: Context, process: CardProcess, predicted: Maxima) -> None:
    for ladder, expandable, future in predicted:
        head = {"name": ladder.name, "expandable_segments": expandable, "stand_in": ladder.cell.stand_in}
        for row in _budgets(context, process, ladder, future):
            context.add("maxima", {**head, **row})


def _budgets(
    context: Context, process: CardProcess, ladder: Ladder, future: Future[list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    if not context.in_time("maxima", ladder.name):
        return
    try:
        rows = context.await_result(future, "maxima")
    except Exception as error:
        yield {"error": f"no prediction: {_text(error)}"}
        return
    for row in rows:
        if context.dry_run and not ladder.cell.stand_in:
            yield row
        elif row["budget_bytes"] > context.predictions.card.free_bytes:
            yield {**row, "skipped": "the card has less than this budget free"}
        elif context.in_time("maxima", f"{ladder.name} under {row['budget_bytes']} bytes"):
            yield {**row, **_measured_maximum(context, process, ladder, row)}


def _measured_maximum(context: Context, process: CardProcess, ladder: Ladder, row: dict[str, Any]) -> dict[str, Any]:
    tried: dict[int, dict[str, Any]] = {}

    def trains(size: int) -> bool:
        if context.seconds_left("maxima") <= 0:
            raise TimeoutError(f"the time was over after {len(tried)} sizes")
        cell = asdict(replace(ladder.cell, batch_size=size))
        request = {"measure": {"cell": cell, "steps": MAXIMUM_STEPS, "limit_bytes": row["budget_bytes"]}}
        tried[size] = context.ask(process, request, "maxima")
        return bool(tried[size]["ran"])

    try:
        answer: dict[str, Any] = {"true": true_maximum(trains, row["predicted"])}
    except (TimeoutError, RequestFailed) as error:
        answer = {"error": str(error)}
    else:
        calm = [size for size, seen in tried.items() if seen["ran"] and not seen["retries"]]
        answer["true_without_retries"] = max(calm, default=0)
    answer["tried"] = [[size, int(tried[size]["ran"]), tried[size]["retries"]] for size in sorted(tried)]
    return answer


def true_maximum(trains: Callable[[int], bool], predicted: int, reach: int = REACH) -> int:
    """The largest size that trains, with every size within `reach` of it tried, each once.

    Sizes around the prediction come first. If they do not hold the answer, ever larger steps away from them bracket it,
    and bisection narrows the bracket. Where a size trains above one that does not, the answer is the largest size that
    trains with `reach` failures in a row above it.

    Returns:
        The size; 0 if none trains.

    Raises:
        Exception: whatever `trains` raised.
    """
    tried: dict[int, bool] = {}

    def ask(size: int) -> bool:
        if size < 1:
            return True
        if size not in tried:
            tried[size] = trains(size)
        return tried[size]

    centre = max(1, predicted)
    while True:
        for size in range(max(1, centre - reach), centre + reach + 1):
            ask(size)
        best = max((size for size, ran in tried.items() if ran), default=0)
        if best and all(size in tried for size in range(best + 1, best + reach + 1)):
            for size in range(max(1, best - reach), best):
                ask(size)
            return best
        centre = _boundary(ask, best or min(tried), upwards=best > 0)
        if centre == 0:
            for size in range(1, reach + 1):
                ask(size)
            if not any(tried.values()):
                return 0


def _boundary(ask: Callable[[int], bool], start: int, upwards: bool) -> int:
    """A size, away from `start`, that trains while the next larger one does not."""
    gap, low, high = 1, start, start
    if upwards:
        while ask(high := low + gap):
            low, gap = high, 2 * gap
    else:
        while not ask(low := max(0, high - gap)):
            high, gap = low, 2 * gap
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    return low


def check_callback(context: Context) -> None:
    """BatchFinder on a real trainer, each case in the same child process."""
    with context.new_process({} if context.dry_run else cells.CALLBACK_ENVIRONMENT) as own:
        process = context.process if context.dry_run else own
        for case in cells.STAND_IN_CALLBACK_CASES if context.dry_run else cells.CALLBACK_CASES:
            name = f"{case['net']} {case['precision']}"
            if not context.selected(name) or not context.in_time("callback", name):
                continue
            row: dict[str, Any] = {"name": name, "stand_in": context.dry_run}
            try:
                row |= context.ask(process, {"callback": case}, "callback")
            except Exception as error:
                row["error"] = _text(error)
            context.add("callback", row)


def check_gpu_tests(context: Context) -> None:
    """The tests marked `gpu`, one after another in a process of its own, in the time that is left."""
    if not context.in_time("tests", "the tests marked gpu"):
        return
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "--strict-markers"]
    command += ["-v", "-m", "gpu", "-k", _DESELECTED, "-p", "no:cacheprovider", "--tb=short", *gpu_test_files(ROOT)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        )
        ended = True
        try:
            process.wait(timeout=max(1.0, context.seconds_left("tests")))
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    command_line = " ".join(["python", *command[1:]])
    context.file.result["tests"] = {"command": command_line, "ended": ended, **read_test_results(text)}
    context.file.save()


def gpu_test_files(root: Path) -> list[str]:
    """The test files with a test marked `gpu`; to collect all others would take longer than to run these."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if _GPU_MARK.search(file.read_text(encoding="utf-8"))]


def read_test_results(text: str) -> dict[str, Any]:
    """From pytest's verbose output: counts by result, the tests that failed, and the output's end if any did."""
    results = {name: outcome.lower() for name, outcome in _PYTEST_LINE.findall(text)}
    counts = {outcome: list(results.values()).count(outcome) for outcome in sorted(set(results.values()))}
    others = {name: outcome for name, outcome in results.items() if outcome not in ("passed", "skipped")}
    tail = text[-_OUTPUT_TAIL:] if others or not results else ""
    return {"counts": counts, "not_passed": others, "end_of_output": tail}
