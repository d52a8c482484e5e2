"""What a fit does besides one full batch after another, as far as it changes the memory: read from the trainer.

A restored optimizer, a scaler that skips its first steps, a validation, an epoch at which layers are unfrozen: each
leaves the allocator's cache in other pieces, or takes memory of its own. A trial takes each of these once, in the order
in which training has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.lightning.compat import averaging_starts, callbacks_of, is_a, restores_optimizers, scales_loss

ASKED_SIZE = 128
"""Of training's batches, at which a hook is asked how large it makes a validation's."""
_MOST_EPOCHS = 1000
"""Of a fit without an end, or with more epochs, those that a finetuning callback is asked about."""


@dataclass(frozen=True)
class Schedule:
    """The phases of a fit that a trial takes, in the order of these fields; batches of other sizes come with the data.

    Attributes:
        restores_optimizers: whether the checkpoint that the fit goes on from has optimizers' states.
        skips_a_step: whether the scaler of 16-mixed starts at a scale with which the first steps overflow as a rule.
        accumulation: micro-batches per optimizer step where there is no target; the most that a
            GradientAccumulationScheduler asks for.
        validation_batch_size: of the validation in the fit; None where it has none, or none that can be tried.
        validation_by_hook: how large it is where training's batches have `ASKED_SIZE`, if a hook makes it of that size;
            None where its size is its own.
        validation_interval: after how many batches there is one, or after which share of an epoch's.
        unfreezes: epochs that a BaseFinetuning callback is asked about, in order.
        averages_from: the epoch from which StochasticWeightAveraging has an average on the device; None without.
        empties_cache: whether each epoch begins with an empty cache, as it does where the fit has validations.
    """

    restores_optimizers: bool = False
    skips_a_step: bool = False
    accumulation: int = 1
    validation_batch_size: int | None = None
    validation_by_hook: int | None = None
    validation_interval: int | float = 1.0
    unfreezes: range = range(0)
    averages_from: int | None = None
    empties_cache: bool = False

    def after_last_validation(self, batches: int) -> int:
        """How many of an epoch's batches come after its last validation; 0 where that is at the epoch's end."""
        every = self._batches_between_validations(batches)
        return batches % every if every else 0

    def validates_within_a_step(self, batches: int, accumulation: int) -> bool:
        """Whether a validation comes between micro-batches of an optimizer step, beside the gradients of the first.

        Args:
            batches: of an epoch.
            accumulation: micro-batches per optimizer step.
        """
        every = self._batches_between_validations(batches)
        return any(at % accumulation for at in range(every, batches, every)) if every else False

    def _batches_between_validations(self, batches: int) -> int:
        """0 where there are none within an epoch, or by the clock."""
        interval = self.validation_interval
        if self.validation_batch_size is None or not isinstance(interval, int | float):
            return 0
        every = int(batches * interval) if isinstance(interval, float) else interval
        return every if 0 < every < batches else 0

    def later_steps(self, batch_size: int, last: int, batches: int) -> list[int | None]:
        """What a trial takes after its first two steps, as `SimulatedProbe.reserved_over` has it.

        Args:
            last: samples of the epoch's last batch, where that is smaller; else 0.
            batches: of an epoch.
        """
        end = [last] if last else []
        begins: list[int | None] = [None] if self.empties_cache else []
        steps = [batch_size, batch_size, *end, *begins, *4 * [batch_size], *end]
        if end and not begins:
            steps += 2 * [batch_size]
        if self.after_last_validation(batches):
            steps += [None, batch_size, *end, None, batch_size, batch_size]
        return steps

    @property
    def later_epochs(self) -> list[int]:
        """Epochs after the first that change what is in memory: the last to unfreeze layers, the average's."""
        last = [self.unfreezes[-1]] if self.unfreezes else []
        return sorted({*last, *([self.averages_from] if self.averages_from else [])})

    def __str__(self) -> str:
        phases = ["the optimizers' states of the checkpoint"] if self.restores_optimizers else []
        phases += ["a step that the scaler skips"] if self.skips_a_step else []
        phases += ["full batches" + ("" if self.accumulation == 1 else f", accumulated {self.accumulation} times")]
        phases += ["batches of other lengths and the epoch's smaller last one, where there are any"]
        if self.validation_batch_size is not None:
            within = "" if self.validation_interval == 1.0 else ", within epochs"
            of_size = f"of {self.validation_batch_size}"
            if self.validation_by_hook is not None:
                of_size = "that its hook makes of the size"
            phases += [f"a validation with batches {of_size}{within}"]
        phases += ["on a GPU, or after a validation, the next epoch's first steps"]
        phases += [f"epoch {self.unfreezes[-1]}, by which layers are unfrozen"] if self.unfreezes else []
        phases += [f"epoch {self.averages_from}, from which weights are averaged"] if self.averages_from else []
        return "; ".join(phases)


NO_SCHEDULE = Schedule()
"""Of what is no fit: nothing but full batches."""


def read_schedule(
    trainer: Trainer, validation_batch_size: int | None = None, validation_by_hook: int | None = None
) -> Schedule:
    """Read a fit's schedule from a trainer that is set up, and that has not started to train."""
    callbacks = callbacks_of(trainer)
    accumulation, epochs = trainer.accumulate_grad_batches, trainer.max_epochs
    most_epochs = _MOST_EPOCHS if epochs is None or epochs < 0 else min(epochs, _MOST_EPOCHS)
    unfreezes, averages_from = range(0), None
    for callback in callbacks:
        if is_a(callback, "GradientAccumulationScheduler"):
            accumulation = max(accumulation, *_scheduling(callback))
        if is_a(callback, "BaseFinetuning"):
            last = getattr(callback, "unfreeze_backbone_at_epoch", most_epochs - 1)
            if last < most_epochs:
                unfreezes = range(1, max(unfreezes.stop, last + 1))
        if is_a(callback, "StochasticWeightAveraging"):
            start = averaging_starts(callback)
            start = int(most_epochs * start) if isinstance(start, float) else start
            averages_from = max(start - 1, 0) if start <= most_epochs else None
    restores = restores_optimizers(trainer)
    return Schedule(
        restores_optimizers=restores,
        skips_a_step=scales_loss(trainer) and not restores,
        accumulation=accumulation,
        validation_batch_size=validation_batch_size,
        validation_by_hook=validation_by_hook,
        validation_interval=trainer.val_check_interval,
        unfreezes=unfreezes,
        averages_from=averages_from,
        empties_cache=bool(trainer.enable_validation),
    )


def _scheduling(callback: Callback) -> Iterable[int]:
    return getattr(callback, "scheduling", {}).values()
