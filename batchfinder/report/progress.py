"""How far a sweep has come, on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batchfinder.report.rows import SweepRow, columns
from batchfinder.report.table import rich_table


class SweepProgress:
    """Shows rows as they are found.

    Args:
        cells: how many there will be.
        target_batch_size: the effective batch that was asked for; None without one.
        title: stands above the live table.
    """

    def __init__(self, cells: int, target_batch_size: int | None, title: str) -> None:
        self.cells = cells
        self.rows: list[SweepRow] = []
        self._target_batch_size = target_batch_size
        self._title = title
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("recording", total=cells)
        self._live = Live(console=console, transient=True, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> SweepProgress:
        if self._live is not None:
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def doing(self, what: str) -> None:
        """Say what is being done now."""
        self._bar.update(self._task, description=what)
        self._draw()

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
            )
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        parts = [rich_table(columns(self.rows, self._target_batch_size), self._title)] if self.rows else []
        self._live.update(Group(*parts, self._bar))
