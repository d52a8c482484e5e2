"""What has to start again once a size is known: schedulers that depend on it, and an evaluation that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytorch_lightning import Trainer

from batchfinder.lightning.compat import combined_loader, drop_loaders
from batchfinder.snapshot.training_state import TrainingState

if TYPE_CHECKING:
    from batchfinder.lightning.compat import StageLoop


class SchedulerSetup:
    """Watches `configure_optimizers`, and repeats it where it asked for the loaders.

    A scheduler made with `trainer.estimated_stepping_batches` is as long as an epoch of the old batch size. A run that
    is started with the new size would make another, having drawn the same random numbers; so does the repetition.
    """

    _before: TrainingState | None = None
    _asked = False

    def watch(self, trainer: Trainer) -> None:
        """Note the random numbers just before the strategy, not set up yet, makes the optimizers."""
        strategy = trainer.strategy
        make = strategy.setup_optimizers
        self._before, self._asked = None, False

        def setup_optimizers(trainer: Trainer) -> None:
            self.unwatch(trainer)
            self._before = TrainingState.capture()
            make(trainer)
            # Looked up right away: a LearningRateFinder asks for them later, and must not be taken for a scheduler.
            self._asked = combined_loader(trainer.fit_loop) is not None

        strategy.setup_optimizers = setup_optimizers  # type: ignore[method-assign]

    def unwatch(self, trainer: Trainer) -> None:
        """Stop watching."""
        vars(trainer.strategy).pop("setup_optimizers", None)

    def repeat_if_asked(self, trainer: Trainer) -> None:
        """Make the optimizers again, with the new size and accumulation; the random numbers stay where they are."""
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

    _before: TrainingState | None = None

    def watch(self, loop: StageLoop) -> None:
        """Note the random numbers just before a loop that has not started asks for its loaders."""
        vars(loop).pop("setup_data", None)
        self._before = None
        ask = loop.setup_data

        def setup_data() -> None:
            vars(loop).pop("setup_data", None)
            self._before = TrainingState.capture()
            ask()

        vars(loop)["setup_data"] = setup_data

    def restart(self, loop: StageLoop) -> None:
        """Let a loop that has taken no batch yet ask for the loaders again, and start to iterate them."""
        drop_loaders(loop)
        if self._before is not None:
            self._before.restore()
            self._before = None
        loop.setup_data()
        loop.reset()
