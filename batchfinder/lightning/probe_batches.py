"""Batches to probe with, of any size and sequence length, made of the user's own data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.combined_loader import CombinedLoader

from batchfinder.data.batch import tensors
from batchfinder.data.longest_samples import MadeBatches, SampleBatches, UnreadableData, batches_of
from batchfinder.data.sequence_dim import SequenceDims, find_sequence
from batchfinder.lightning.compat import combine_batches, combined_mode, is_a
from batchfinder.lightning.dataloaders import samples_per_epoch

if TYPE_CHECKING:
    from batchfinder.lightning.compat import LoaderSource

MakeBatch = Callable[[int, int | None], Any]

_MAKE_BATCH = "Pass BatchFinder make_batch=, a function that makes a batch of (batch_size, seq_len)."


@contextmanager
def _refused() -> Iterator[None]:
    """Refuse data that cannot be read as Lightning refuses what it is given."""
    try:
        yield
    except UnreadableData as error:
        raise MisconfigurationException(f"{error} {_MAKE_BATCH}") from None


@dataclass(eq=False)
class ProbeBatches:
    """Makes batches for probes, on the host.

    The loaders are asked for once, when they are first needed, and never iterated: samples are read from the datasets
    in this process and given to the loaders' collate_fn. Where samples vary in length the longest ones seen make up the
    batch, else up to 32 different ones do. With several loaders a batch is the list or dict of batches that training
    gets; where loaders take turns (validation, mode "sequential") it is a batch of the one whose samples are largest.

    Reading the user's data may move random number generators on and change the user's own objects: the caller puts
    those back. Samplers and the loaders' generators stay where they are.
    """

    trainer: Trainer
    pl_module: LightningModule
    source: LoaderSource
    make_batch: MakeBatch | None = None

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
        """Make one batch of `batch_size` samples from each loader.

        Without a `seq_len` it is as long as the longest samples.

        Raises:
            MisconfigurationException: the data do not tell how to make one.
        """
        if self.make_batch is not None:
            return self.make_batch(batch_size, seq_len)
        made = []
        for loader, samples in self._used:
            batch = samples.batch(batch_size, longest=seq_len is None)
            if batch is None:
                raise MisconfigurationException(
                    f"The batches of {type(loader).__name__} hold no tensor that tells how many samples there are. "
                    f"{_MAKE_BATCH}"
                )
            if seq_len is not None:
                found = find_sequence(*samples.extremes(longest=False))
                if isinstance(found, str):
                    raise MisconfigurationException(
                        "BatchFinder cannot tell which dimension of the batches is the sequence, to make it "
                        f"{seq_len} long: {found}. {_MAKE_BATCH}"
                    )
                batch = found.stretch(batch, seq_len)
            made.append(batch)
        return combine_batches(self._combined, made)

    @_refused()
    def mixed(self, batch_size: int) -> Any:
        """Make a batch of samples as they come, of whatever lengths; of the longest where batches come ready-made."""
        if self.make_batch is not None:
            return self.make_batch(batch_size, None)
        return combine_batches(self._combined, [samples.mixed(batch_size) for _, samples in self._used])

    @_refused()
    def longest_seq_len(self) -> int | None:
        """The sequence length of a batch of the longest samples; None for data without one, and for `make_batch`."""
        if self.make_batch is not None:
            return None
        found = [find_sequence(*samples.extremes(), guess=False) for _, samples in self._used]
        return max((dims.length for dims in found if isinstance(dims, SequenceDims)), default=None)

    def dataset_size(self) -> int | None:
        """The largest batch that makes sense: one device's samples in an epoch; None where only reading would tell.

        With several loaders it is the largest, or the smallest of those that drop their last batch, as a loader would
        otherwise have no batch at all.
        """
        if self.loaders is None:
            return None
        sizes = [(loader, samples_per_epoch(self.trainer, loader)) for loader in self._combined.flattened]
        known, dropping = [], []
        for loader, size in sizes:
            if size is not None:
                known.append(size)
                batch_sampler = getattr(loader, "batch_sampler", None)
                if getattr(batch_sampler, "drop_last", getattr(loader, "drop_last", False)):
                    dropping.append(size)
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

    @cached_property
    def _used(self) -> list[tuple[Any, SampleBatches | MadeBatches]]:
        """The loaders that make up a batch, and their samples: all; where they take turns, that with the largest."""
        every = [(loader, batches_of(loader)) for loader in self._combined.flattened]
        if combined_mode(self._combined) != "sequential" or len(every) == 1:
            return every
        parts = [tensors(samples.batch(1)) for _, samples in every]
        sizes = [sum(tensor.numel() * tensor.element_size() for _, tensor in part) for part in parts]
        return [every[sizes.index(max(sizes))]]
