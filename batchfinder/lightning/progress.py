"""A bar while sizes are tried, in the style of the trainer's own: Rich, TQDM, or none."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from pytorch_lightning import Trainer

from batchfinder.lightning.compat import is_a, progress_bar_console
from batchfinder.results import Trial


class Progress:
    """Shows the tries; nothing is shown before the first, nor where the trainer shows nothing.

    Args:
        trainer: whose progress bar is imitated.
    """

    def __init__(self, trainer: Trainer) -> None:
        bar = trainer.progress_bar_callback
        shown = bar is not None and trainer.is_global_zero and not getattr(bar, "is_disabled", False)
        self._rich = shown and is_a(bar, "RichProgressBar")
        self._tqdm = shown and is_a(bar, "TQDMProgressBar")
        self._console: dict[str, Any] = progress_bar_console(bar)  # where the user wants Rich to write
        self._bar: Any = None
        self._tries = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop() if self._rich else self._bar.close()
            self._bar = None

    def tried(self, trial: Trial) -> None:
        """Show one more."""
        self._tries += 1
        tries = "1 try" if self._tries == 1 else f"{self._tries} tries"
        text = f"BatchFinder: batch size {trial.batch_size} {'fits' if trial.fits else 'does not fit'} ({tries})"
        if self._rich:
            from rich.console import Console
            from rich.status import Status

            if self._bar is None:
                self._bar = Status(text, console=Console(**self._console))
                self._bar.start()
            self._bar.update(text)
        elif self._tqdm:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            if self._bar is None:
                self._bar = tqdm(leave=False, bar_format="{desc}")
            self._bar.set_description_str(text)
