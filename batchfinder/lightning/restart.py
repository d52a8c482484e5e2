"""Schedulers that are as long as training: made again when the batch size changes how long that is.

Starting an evaluation again: its loaders have been asked for and iterated before any hook could set their size.
"""

from __future__ import annotations

from typing import Any

from batchfinder.snapshot.training_state import TrainingState


class SchedulerSetup:
    """Watches `configure_optimizers`, and repeats it where it asked for the loaders.

    A scheduler made with `trainer.estimated_stepping_batches` is as long as an epoch of the old batch size. A run that
    is started with the new size would make another, having drawn the same random numbers; so does the repetition.
    """

    def __init__(self) -> None:
        self._before: TrainingState | None = None
        self._asked = False

    def watch(self, trainer: Any) -> None:
        """Note the random numbers just before the optimizers are made.

        Args:
            trainer: whose strategy is not set up yet.
        """
        strategy = trainer.strategy
        make = strategy.setup_optimizers
        self._before, self._asked = None, False

        def setup_optimizers(trainer: Any) -> None:
            self.unwatch(trainer)
            self._before = TrainingState.capture()
            make(trainer)
            # Looked up right away: a LearningRateFinder asks for them later, and must not be taken for a scheduler.
            self._asked = trainer.fit_loop._combined_loader is not None

        strategy.setup_optimizers = setup_optimizers

    def unwatch(self, trainer: Any) -> None:
        """Stop watching."""
        vars(trainer.strategy).pop("setup_optimizers", None)

    def repeat_if_asked(self, trainer: Any) -> None:
        """Make the optimizers again where the loaders were asked for. The random numbers stay where they are.

        Args:
            trainer: with the new size and accumulation.
        """
        before, self._before = self._before, None
        self.unwatch(trainer)
        if before is None or not self._asked:
            return
        now = TrainingState.capture()
        before.restore()
        trainer.strategy.setup_optimizers(trainer)
        now.restore()


class EvaluationRestart:
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
