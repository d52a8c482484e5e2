"""Published tables beside the same figures, found here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

from batchfinder.cli.files import check_file, write_file
from batchfinder.cli.options import one_of
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Table
from batchfinder.reproductions import REPRODUCTIONS
from batchfinder.reproductions.base import Context, Recordings, Reproducer, Reproduction, require_card

ALL = "all"


def main(arguments: argparse.Namespace) -> int:
    """Reproduce one table or all, each printed as soon as it is there; JSON is printed at the end."""
    asked = one_of("table", arguments.table, (*REPRODUCTIONS, ALL))
    check_file("--markdown", arguments.markdown)
    reproducers: dict[str, Reproducer] = {
        name: import_module(module) for name, module in REPRODUCTIONS.items() if asked in (name, ALL)
    }
    device = None
    if arguments.measured:
        device = require_card({name: reproducer.needed_bytes() for name, reproducer in reproducers.items()})
    found: list[Reproduction] = []
    with Recordings() as recordings:
        for reproducer in reproducers.values():
            with StatusLine() as activity:
                found.append(reproducer.reproduce(Context(recordings, activity.doing, device)))
            if not arguments.json:
                _show(found[-1], first=len(found) == 1)
    if arguments.json:
        values = [reproduction.to_json() for reproduction in found]
        print(json.dumps(values if asked == ALL else values[0], indent=1))
    if arguments.markdown is not None:
        sheets = (sheet for reproduction in found for sheet in _sheets(reproduction))
        write_file("--markdown", arguments.markdown, "\n".join(sheet.to_markdown() for sheet in sheets))
    return 0


def _show(reproduction: Reproduction, first: bool) -> None:
    for sheet in _sheets(reproduction):
        if not first:
            print("\n", flush=True)
        first = False
        sheet.show()


def _sheets(reproduction: Reproduction) -> Iterable[Table]:
    """Its tables, the last of which has the notes."""
    *others, last = reproduction.sheets
    return (*others, replace(last, notes=(*last.notes, *reproduction.notes)))
