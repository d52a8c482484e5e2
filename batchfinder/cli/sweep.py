"""The largest batch size for each model, GPU and sequence length, as a table."""

from __future__ import annotations

import argparse
import json
import sys

from batchfinder.cli.failing import OK, USER_ERROR
from batchfinder.cli.output_file import check_file, write_file
from batchfinder.cli.sweep_request import SweepRequest, read_request
from batchfinder.cli.sweep_run import run_sweep
from batchfinder.report.drawing import check_picture
from batchfinder.report.progress import Activity, SweepProgress
from batchfinder.report.rows import SCHEMA, SweepRow
from batchfinder.report.sweep_figure import draw_sweep
from batchfinder.report.sweep_sheet import comma_separated, sweep_sheet


def main(arguments: argparse.Namespace) -> int:
    """Run the sweep; whatever was found is printed, also when it ends early."""
    for option in ("markdown", "csv"):
        check_file(f"--{option}", getattr(arguments, option))
    check_picture("--plot", arguments.plot)
    with Activity() as activity:
        activity.doing("looking at what is here", worth_a_line=False)
        request = read_request(arguments)
    for note in request.place.notes:
        print(f"batchfinder: {note}", file=sys.stderr)
    progress = SweepProgress(request.conditions)
    try:
        with progress:
            complete = run_sweep(request, progress)
    except KeyboardInterrupt:
        _write(progress.rows, request, arguments)
        raise KeyboardInterrupt(*_kept(progress, request)) from None
    except BaseException:
        _write(progress.rows, request, arguments)
        for words in _kept(progress, request):
            print(f"batchfinder: {words}", file=sys.stderr)
        raise
    _write(progress.rows, request, arguments)
    if complete:
        return OK
    for words in _kept(progress, request):
        print(f"batchfinder: {words}", file=sys.stderr)
    return USER_ERROR


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
            write_file(f"--{option}", path, text)
    if arguments.plot is not None:
        draw_sweep(rows, sheet.title, arguments.plot)
