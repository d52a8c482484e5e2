"""The options of `cache`. Nothing heavy is imported here, so that `--help` is quick."""

from __future__ import annotations

import argparse


def cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cache` and of what it does."""
    deeds = parser.add_subparsers(dest="deed", required=True, metavar="DEED")

    lists = _deed(deeds, "list", "print what is known, a line for each answer")
    lists.add_argument("--json", action="store_true", help="print JSON instead of a table")

    show = _deed(deeds, "show", "print one answer with all that it depends on and every size tried")
    show.add_argument("record", metavar="RECORD", help="the first digits of its name in the list")
    show.add_argument("--json", action="store_true", help="print JSON instead of tables")

    clear = _deed(deeds, "clear", "forget everything, or only the answers named")
    clear.add_argument("record", nargs="*", metavar="RECORD", help="the first digits of a name in the list")

    export = _deed(deeds, "export", "write every answer to one file, for another machine")
    export.add_argument("file", metavar="FILE", help="the file to write; - for stdout")

    imports = _deed(deeds, "import", "take the answers of an exported file; of two for one question the newer stays")
    imports.add_argument("file", metavar="FILE", help="the file to read; - for stdin")


def _deed(deeds: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str) -> argparse.ArgumentParser:
    deed = deeds.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
    deed.add_argument("--cache", metavar="URL", help="which cache (default: BATCHFINDER_CACHE or the user's)")
    return deed
