"""Schedulers that are as long as training: made again when the batch size changes how long that is."""

from __future__ import annotations

from typing import Any

from batchfinder.probing.state import TrainingState


class OptimizerSetup:
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
