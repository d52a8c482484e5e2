"""Starting an evaluation again: its loaders have been asked for and iterated before any hook could set their size."""

from __future__ import annotations

from typing import Any

from batchfinder.probing.state import TrainingState


class EvaluationStart:
    """Notes the random numbers as an evaluation starts, and starts it again from there.

    Asking for loaders and iterating them draws random numbers (a seed for the workers, the order of a shuffled
    epoch). So that an evaluation draws what it would had it been started with the size found, the first start's are
    put back.
    """

    def __init__(self) -> None:
        self._before: TrainingState | None = None

    def watch(self, loop: Any) -> None:
        """Note the random numbers just before the loop asks for its loaders.

        Args:
            loop: an evaluation or prediction loop that has not started.
        """
        self.unwatch(loop)
        ask = loop.setup_data

        def setup_data() -> None:
            self.unwatch(loop)
            self._before = TrainingState.capture()
            ask()

        loop.setup_data = setup_data

    def unwatch(self, loop: Any) -> None:
        """Stop watching."""
        vars(loop).pop("setup_data", None)
        self._before = None

    def again(self, loop: Any) -> None:
        """Ask for the loaders again, and start to iterate them.

        Args:
            loop: started, and no batch taken yet.
        """
        if loop._combined_loader is not None:
            loop._combined_loader.reset()  # ends the first start's workers
            loop._combined_loader = None
        if self._before is not None:
            self._before.restore()
            self._before = None
        loop.setup_data()
        loop.reset()
