"""The largest batch size for each model, GPU and sequence length, as a table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from batchfinder.cli.options import add_json_option, add_step_options
from batchfinder.cli.sweep_request import SweepRequest, read_request
from batchfinder.cli.sweep_run import run_sweep
from batchfinder.errors import InvalidValue
from batchfinder.report.progress import SweepProgress
from batchfinder.report.rows import SCHEMA, SweepRow, columns
from batchfinder.report.table import comma_separated, markdown, rich_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    what = parser.add_argument_group("what is swept")
    what.add_argument(
        "--model",
        action="append",
        metavar="NAME|PATH|MODULE:FACTORY",
        help="a named model, a config.json or its folder, or your own factory; repeatable (default: two BERTs)",
    )
    what.add_argument("--seq-len", action="append", metavar="N", help="tokens, or pixels for images; repeatable")
    what.add_argument(
        "--gpu", action="append", metavar="NAME", help="repeatable (default: the card here, or a Titan X)"
    )
    what.add_argument("--instance", metavar="NAME", help="a cloud instance's GPUs")
    what.add_argument("--budget", metavar="SIZE", help="bytes that may be used, such as 12GiB")
    add_step_options(parser)
    how = parser.add_argument_group("the search")
    how.add_argument("--target-batch-size", metavar="N", help="add micro-batch x accumulation for this effective batch")
    how.add_argument("--max-batch-size", metavar="N", help="look no further than this")
    how.add_argument("--headroom", metavar="SHARE|SIZE", default="0", help="leave this much free: 0.1, 10%% or 1GiB")
    how.add_argument("--cache", metavar="URL", help="where results are kept (default: BATCHFINDER_CACHE or the user's)")
    how.add_argument("--no-cache", action="store_true", help="neither look results up nor keep them")
    out = parser.add_argument_group("the output")
    add_json_option(out)
    out.add_argument("--markdown", metavar="FILE", help="write the table as Markdown, too")
    out.add_argument("--csv", metavar="FILE", help="write all figures as CSV, too")


def main(arguments: argparse.Namespace) -> int:
    """Run the sweep; whatever was found is printed, also when it ends early."""
    for option in ("markdown", "csv"):
        path = getattr(arguments, option)
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise InvalidValue(f"--{option}", path, "a file in a folder that exists")
    request = read_request(arguments)
    for note in request.notes:
        print(f"batchfinder: {note}", file=sys.stderr)
    progress = SweepProgress(request.cells, request.target_batch_size, request.title)
    try:
        with progress:
            run_sweep(request, progress)
    except BaseException:
        if progress.rows:
            print(
                f"batchfinder: {len(progress.rows)} of {request.cells} cells were found"
                f"{'; they are kept, and the same command goes on from there' if request.cache else ''}",
                file=sys.stderr,
            )
            _write(progress.rows, request, arguments)
        raise
    _write(progress.rows, request, arguments)
    return 0


def _write(rows: list[SweepRow], request: SweepRequest, arguments: argparse.Namespace) -> None:
    table = columns(rows, request.target_batch_size)
    values = [row.to_json() for row in rows]
    if arguments.json:
        print(json.dumps({"schema": SCHEMA, "rows": values}, indent=1))
    else:
        console = Console()
        # Not a terminal: rich would cut lines at 80 columns, and a file has no width.
        if not console.is_terminal:
            console.width = 200
        console.print(rich_table(table, request.title), soft_wrap=False)
        for note in dict.fromkeys(text for row in rows for text in row.unmodelled):
            console.print(f"  left out: {note}", style="dim", highlight=False)
    if arguments.markdown is not None:
        Path(arguments.markdown).write_text(markdown(table))
    if arguments.csv is not None:
        Path(arguments.csv).write_text(comma_separated(values))
