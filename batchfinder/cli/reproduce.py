"""`reproduce`: published tables beside the same figures, found here."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib import import_module

from batchfinder.cli.options import check_file, write_file
from batchfinder.recording.simulation import Simulation
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Table
from batchfinder.reproductions import REPRODUCTIONS
from batchfinder.reproductions.published import Context, Reproduction, require_card
from batchfinder.training.spec import StepConfig
from batchfinder.training.synonyms import one_of

ALL = "all"


def main(arguments: argparse.Namespace) -> int:
    """Reproduce one table or all, each printed as soon as it is found; JSON is printed at the end."""
    asked = one_of("TABLE", arguments.table, (*REPRODUCTIONS, ALL))
    if arguments.markdown is not None:
        check_file("--markdown", arguments.markdown)
    reproducers = {name: import_module(module) for name, module in REPRODUCTIONS.items() if asked in (name, ALL)}
    device = None
    if arguments.measured:
        device = require_card({name: reproducer.NEEDED_BYTES for name, reproducer in reproducers.items()})
    found: list[Reproduction] = []
    tables: list[Table] = []
    first, *_ = reproducers.values()
    with Simulation(first.WORKLOAD, StepConfig()) as simulation:
        for reproducer in reproducers.values():
            with StatusLine() as line:
                found.append(reproducer.reproduce(Context(simulation, line.update, device)))
            *others, last = found[-1].tables
            for table in (*others, replace(last, notes=(*last.notes, *found[-1].notes))):
                if not arguments.json:
                    print(end="\n\n" if tables else "", flush=True)
                    table.show()
                tables.append(table)
    if arguments.json:
        values = [reproduction.to_json() for reproduction in found]
        print(json.dumps(values if asked == ALL else values[0], indent=1))
    if arguments.markdown is not None:
        write_file(
            "--markdown",
            arguments.markdown,
            "\n".join(table.to_markdown(is_last=table is tables[-1]) for table in tables),
        )
    return 0
