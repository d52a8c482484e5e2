"""Which verb was meant, and nothing heavy before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from batchfinder.cli import profile, sweep
from batchfinder.cli.failing import run_verb

VERBS: dict[str, ModuleType] = {"sweep": sweep, "profile": profile}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="batchfinder", description="Find the largest batch size that trains, with or without a GPU at hand."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        verb = verbs.add_parser(name, help=summary, description=summary)
        module.add_arguments(verb)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a verb.

    Args:
        argv: the arguments after the program's name.

    Returns:
        0 ok, 1 a user's error, 2 wrong usage, 3 a bug of ours (with a log), 130 interrupted.
    """
    arguments = build_parser().parse_args(argv)
    return run_verb(VERBS[arguments.verb].main, arguments)
