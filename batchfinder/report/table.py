"""Columns of text as a table on a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection

from rich import box
from rich.table import Table

from batchfinder.report.rows import Columns

LEFT = ("model", "GPU", "source", "stage")


def rich_table(columns: Columns, title: str, left: Collection[str] = LEFT) -> Table:
    """A table for a terminal.

    Args:
        columns: text by heading; all of one length.
        title: stands above it.
        left: headings of columns that hold words rather than numbers.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading != "GPU")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def markdown(columns: Columns, left: Collection[str] = LEFT) -> str:
    """A GitHub table, ending with a line break."""
    lines = [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" if heading in left else "---:" for heading in columns) + " |",
    ]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*columns.values(), strict=True)]
    return "\n".join(lines) + "\n"


def comma_separated(rows: list[dict[str, object]]) -> str:
    """CSV with a heading, from JSON rows; lists are joined by semicolons."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: "; ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}
        )
    return text.getvalue()
