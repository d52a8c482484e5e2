"""The callback that has a Trainer train as sizes were tried: phases begin with an empty allocator's cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from batchfinder.measure.trial import prepare_cache


class EmptyCacheCallback(TrainerCallback):
    """Empties the allocator's cache as training begins, with `prepare_cache`, and before and after each evaluation.

    A checkpoint that was restored, and an evaluation, leave it in pieces in which a full batch finds no room.
    """

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """A checkpoint may have been restored."""
        prepare_cache(args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation may come next: the callbacks that ask for it come before the others."""
        if control.should_evaluate:
            torch.cuda.empty_cache()

    on_epoch_end = on_step_end

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """The next step follows."""
        torch.cuda.empty_cache()
