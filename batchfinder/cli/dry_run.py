"""`dry-run`: the user's training command on simulated GPUs, and whether it fits."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchfinder.cli.main import INTERRUPTED as INTERRUPTED_CODE
from batchfinder.cli.main import OK
from batchfinder.cli.options import check_file, whole_number, write_file
from batchfinder.cli.stub import cards_of, command_of, ranks_of
from batchfinder.cuda_stub import StubCard
from batchfinder.cuda_stub.launch import VALUES
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.programs import DryRun, ProcessMemory, dry_run, scratch_copy
from batchfinder.programs.dry_run import FITS, INTERRUPTED, OUT_OF_MEMORY
from batchfinder.report.dry_run import dry_run_cell, dry_run_tables
from batchfinder.report.page import check_page, page_of
from batchfinder.report.terminal import tell, words_of
from batchfinder.stub_cards import find_cuda_build
from batchfinder.training.synonyms import one_of

DOES_NOT_FIT, NO_ANSWER = 1, 2
ROOMY_BYTES = 1 << 40


def main(arguments: argparse.Namespace) -> int:
    """Run a command dry.

    Returns:
        0 where it fits, 1 where it does not, 2 where the command itself failed or used no GPU, 130 interrupted.
    """
    try:
        return _run(arguments)
    except BatchFinderError as error:  # 1 would say that it does not fit
        tell(f"batchfinder: {words_of(error)}")
        return NO_ANSWER


def _run(arguments: argparse.Namespace) -> int:
    argv = command_of(arguments)
    if arguments.snapshot is not None:
        check_file("--snapshot", arguments.snapshot)
    if arguments.html is not None:
        check_page("--html", arguments.html)
        check_file("--html", arguments.html)
    numbers = {
        name: whole_number(f"--{name}", value)
        for name in ("steps", "epochs", "seconds")
        if (value := getattr(arguments, name)) is not None
    }
    ranks = ranks_of(arguments)
    if ranks is not None:
        arguments.count = str(ranks[0] // ranks[1])
    cards = cards_of(arguments)
    settings = {
        "world_size": None if ranks is None else ranks[0],
        "values": one_of("--values", arguments.values, VALUES),
        **numbers,
        "online": arguments.online,
        "build": find_cuda_build(arguments.torch),
    }
    where = "in a temporary copy of this folder" if arguments.scratch else "in this folder: what it writes stays"
    tell(f"batchfinder: running {' '.join(argv)} {where}")
    with scratch_copy(Path.cwd()) if arguments.scratch else nullcontext() as folder:
        run = dry_run(
            argv,
            cards,
            **settings,
            snapshot=arguments.snapshot is not None,
            timeline=arguments.html is not None,
            folder=folder,
            output=sys.stderr.fileno() if arguments.json else None,
            progress=_Progress() if sys.stderr.isatty() else None,
        )
    roomy = None
    if run.outcome == OUT_OF_MEMORY and not arguments.once:
        roomy = _with_room(argv, cards, settings)
    if arguments.snapshot is not None and run.snapshot is not None:
        write_file("--snapshot", arguments.snapshot, run.snapshot)
    if arguments.html is not None and run.timeline is not None:
        cell = dry_run_cell(run)
        write_file("--html", arguments.html, page_of(f"dry run of {cell.model}", cell.technique, [cell]))
    if arguments.json:
        print(json.dumps({**run.to_json(), "with_room": None if roomy is None else roomy.to_json()}, indent=1))
    else:
        for table in dry_run_tables(run, arguments.explain, roomy):
            print()
            table.show()
    return {FITS: OK, OUT_OF_MEMORY: DOES_NOT_FIT, INTERRUPTED: INTERRUPTED_CODE}.get(run.outcome, NO_ANSWER)


def _with_room(argv: Sequence[str], cards: Sequence[StubCard], settings: Mapping[str, Any]) -> DryRun | None:
    """The command on cards with as much memory as it wants, in a temporary copy; None where it does not train there."""
    tell("batchfinder: it does not fit: running it in a temporary copy with more memory, to see what it takes")
    roomy = [replace(card, total_bytes=ROOMY_BYTES) for card in cards]
    try:
        with scratch_copy(Path.cwd()) as folder, open(os.devnull, "r+b") as nowhere:
            file = nowhere.fileno()
            run = dry_run(argv, roomy, **settings, folder=folder, stdin=file, output=file)
    except InvalidValue as error:
        tell(f"batchfinder: what it takes is not known: {words_of(error)}")
        return None
    return run if run.outcome == FITS else None


class _Progress:
    """A line on a terminal whenever there are twice as many steps: the command prints what it likes between them."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, processes: Sequence[ProcessMemory]) -> None:
        fullest = max(processes, key=lambda each: each.peak_reserved_bytes, default=None)
        if fullest is None or len(fullest.steps) < max(1, 2 * self._told):
            return
        self._told = len(fullest.steps)
        last = fullest.steps[-1]
        tell(
            f"batchfinder: step {self._told}, {last['seconds']:.0f} s: peak "
            f"{fullest.peak_reserved_bytes / (1 << 20):,.0f} MiB reserved"
        )
