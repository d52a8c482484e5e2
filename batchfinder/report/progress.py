"""How far a verb has come, on stderr: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from batchfinder.report.sweep import SweepRow, sweep_sheet
from batchfinder.report.table import is_terminal

# The lines of a live table that are not rows: title, details, heading, rule, bar and the empty ones between them.
_OTHER_LINES = 11


class StatusLine:
    """Says what is being done: beside a spinner on a terminal, a line for each new thing elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = self._make_bar()
        self._task = self._bar.add_task("", total=None)
        self._live: Live | None = None
        if is_terminal():
            self._live = Live(self._bar, console=self._console, transient=True, redirect_stdout=False)

    def __enter__(self) -> StatusLine:
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


class SweepProgress(StatusLine):
    """Shows rows as they are found.

    Args:
        conditions: what the figures hold under, for the live table.
    """

    def __init__(self, conditions: Sequence[str]) -> None:
        super().__init__()
        self._found: list[tuple[tuple[int, ...], SweepRow]] = []
        self.cells = 0
        self._conditions = conditions

    def __enter__(self) -> SweepProgress:
        super().__enter__()
        return self

    @property
    def rows(self) -> list[SweepRow]:
        """What was found, in the order asked for."""
        return _in_order(self._found)

    def expect(self, cells: int) -> None:
        """Say how many rows there will be, as far as is known."""
        self.cells = cells
        self._bar.update(self._task, total=cells)

    def failed(self, why: BaseException) -> None:
        """Tell of a failure that does not end the sweep: it stays, above a live table."""
        self._console.print(f"batchfinder: {why}", markup=False, soft_wrap=True)

    def found(self, row: SweepRow, place: tuple[int, ...]) -> None:
        """Show a finished row.

        Args:
            row: what was found.
            place: where it belongs in the order asked for.
        """
        self._found.append((place, row))
        self._bar.advance(self._task)
        if self._live is None:
            where = "" if row.seq_len is None else f" at {row.seq_len}"
            tried = f"{row.trials} trial{'' if row.trials == 1 else 's'}"
            how = "from the cache" if row.source == "cache" else tried
            print(
                f"[{len(self._found)}/{self.cells}] {row.model}{where} on {row.gpu}: {row.max_batch_size} "
                f"({row.found_by}, {how}, {row.seconds:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
            return
        shown = _in_order(self._found[-max(self._console.height - _OTHER_LINES, 1) :])
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


def _in_order(found: list[tuple[tuple[int, ...], SweepRow]]) -> list[SweepRow]:
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]
