"""A table with the lines above and below it, for a terminal of any width and for pipes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from batchfinder.report.made_by import made_by_words
from batchfinder.report.terminal import printable

Columns = dict[str, list[str]]

# Headings of columns that hold words rather than numbers, and of those whose words may go on in the next line.
_LEFT = (
    *("model", "GPU", "source", "stage", "record", "precision", "mode", "depends on", "value", "verdict"),
    *("cell", "kind", "shape", "module", "operator", "strategy", "fits", "change", "held by", "card"),
    *("architecture", "also called", "instance", "provider", "GPUs"),
)
_FOLDED = ("model", "GPU", "value", "module", "operator", "change")
_GAP = 2
_PIPE_WIDTH = 10_000


@dataclass(frozen=True)
class Table:
    """A table, its title, the details below that, and the notes below the table."""

    title: str
    details: tuple[str, ...]
    columns: Columns  # text by heading; all of one length
    notes: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(printable(self.title), style="bold")
        for line in self.details:
            yield Text(printable(line), style="dim")
        if self.columns:
            yield Text("")
        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        columns = {heading: list(map(printable, cells)) for heading, cells in self.columns.items()}
        widths = [max(map(cell_len, (heading, *cells))) for heading, cells in columns.items()]
        fits = sum(widths) + _GAP * (len(widths) - 1) <= options.max_width
        for heading, cells in columns.items():
            # In as many lines as make it no wider than its column, or than its longest word.
            narrow = max(map(cell_len, (*heading.split(), *cells)))
            table.add_column(
                heading if fits else textwrap.fill(heading, narrow, break_on_hyphens=False),
                # Cells that come with spaces are in line already; on the right Rich would take them off.
                justify="left" if heading in _LEFT or any(cell != cell.strip() for cell in cells) else "right",
                vertical="bottom",
                no_wrap=heading not in _FOLDED,
                overflow="fold",
            )
        for row in zip(*columns.values(), strict=True):
            table.add_row(*map(Text, row))
        if self.columns:
            yield table
        if self.notes:
            yield Text("")
        for note in self.notes:
            first, *more = Text(printable(note), style="dim").wrap(console, max(options.max_width - _GAP, 1))
            yield first
            yield from (Padding(line, (0, 0, 0, _GAP)) for line in more)

    def show(self) -> None:
        """Print it on stdout: as wide as the terminal, or as plain text as wide as it needs to be."""
        if sys.stdout.isatty():
            Console(highlight=False).print(self)
        else:
            print(self)

    def __str__(self) -> str:
        """As plain text, as wide as it needs to be."""
        console = Console(color_system=None, force_terminal=False, highlight=False, width=_PIPE_WIDTH)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def to_html(self) -> str:
        """For a notebook."""
        words = {heading: "left" if heading in _LEFT else "right" for heading in self.columns}

        def row(cell: str, texts: Iterable[str]) -> str:
            aligned = zip(words.values(), texts, strict=True)
            inner = (f'<{cell} style="text-align: {side}">{escape(text)}</{cell}>' for side, text in aligned)
            return f"<tr>{''.join(inner)}</tr>"

        above = "<br>".join([f"<b>{escape(self.title)}</b>", *map(escape, self.details)])
        rows = "".join(row("td", texts) for texts in zip(*self.columns.values(), strict=True))
        below = "<br>".join(map(escape, self.notes))
        return f"<p>{above}</p><table><thead>{row('th', words)}</thead><tbody>{rows}</tbody></table><p>{below}</p>"

    def to_markdown(self, *, is_last: bool = True) -> str:
        """The same for GitHub, ending with a line break; the last table of a file says what made it."""
        rows = [list(self.columns), ["---" if heading in _LEFT else "---:" for heading in self.columns]]
        for row in zip(*self.columns.values(), strict=True):
            rows.append([])
            for cell in map(printable, row):
                text = cell.lstrip(" ")  # Markdown would drop blanks in front
                escaped = text.replace("|", r"\|").replace("*", r"\*")
                rows[-1].append("&nbsp;" * (len(cell) - len(text)) + escaped)
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        blocks = [f"**{self.title}**", *self.details, table]
        notes = [*self.notes, *([printable(made_by_words())] if is_last else [])]
        blocks += ["\n".join(f"- {note}" for note in notes)] if notes else []
        return "\n\n".join(blocks) + "\n"


def assumptions(unmodelled: Iterable[str], explain: bool) -> tuple[str, ...]:
    """The notes on what simulated figures assume or leave out: one line that counts them, or a line for each."""
    texts = tuple(dict.fromkeys(unmodelled))
    if explain or not texts:
        glossary = ("docs/glossary.md explains the words",) if texts else ()
        return tuple(f"left out or assumed: {text}" for text in texts) + glossary
    return (
        "1 assumption; --explain says which" if len(texts) == 1 else f"{len(texts)} assumptions; --explain lists them",
    )
