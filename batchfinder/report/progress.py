"""How far a command has come, on stderr: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from batchfinder.report.sweep import SweepRow, sweep_table
from batchfinder.report.terminal import printable, tell, words_of

# The lines of a live table that are not rows: title, details, heading, rule, bar and the empty ones between and after.
_OTHER_LINES = 12


class StatusLine(ExitStack):
    """What is being done: on a terminal beside a spinner, or rich's `columns`; elsewhere a line for each new thing."""

    def __init__(self, *columns: ProgressColumn) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False)
        columns = columns or (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=None)
        self._live: Live | None = None
        # A terminal on which a line can be redrawn.
        if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            # The cursor stays on an empty line, where the terminal's own ^C does not run into another.
            live = Live(Group(self._bar, ""), console=self._console, transient=True, redirect_stdout=False)
            self._live = self.enter_context(live)

    def __exit__(self, kind: Any, *raised: Any) -> bool:
        if kind is not None:
            # An interrupt while rich writes leaves in its buffer what it has written, which would come once more.
            self._console.begin_capture()
            self._console.end_capture()
        return bool(super().__exit__(kind, *raised))

    def update(self, status: str, terminal_only: bool = False) -> None:
        """Say what is being done now; on a terminal only, where it is too short for a line in a log."""
        self._bar.update(self._task, description=printable(status))
        if self._live is None and not terminal_only:
            tell(status)


class SweepProgress(StatusLine):
    """Shows rows as they are found, and what they hold under above the live table.

    Attributes:
        cells: (model, GPU, length) of every row to be found, in the order asked for, as far as it is known.
    """

    def __init__(self, conditions: Sequence[str]) -> None:
        status = TextColumn("{task.description}", markup=False)
        super().__init__(status, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.cells: list[tuple[str, str, int | None]] = []
        self._found: list[SweepRow] = []
        self._conditions = conditions

    @property
    def rows(self) -> list[SweepRow]:
        """What was found, in the order asked for."""
        order = {cell: number for number, cell in enumerate(self.cells)}
        return sorted(self._found, key=lambda row: order[row.cell.model, row.cell.card.name, row.cell.seq_len])

    def expect(self, cells: Sequence[tuple[str, str, int | None]]) -> None:
        """Set `cells`."""
        self.cells = list(cells)
        self._bar.update(self._task, total=len(cells))

    def failed(self, error: BaseException) -> None:
        """Show an error that does not end the sweep."""
        self._say(words_of(error))

    def _say(self, words: str) -> None:
        """Print a line, which stays above a live table."""
        if self._live is None:
            tell(f"batchfinder: {words}")
        else:
            self._console.print(printable(f"batchfinder: {words}", lines=True), markup=False, soft_wrap=True)

    def found(self, row: SweepRow) -> None:
        """Show a finished row, and once that results cannot be cached."""
        if row.not_cached and not any(earlier.not_cached for earlier in self._found):
            self._say(f"warning: {row.not_cached} The sweep goes on; what it finds is printed, and may not be cached.")
        self._found.append(row)
        self._bar.advance(self._task)
        if self._live is None:
            tried = f"{len(row.trials)} trial{'' if len(row.trials) == 1 else 's'}"
            how = f"{row.result.source}, {'from the cache' if row.cached else tried}, {row.seconds:.1f} s"
            tell(f"[{len(self._found)}/{len(self.cells)}] {row.cell}: {row.result.max_batch_size} ({how})")
            return
        last = {id(row) for row in self._found[-max(self._console.height - _OTHER_LINES, 1) :]}
        shown = [row for row in self.rows if id(row) in last]
        table = replace(sweep_table(shown, self._conditions), notes=())
        self._live.update(Group(table, "", self._bar, ""), refresh=True)
