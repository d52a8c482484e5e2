"""`sweep`: the largest batch size for each model, GPU and sequence length."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from batchfinder.cli.from_file import check_write, write_sizes
from batchfinder.cli.main import OK, USER_ERROR
from batchfinder.cli.options import check_file, write_file
from batchfinder.cli.sequence_length import find_lengths
from batchfinder.cli.sweep_request import read_request
from batchfinder.data.size_table import checked, to_json, to_lhotse
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.report.page import cell_of_row, check_page, page_of
from batchfinder.report.plots import check_picture, draw_sweep
from batchfinder.report.progress import StatusLine, SweepProgress
from batchfinder.report.sweep import SweepRow, comma_separated, sweep_table
from batchfinder.report.terminal import tell, words_of
from batchfinder.sizing.sweep import SweepResult, find_rows
from batchfinder.training.synonyms import one_of


def main(arguments: argparse.Namespace) -> int:
    """Run the sweep; whatever was found is printed, also when it ends early."""
    if one_of("--engine", arguments.engine, ("here", "ray")) == "here" and arguments.address is not None:
        raise InvalidValue("--address", arguments.address, "--engine ray with it")
    if one_of("--find", arguments.find, ("batch-size", "seq-len")) == "seq-len":
        if arguments.engine == "ray":
            raise InvalidValue("--engine", "ray", "here with --find seq-len")
        if arguments.write:
            raise InvalidValue("--write", True, "--find batch-size with it: no length is written into a file")
        return find_lengths(arguments)
    if arguments.batch_size is not None:
        raise InvalidValue("--batch-size", arguments.batch_size[0], "--find seq-len with it: a sweep finds batch sizes")
    for option in ("markdown", "csv", "batch_sizes", "lhotse"):
        if getattr(arguments, option) is not None:
            check_file(f"--{option.replace('_', '-')}", getattr(arguments, option))
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
        check_file("--plot", arguments.plot)
    if arguments.html is not None:
        check_page("--html", arguments.html)
        check_file("--html", arguments.html)
    with StatusLine() as line:
        line.update("looking for GPUs", terminal_only=True)
        request = read_request(arguments)
    if arguments.write:
        check_write(arguments, len(request.models) * len(request.place.cards) * max(1, len(request.seq_lens)))
    for note in request.place.notes:
        tell(f"batchfinder: {note}")
    progress = SweepProgress(request.conditions)
    failed: list[Exception] = []
    complete = True
    try:
        with progress:
            if arguments.engine == "ray":
                from batchfinder.fleet import run_on_ray

                complete = run_on_ray(request, progress, arguments.address)
            else:
                with closing(find_rows(request, progress.update, progress.expect, many_processes=True)) as found:
                    for each in found:
                        if isinstance(each, SweepRow):
                            progress.found(each)
                        else:
                            progress.failed(each)
                            complete = False
    finally:
        if rows := progress.rows:
            failed = write_outputs(arguments, SweepResult(rows, request.conditions))
            if len(rows) < len(progress.cells):
                cached = "" if request.cache is None else "; they are cached, and the same command continues from there"
                if any(row.not_cached for row in rows):
                    cached = "; not all of them are cached"
                tell(f"batchfinder: {len(rows)} of {len(progress.cells)} cells were found{cached}")
    if arguments.write and complete:
        if len(rows) > 1:
            expected = f"a sequence length with it; {len(rows)} were swept, and {arguments.from_file} is left as it is"
            raise InvalidValue("--seq-len", None, expected)
        write_sizes(arguments, rows[0].plan, rows[0].result.max_batch_size)
    for error in failed:
        if not isinstance(error, BatchFinderError):
            raise error
    return OK if complete and not failed else USER_ERROR


def write_outputs(arguments: argparse.Namespace, found: SweepResult) -> list[Exception]:
    """Print and write what was found, each output on its own, so that one that fails loses no other.

    Returns:
        What was raised; errors of the user's have been told.
    """
    failed: list[Exception] = []

    @contextmanager
    def alone() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed.append(error)
            if isinstance(error, BatchFinderError):
                tell(f"batchfinder: {words_of(error)}")

    rows, table = tuple(found), sweep_table(found, found.conditions, arguments.explain)
    with alone():
        if arguments.json:
            print(json.dumps(found.to_json(), indent=1))
        else:
            table.show()
    if arguments.markdown is not None:
        with alone():
            write_file("--markdown", arguments.markdown, sweep_table(rows, found.conditions, True).to_markdown())
    if arguments.csv is not None:
        with alone():
            write_file("--csv", arguments.csv, comma_separated(rows))
    if arguments.plot is not None:
        with alone():
            draw_sweep(rows, table.title, arguments.plot)
    if arguments.html is not None:
        with alone():
            details, cells = ", ".join(found.conditions), [cell_of_row(row) for row in rows]
            write_file("--html", arguments.html, page_of(table.title, details, cells))
    if arguments.batch_sizes is not None or arguments.lhotse is not None:
        with alone():
            sizes = sizes_of(rows)
            if arguments.batch_sizes is not None:
                with alone():
                    write_file("--batch-sizes", arguments.batch_sizes, to_json(sizes) + "\n")
            if arguments.lhotse is not None:
                write_file("--lhotse", arguments.lhotse, json.dumps(to_lhotse(sizes)) + "\n")
    return failed


def sizes_of(rows: Sequence[SweepRow]) -> dict[int, int]:
    """The batch size for each length at which a sample fits; the others are told.

    Raises:
        InvalidValue: there is no such length.
    """
    found = {row.cell.seq_len: row.result.max_batch_size for row in rows}
    sizes = checked(found)
    if left_out := [str(seq_len) for seq_len in found if seq_len not in sizes]:
        tell(f"batchfinder: no batch size for seq_len {', '.join(left_out)}: not one sample fits")
    return sizes
