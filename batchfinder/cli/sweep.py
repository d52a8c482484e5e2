"""The largest batch size for each model, GPU and sequence length, as a table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from batchfinder.cli.sweep_request import SweepRequest, read_request
from batchfinder.cli.sweep_run import run_sweep
from batchfinder.errors import InvalidValue
from batchfinder.report.progress import SweepProgress
from batchfinder.report.rows import SCHEMA, SweepRow
from batchfinder.report.sweep_sheet import comma_separated, sweep_sheet


def main(arguments: argparse.Namespace) -> int:
    """Run the sweep; whatever was found is printed, also when it ends early."""
    for option in ("markdown", "csv"):
        _check_file(f"--{option}", getattr(arguments, option))
    request = read_request(arguments)
    for note in request.notes:
        print(f"batchfinder: {note}", file=sys.stderr)
    progress = SweepProgress(request.conditions)
    try:
        with progress:
            run_sweep(request, progress)
    except KeyboardInterrupt:
        _write(progress.rows, request, arguments)
        raise KeyboardInterrupt(*_kept(progress, request)) from None
    except BaseException:
        _write(progress.rows, request, arguments)
        for words in _kept(progress, request):
            print(f"batchfinder: {words}", file=sys.stderr)
        raise
    _write(progress.rows, request, arguments)
    return 0


def _check_file(option: str, path: str | None) -> None:
    if path is not None and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
        raise InvalidValue(option, path, "a file in a folder that exists")


def _kept(progress: SweepProgress, request: SweepRequest) -> list[str]:
    if not progress.rows:
        return []
    kept = "; they are kept, and the same command goes on from there" if request.cache is not None else ""
    return [f"{len(progress.rows)} of {progress.cells} cells were found{kept}"]


def _write(rows: list[SweepRow], request: SweepRequest, arguments: argparse.Namespace) -> None:
    if not rows:
        return
    sheet = sweep_sheet(rows, request.conditions)
    if arguments.json:
        print(json.dumps({"schema": SCHEMA, "rows": [row.to_json() for row in rows]}, indent=1))
    else:
        sheet.show()
    for option, text in (("markdown", sheet.to_markdown()), ("csv", comma_separated(rows))):
        path = getattr(arguments, option)
        if path is not None:
            _write_file(f"--{option}", path, text)


def _write_file(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(option, path, f"a file that can be written ({error.strerror})") from error
