"""`estimate`: what the memory of one size is used for, whether a GPU has it, and which options would make it fit."""

from __future__ import annotations

import argparse
import json

from batchfinder.cli.options import asked_card, check_file, step_options, whole_number, write_file
from batchfinder.memory_use.breakdown import bytes_over_time
from batchfinder.report.estimate import EstimateRequest, estimate_tables
from batchfinder.report.page import cell_of_estimate, check_page, page_of
from batchfinder.report.plots import check_picture, draw_estimate
from batchfinder.report.progress import StatusLine
from batchfinder.report.terminal import tell
from batchfinder.sizing.estimate import check_request, run_estimate
from batchfinder.training.synonyms import one_of


def main(arguments: argparse.Namespace) -> int:
    """Estimate one size; that it does not fit is a result, not an error."""
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
        check_file("--plot", arguments.plot)
    if arguments.html is not None:
        check_page("--html", arguments.html)
        check_file("--html", arguments.html)
    if arguments.markdown is not None:
        check_file("--markdown", arguments.markdown)
    if arguments.by is not None:
        one_of("--by", arguments.by, ("module",))
    request = read_request(arguments)
    with StatusLine() as line:
        found = run_estimate(request, arguments.advice or arguments.html is not None, line.update)
    tables = estimate_tables(found, by_module=arguments.by is not None, explain=arguments.explain)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        for number, table in enumerate(tables):
            print(end="\n" if number else "")
            table.show()
    if arguments.markdown is not None:
        write_file(
            "--markdown",
            arguments.markdown,
            "\n".join(table.to_markdown(is_last=table is tables[-1]) for table in tables),
        )
    if arguments.plot is not None:
        draw_estimate(found, arguments.plot)
    if arguments.html is not None:
        cell = cell_of_estimate(found, bytes_over_time(found.estimate.trace))
        write_file("--html", arguments.html, page_of(f"{cell.heading}, simulated", cell.technique, [cell]))
    return 0


def read_request(arguments: argparse.Namespace) -> EstimateRequest:
    """Check the options.

    Raises:
        InvalidValue: an option has an invalid value.
        UnknownName: no such GPU, instance or model.
    """
    chosen, note = asked_card(arguments, whole_number("--gpus", arguments.gpus))
    options = step_options(arguments)
    size, seq_len = arguments.batch_size, arguments.seq_len
    accumulation, recorder = arguments.accumulation, arguments.recorder
    request = check_request(arguments.model, size, seq_len, chosen, options, accumulation, recorder)
    if note:
        tell(f"batchfinder: {note}")
    return request
