"""Running `trainer.train()` up to its first batch: everything is prepared, and no step has been taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchfinder.errors import InvalidValue
from batchfinder.snapshot.training_state import TrainingState

if TYPE_CHECKING:
    from transformers import Trainer

T = TypeVar("T")


def where_training_begins(
    trainer: Trainer, make_loader: Callable[[Any], Any], callbacks: Sequence[Any], body: Callable[[Any], T]
) -> T:
    """Let the trainer prepare its training, call a function in place of the first step, and undo the preparations.

    `trainer.train()` itself runs, up to where it asks for the first batch: the model is wrapped, the optimizer and the
    scheduler are made, hooks are in place, whatever the version of transformers and whatever a derived class overrides.
    Only the callbacks that are named take part; nothing is evaluated.

    Args:
        trainer: not in training.
        make_loader: takes the trainer, and returns what training would read.
        callbacks: those of the trainer's, or their classes, that take part.
        body: takes the loader. Tensors that it changes it has to put back itself.

    Returns:
        What the body returned.

    Raises:
        InvalidValue: the trainer steps without asking for batches.
        Exception: whatever the preparations or the body raised, unchanged.
    """
    # Tensors are left alone: the preparations write to none that training would not write to, and a copy takes memory.
    before = TrainingState.capture(trainer, left_alone=[torch.Tensor, *bulk_data(trainer)])
    try:
        with ExitStack() as entered:
            refusing = register_optimizer_step_pre_hook(_refuse)
            entered.callback(refusing.remove)
            entered.enter_context(_quiet())

            def begin() -> T:
                refusing.remove()
                del vars(trainer)["get_train_dataloader"]
                return body(loader)

            loader = make_loader(trainer)
            sentinel = _LoaderSentinel(loader, begin)
            vars(trainer)["get_train_dataloader"] = lambda: sentinel
            trainer.args.eval_on_start = False
            trainer.callback_handler = _only(trainer, callbacks)
            try:
                trainer.train()
            except _TrainingInterrupted as returned:
                result: T = returned.value
                return result
        raise _unsupported(trainer, "ends")
    finally:
        before.restore()


def bulk_data(trainer: Trainer) -> list[Any]:
    """The trainer's data where they are plain lists, which need not be copied to put them back."""
    found = [trainer.train_dataset, trainer.eval_dataset]
    if isinstance(trainer.eval_dataset, dict):
        found += trainer.eval_dataset.values()
    return [data for data in found if isinstance(data, list | tuple)]


class _TrainingInterrupted(BaseException):
    """Carries what the body returned out of `train()`, past handlers of exceptions."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _LoaderSentinel:
    """Stands for the loader until training asks for its first batch."""

    def __init__(self, loader: Any, body: Callable[[], Any]) -> None:
        self.dataset = getattr(loader, "dataset", None)
        self._loader = loader
        self._body = [body]

    def __len__(self) -> int:
        return max(1, len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        # Taken out, so that nothing that the trainer can reach leads to the search.
        body, self._loader = self._body.pop(), ()
        raise _TrainingInterrupted(body())


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise _unsupported(optimizer, "steps")


def _unsupported(item: Any, does: str) -> InvalidValue:
    return InvalidValue(
        "trainer",
        f"{type(item).__name__} {does} without a batch",
        "a trainer whose train() iterates over get_train_dataloader(); for a loop of its own there is tune_batch_size",
    )


def _only(trainer: Trainer, callbacks: Sequence[Any]) -> Any:
    """A handler of the flow of training, and of the callbacks that take part."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    kinds = tuple(callback for callback in callbacks if isinstance(callback, type))
    named = [
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, kinds) or any(callback is one for one in callbacks)
    ]
    handler: Any = CallbackHandler
    return handler(
        [DefaultFlowCallback(), *named],
        trainer.model,
        trainer.processing_class,
        trainer.optimizer,
        trainer.lr_scheduler,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the trainer from announcing a training that does not take place."""
    log = logging.getLogger("transformers.trainer")
    level = log.level
    log.setLevel(logging.WARNING if level < logging.WARNING else level)
    try:
        yield
    finally:
        log.setLevel(level)
