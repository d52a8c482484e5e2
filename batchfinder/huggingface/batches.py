"""Batches of any size, made of the trainer's own samples by its own collator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from batchfinder.data.longest_samples import UnreadableData, batches_of
from batchfinder.data.sequence_dim import find_sequence
from batchfinder.errors import InvalidValue

if TYPE_CHECKING:
    from transformers import Trainer

MakeBatch = Callable[[int, int | None], Any]

_MAKE_BATCH = "or tune_trainer(make_batch=), a function that makes a batch of (batch_size, seq_len)"


def own_loader(trainer: Trainer) -> Any:
    """The loader that training would read.

    Args:
        trainer: any. Its arguments are changed while the loader is made, and put back.

    Raises:
        InvalidValue: the loader's batches do not have the size that the trainer sets.
    """
    size, per_device = trainer._train_batch_size, trainer.args.per_device_train_batch_size
    asked = size - 1 if size > 1 else 2
    try:
        set_size(trainer, asked)
        loader = trainer.get_train_dataloader()
    finally:
        set_size(trainer, per_device)
    sampler = getattr(loader, "batch_sampler", None)
    has = getattr(loader if sampler is None else sampler, "batch_size", None)
    if has != asked:
        raise InvalidValue(
            "get_train_dataloader",
            f"batches of {has} where trainer._train_batch_size is {asked}",
            "a loader whose batch size is trainer._train_batch_size, which tune_trainer sets",
        )
    return loader


def set_size(trainer: Trainer, batch_size: int) -> None:
    """Have the trainer make its training loader with so many samples per micro-batch."""
    trainer.args.per_device_train_batch_size = batch_size
    trainer._train_batch_size = trainer.args.train_batch_size


class TrainerBatches:
    """Makes batches to try sizes with, on the device where the trainer's loader puts them.

    The loader is never iterated: samples are read from the dataset in this process and given to the collator. Where
    samples vary in length the longest ones seen make up the batch.

    Args:
        loader: from `own_loader`.
        make_batch: makes a batch of (batch_size, seq_len) instead.

    Attributes:
        made: samples in the batch that was made last.
    """

    def __init__(self, loader: Any, make_batch: MakeBatch | None) -> None:
        self._device = getattr(loader, "device", None)
        self._make_batch = make_batch
        self.made = 1
        self._dataset = getattr(loader, "dataset", loader)
        self._batches = batches_of(loader)

    def __call__(self, batch_size: int, seq_len: int | None) -> Any:
        """Make one batch.

        Args:
            batch_size: its samples.
            seq_len: its sequence length, to which it is stretched or cut; None for that of the longest samples.

        Raises:
            InvalidValue: the data do not tell how to make one, or can be read only once.
        """
        from accelerate.utils import send_to_device

        self.made = batch_size
        try:
            batch = self._made(batch_size, seq_len)
        except UnreadableData:
            raise self._unreadable() from None
        return batch if self._device is None else send_to_device(batch, self._device)

    def _unreadable(self) -> InvalidValue:
        return InvalidValue(
            "train_dataset",
            type(self._dataset).__name__,
            "at least one sample, in data that can be read more than once, since what is read to try sizes with would "
            f"be missing from the training; {_MAKE_BATCH}",
        )

    def _made(self, batch_size: int, seq_len: int | None) -> Any:
        if self._make_batch is not None:
            return self._make_batch(batch_size, seq_len)
        batch = self._batches.batch(batch_size, longest=seq_len is None)
        if batch is None:
            raise InvalidValue(
                "train_dataset",
                "batches without a tensor",
                f"batches that tell how many samples they have, {_MAKE_BATCH}",
            )
        if seq_len is None:
            return batch
        found = find_sequence(*self._batches.extremes(longest=False))
        if isinstance(found, str):
            raise InvalidValue(
                "seq_len",
                seq_len,
                f"None, since it cannot be seen which dimension is the sequence: {found}; {_MAKE_BATCH}",
            )
        return found.stretch(batch, seq_len)
