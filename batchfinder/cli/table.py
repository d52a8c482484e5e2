"""What a sweep found, as a table for samplers: a batch size for each length."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from batchfinder.cli.files import read_file
from batchfinder.cli.options import one_of
from batchfinder.cli.parser import TABLE_FORMATS
from batchfinder.data.size_table import checked, to_json, to_lhotse
from batchfinder.errors import InvalidValue, UnknownName
from batchfinder.report.sweep import SCHEMA


def main(arguments: argparse.Namespace) -> int:
    """Print the table of one model on one GPU."""
    form = one_of("--format", arguments.format, TABLE_FORMATS)
    rows = _rows(read_file("FILE", arguments.file))
    for option, field in (("--model", "model"), ("--gpu", "gpu")):
        rows = _of_one(rows, option, field, getattr(arguments, field))
    found = {row["seq_len"]: row["max_batch_size"] for row in rows}
    table = checked(found)
    if nothing := sorted(set(found) - set(table)):
        lengths = ", ".join(map(str, nothing))
        print(f"batchfinder: left out, since not one sample fits: seq_len {lengths}", file=sys.stderr)
    print(to_json(table) if form == "json" else json.dumps(to_lhotse(table)))
    return 0


def _rows(text: str) -> list[dict[str, Any]]:
    """The rows of a sweep.

    Raises:
        InvalidValue: it is something else.
    """
    expected = f"what `batchfinder sweep --json` prints, with schema {SCHEMA}"
    try:
        printed = json.loads(text)
        if printed["schema"] != SCHEMA:
            raise InvalidValue("FILE", f"schema {printed['schema']}", expected)
        rows = [{name: row[name] for name in ("model", "gpu", "seq_len", "max_batch_size")} for row in printed["rows"]]
    except (ValueError, TypeError, LookupError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue("FILE", text.strip()[:60], expected) from error
    return rows


def _of_one(rows: list[dict[str, Any]], option: str, field: str, chosen: str | None) -> list[dict[str, Any]]:
    """The rows of the one that was chosen, or of the only one there is.

    Raises:
        InvalidValue: there are several, and none was chosen.
        UnknownName: there is no such one in the file.
    """
    names = tuple(dict.fromkeys(str(row[field]) for row in rows))
    if chosen is None and len(names) > 1:
        raise InvalidValue(option, chosen, f"one of those that the file has sizes of: {', '.join(names)}")
    if chosen is not None and chosen not in names:
        raise UnknownName(f"{field} in this file", chosen, names)
    return [row for row in rows if chosen is None or row[field] == chosen]
