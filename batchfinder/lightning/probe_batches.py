"""Batches to probe with, of any size and sequence length, made of the user's own data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.combined_loader import CombinedLoader

from batchfinder.data.batch import tensors
from batchfinder.data.longest_samples import MadeBatches, SampleBatches, UnreadableData, batches_of
from batchfinder.data.sequence_dim import SequenceDims, find_sequence
from batchfinder.lightning.compat import LoaderSource, combine_batches, is_a, is_sequential
from batchfinder.lightning.dataloaders import samples_per_epoch

MakeBatch = Callable[[int, int | None], Any]

_MAKE_BATCH = "Pass BatchFinder make_batch=, a function that makes a batch of (batch_size, seq_len)."


@contextmanager
def _refused() -> Iterator[None]:
    """Refuse data that cannot be read as Lightning refuses what it is given."""
    try:
        yield
    except UnreadableData as error:
        raise MisconfigurationException(f"{error} {_MAKE_BATCH}") from None


class ProbeBatches:
    """Makes batches for probes, on the host.

    The loaders are asked for once, when they are first needed, and never iterated: samples are read from the datasets
    in this process and given to the loaders' collate_fn. Where samples vary in length the longest ones seen make up the
    batch, else up to 32 different ones do. With several loaders a batch is the list or dict of batches that training
    gets; where loaders take turns (validation, mode "sequential") it is a batch of the one whose samples are largest.

    Reading the user's data may move random number generators on and change the user's own objects: the caller puts
    those back. Samplers and the loaders' generators stay where they are.

    Args:
        trainer: set up.
        pl_module: its module.
        source: where a loop's loaders come from (`compat.loader_source`).
        make_batch: makes a batch of (batch_size, seq_len) instead; seq_len is None where none was asked for.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        source: LoaderSource,
        make_batch: MakeBatch | None = None,
    ) -> None:
        self.trainer = trainer
        self.pl_module = pl_module
        self.source = source
        self.make_batch = make_batch

    @cached_property
    def loaders(self) -> Any:
        """What the source gives; None if it has nothing to give and `make_batch` does without.

        Raises:
            MisconfigurationException: there are neither loaders nor `make_batch`.
        """
        if self.source.instance is not None and self.source.is_defined():
            return self.source.dataloader()
        if self.make_batch is not None:
            return None
        raise MisconfigurationException(
            f"There are no loaders to take batches from: define {self.source.name}() in the module or a datamodule, or"
            f" pass loaders to the trainer. {_MAKE_BATCH}"
        )

    @_refused()
    def batch(self, batch_size: int, seq_len: int | None = None) -> Any:
        """Make one batch.

        Args:
            batch_size: its samples, from each loader.
            seq_len: its sequence length; None for that of the longest samples.

        Raises:
            MisconfigurationException: the data do not tell how to make one.
        """
        if self.make_batch is not None:
            return self.make_batch(batch_size, seq_len)
        made = [self._stretched(index, batch_size, seq_len) for index in self._used]
        if self._takes_turns:
            return made[0]
        return combine_batches(self._combined, made)

    @_refused()
    def mixed(self, batch_size: int) -> Any:
        """Make a batch of samples as they come, of whatever lengths; of the longest where batches come ready-made.

        Args:
            batch_size: its samples, from each loader.
        """
        if self.make_batch is not None:
            return self.make_batch(batch_size, None)
        made = [self._makers[index].mixed(batch_size) for index in self._used]
        return made[0] if self._takes_turns else combine_batches(self._combined, made)

    @_refused()
    def longest_seq_len(self) -> int | None:
        """The sequence length of a batch of the longest samples; None for data without one, and for `make_batch`."""
        if self.make_batch is not None:
            return None
        lengths = [found.length for found in map(self._sequence_or_none, self._used) if found is not None]
        return max(lengths, default=None)

    def dataset_size(self) -> int | None:
        """The largest batch that makes sense: one device's samples in an epoch; None where only reading would tell.

        With several loaders it is the largest, or the smallest of those that drop their last batch, as a loader would
        otherwise have no batch at all.
        """
        if self.loaders is None:
            return None
        sizes = [(loader, samples_per_epoch(self.trainer, loader)) for loader in self._combined.flattened]
        dropping = [size for loader, size in sizes if size is not None and _drops_last(loader)]
        known = [size for _, size in sizes if size is not None]
        if dropping:
            return min(dropping)
        return max(known) if known and len(known) == len(sizes) else None

    @cached_property
    def _combined(self) -> CombinedLoader:
        if is_a(self.loaders, "CombinedLoader"):
            combined: CombinedLoader = self.loaders
            return combined
        return CombinedLoader(
            self.loaders, "max_size_cycle" if self.source.name == "train_dataloader" else "sequential"
        )

    @property
    def _takes_turns(self) -> bool:
        return is_sequential(self._combined)

    @cached_property
    def _makers(self) -> list[SampleBatches | MadeBatches]:
        return [batches_of(loader) for loader in self._combined.flattened]

    @cached_property
    def _used(self) -> list[int]:
        every = list(range(len(self._makers)))
        if not self._takes_turns or len(every) == 1:
            return every
        return [max(every, key=lambda index: _n_bytes(self._makers[index].batch(1)))]

    def _stretched(self, index: int, batch_size: int, seq_len: int | None) -> Any:
        batch = self._makers[index].batch(batch_size, longest=seq_len is None)
        if batch is None:
            loader = type(self._combined.flattened[index]).__name__
            raise MisconfigurationException(
                f"The batches of {loader} hold no tensor that tells how many samples there are. {_MAKE_BATCH}"
            )
        if seq_len is None:
            return batch
        found = find_sequence(*self._makers[index].extremes(longest=False))
        if isinstance(found, str):
            raise MisconfigurationException(
                f"BatchFinder cannot tell which dimension of the batches is the sequence, to make it {seq_len} long:"
                f" {found}. {_MAKE_BATCH}"
            )
        return found.stretch(batch, seq_len)

    def _sequence_or_none(self, index: int) -> SequenceDims | None:
        found = find_sequence(*self._makers[index].extremes(), guess=False)
        return found if isinstance(found, SequenceDims) else None


def _drops_last(loader: Any) -> bool:
    return bool(getattr(getattr(loader, "batch_sampler", None), "drop_last", getattr(loader, "drop_last", False)))


def _n_bytes(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(batch))
