"""Which verb was meant, and nothing heavy before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from batchfinder.cli.exit_codes import run_verb
from batchfinder.cli.parser import (
    cache_arguments,
    estimate_arguments,
    profile_arguments,
    reproduce_arguments,
    sweep_arguments,
    table_arguments,
)

VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "sweep": ("print the largest batch size for each model, GPU and sequence length", sweep_arguments),
    "estimate": ("print what the memory of one size is for, and what would make it fit", estimate_arguments),
    "profile": ("print the memory of one training step, stage by stage", profile_arguments),
    "reproduce": ("print published tables beside the same figures, found here", reproduce_arguments),
    "table": ("print a sweep's batch size for each length, for samplers", table_arguments),
    "cache": ("list, show, clear, export or import the answers that are known", cache_arguments),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="batchfinder", description="Find the largest batch size that trains, with or without a GPU at hand."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (summary, add_arguments) in VERBS.items():
        add_arguments(verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a verb.

    Args:
        argv: the arguments after the program's name.

    Returns:
        0 ok, 1 a user's error, 2 wrong usage, 3 a bug of ours (with a log), 130 interrupted; 129 and 143 ended by
        SIGHUP and SIGTERM.
    """
    arguments = build_parser().parse_args(argv)
    return run_verb(f"batchfinder.cli.{arguments.verb}", arguments)
