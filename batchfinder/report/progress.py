"""How far a verb has come, on stderr: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from batchfinder.report.rows import SweepRow
from batchfinder.report.sheet import is_terminal
from batchfinder.report.sweep_sheet import sweep_sheet

# The lines of a live table that are not rows: title, details, heading, rule, bar and the empty ones between them.
_OTHER_LINES = 11


class Activity:
    """Says what is being done: beside a spinner on a terminal, a line for each new thing elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = self._make_bar()
        self._task = self._bar.add_task("", total=None)
        self._live: Live | None = None
        if is_terminal():
            self._live = Live(self._bar, console=self._console, transient=True, redirect_stdout=False)

    def __enter__(self) -> Activity:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def doing(self, what: str, worth_a_line: bool = True) -> None:
        """Say what is being done now.

        Args:
            what: in words.
            worth_a_line: whether it takes so long that it should be said where there is no terminal, too.
        """
        self._bar.update(self._task, description=what)
        if self._live is None and worth_a_line:
            print(what, file=sys.stderr, flush=True)

    def _make_bar(self) -> Progress:
        return Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=self._console)


class SweepProgress(Activity):
    """Shows rows as they are found.

    Args:
        conditions: what the figures hold under, for the live table.
    """

    def __init__(self, conditions: Sequence[str]) -> None:
        super().__init__()
        self.rows: list[SweepRow] = []
        self.cells = 0
        self._conditions = conditions

    def __enter__(self) -> SweepProgress:
        super().__enter__()
        return self

    def expect(self, cells: int) -> None:
        """Say how many rows there will be, as far as is known."""
        self.cells = cells
        self._bar.update(self._task, total=cells)

    def found(self, row: SweepRow) -> None:
        """Show a finished row."""
        self.rows.append(row)
        self._bar.advance(self._task)
        if self._live is None:
            where = "" if row.seq_len is None else f" at {row.seq_len}"
            source = "simulated, from the cache" if row.source == "cache" else f"{row.source}, {row.trials} trials"
            print(
                f"[{len(self.rows)}/{self.cells}] {row.model}{where} on {row.gpu}: {row.max_batch_size} "
                f"({source}, {row.seconds:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
            return
        shown = self.rows[-max(self._console.height - _OTHER_LINES, 1) :]
        table = replace(sweep_sheet(shown, self._conditions), notes=())
        self._live.update(Group(table, "", self._bar), refresh=True)

    def _make_bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
