"""Giving a loader another batch size in place, so that nothing else about it changes.

The size lives in the loader's batch sampler, which reads it whenever it is iterated; `DataLoader.batch_size` is a copy
of it for `len()` and for Lightning. Changing both leaves dataset, sampler, generator, workers and collate_fn the very
objects they were. Lightning builds some loaders anew (distributed sampling, overfit_batches, predict) from the
arguments they were first made with; it repeats recorded calls on the new loader, so the
change is recorded there as well.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from lightning_fabric.utilities.data import has_iterable_dataset, sized_len
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from batchfinder.data.batch import tensors
from batchfinder.data.bucket_sampler import LengthBucketBatchSampler
from batchfinder.data.longest_samples import MadeBatches, SampleBatches, UnreadableData, batches_of
from batchfinder.data.sequence_dim import SequenceDims, find_sequence
from batchfinder.lightning.compat import (
    combine_batches,
    combined_mode,
    inner_batch_sampler,
    is_a,
    needs_distributed_sampler,
    record_call,
    recorded_calls,
)
from batchfinder.lightning.ddp import data_parallel_size

if TYPE_CHECKING:
    from batchfinder.lightning.compat import LoaderSource


def flattened(loaders: Any) -> list[Any]:
    """The single loaders in what a `*_dataloader()` hook returned: one, a list, a dict or a CombinedLoader."""
    combined = loaders if is_a(loaders, "CombinedLoader") else CombinedLoader(loaders)
    return list(combined.flattened)


def batch_size_of(loader: Any) -> int | None:
    """The batch size that `resize` would change; None where it cannot change one."""
    holders = _holders(loader)
    return None if not holders else int(holders[0].batch_size)


def check_resizable(loader: object, what: str, hook: str) -> None:
    """Make sure that a loader's batch size can be changed.

    `what` is the loader, and `hook` what could make such a loader (`train_dataloader`), as the message calls them.

    Raises:
        MisconfigurationException: it cannot.
    """
    if _holders(loader):
        return
    maker = loader
    if isinstance(loader, DataLoader):
        maker = loader.dataset if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(maker, LengthBucketBatchSampler):
        raise MisconfigurationException(
            f"batchfinder cannot change the batch size of {what}: its LengthBucketBatchSampler has one for each length."
            " Find these first, with BatchFinder(seq_lens=...) on a loader that has a batch_size, and give the finder"
            " to the sampler; then train without BatchFinder."
        )
    raise MisconfigurationException(
        f"batchfinder cannot change the batch size of {what}: its batches are made by a {type(maker).__name__}, which"
        f" has no integer attribute `batch_size`. Give it one that it reads each time it is iterated, or make the"
        f" loader in `{hook}()` with the size that the attribute `batch_size` of your module or datamodule holds."
    )


def check_mode(loaders: Any) -> None:
    """Make sure, before a search, that Lightning will train with these loaders.

    Raises:
        MisconfigurationException: the loaders take turns.
    """
    if is_a(loaders, "CombinedLoader") and combined_mode(loaders) == "sequential":
        raise MisconfigurationException(
            'Lightning does not train with CombinedLoader(mode="sequential"), and BatchFinder has tried no size. Pass '
            'mode="max_size_cycle", "max_size" or "min_size".'
        )


def resize(loader: Any, batch_size: int, stage: str) -> Callable[[], None]:
    """Give a loader that `check_resizable` lets pass another batch size, and nothing else; returns what undoes it.

    A sampler that has the loader's old batch size as its own `batch_size` (grouping by length does) is changed too.

    Raises:
        MisconfigurationException: another stage uses the same loader at another size, or the size does not stick.
    """
    for arguments, function in recorded_calls(loader):
        if function is not resize:
            continue
        other_size, other_stage = arguments
        if other_stage != stage and other_size != batch_size:
            raise MisconfigurationException(
                f"The same loader is used to {other_stage}, at batch size {other_size}, and to {stage}, at batch size"
                f" {batch_size}, and cannot have both. Give each stage a loader of its own, or leave one of the two out"
                " of BatchFinder's `also`."
            )
    holders = _holders(loader)
    before = [(_reference(holder), holder.batch_size) for holder in holders]
    for holder in holders:
        _set(holder, batch_size)
    record_call(loader, resize, (batch_size, stage))
    whole = _reference(loader)

    def undo() -> None:
        for reference, size in before:
            if (holder := reference()) is not None:
                _set(holder, size)
        record_call(whole(), resize, None)

    return undo


def samples_per_epoch(trainer: Trainer, loader: Any) -> int | None:
    """How many samples one device reads from a loader in an epoch; None where only reading would tell."""
    if not isinstance(loader, DataLoader) or has_iterable_dataset(loader) or loader.batch_sampler is None:
        return None
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if needs_distributed_sampler(trainer)(loader):
        whole = loader.dataset if sampler is None or isinstance(sampler, RandomSampler | SequentialSampler) else sampler
        samples = sized_len(whole)
        return None if samples is None else -(-samples // data_parallel_size(trainer))
    return sized_len(loader.dataset if sampler is None else sampler)


def _fewest_batches(trainer: Any, loader: str) -> int:
    """How many batches an epoch must have for the Trainer's limits, without which it raises."""
    if loader != "train_dataloader":
        return 1
    fewest = 1
    for share in (trainer.limit_train_batches, trainer.overfit_batches):
        if isinstance(share, float) and 0 < share < 1:
            fewest = max(fewest, math.ceil(1 / share))
    if isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None:
        fewest = max(fewest, trainer.val_check_interval)
    return fewest


def samples_in_batch(loader: Any, batch_idx: int) -> int | None:
    """Samples in batch `batch_idx` of an epoch, by the loader's own sizes; None where only the batch itself tells."""
    if not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
        return None
    batch_sampler: Any = loader.batch_sampler
    size, drop_last = getattr(batch_sampler, "batch_size", None), getattr(batch_sampler, "drop_last", None)
    total = sized_len(getattr(batch_sampler, "sampler", None))
    if not isinstance(size, int) or drop_last is None or total is None:
        return None
    if sized_len(batch_sampler) != (total // size if drop_last else -(-total // size)):
        return None  # it makes batches by a rule of its own
    left = total - batch_idx * size
    return min(size, left) if left > 0 else None


def _holders(loader: Any) -> list[Any]:
    """The objects whose `batch_size` decides the loader's batches, the deciding one first."""
    if not isinstance(loader, DataLoader):
        return [loader] if _has_size(loader) else []
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:  # each key of the sampler, or item of the dataset, is a batch
        return [maker for maker in (loader.sampler, loader.dataset) if _has_size(maker)][:1]
    if not _has_size(batch_sampler):
        return []
    inner = inner_batch_sampler(batch_sampler)
    size: int = batch_sampler.batch_size
    sampler: Any = getattr(batch_sampler, "sampler", None)
    holders = [batch_sampler, *([inner] if _has_size(inner) else [])]
    holders += [sampler] if _has_size(sampler) and sampler.batch_size == size else []
    return holders + ([loader] if loader.batch_size is not None else [])


def _has_size(holder: Any) -> bool:
    size = getattr(holder, "batch_size", None)
    return isinstance(size, int) and not isinstance(size, bool)


def _set(holder: Any, batch_size: int) -> None:
    # DataLoader forbids the plain way, and Lightning records it
    with contextlib.suppress(AttributeError):
        object.__setattr__(holder, "batch_size", batch_size)
    if holder.batch_size != batch_size:
        raise MisconfigurationException(
            f"The batch_size of {type(holder).__name__} was set to {batch_size} and is still {holder.batch_size}."
            " Let it be set, and read it each time a batch is made."
        )


def _reference(holder: Any) -> Callable[[], Any]:
    """A weak reference where there can be one: loaders are made anew each epoch, and an undo must not keep them all."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def _drops_last(loader: Any) -> bool:
    """Whether a loader leaves out an epoch's smaller last batch."""
    sampler = getattr(loader, "batch_sampler", None)
    return bool(getattr(sampler, "drop_last", getattr(loader, "drop_last", False)))


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

    Attributes:
        sizes_by_hook: given a size, what the hook makes of it for each of several loaders; empty where it sees no size.
        sizes_beside: of a validation's: given training's size, what the hook makes of it for each of the loaders; None
            where their size is their own.
    """

    trainer: Trainer
    pl_module: LightningModule
    source: LoaderSource
    make_batch: MakeBatch | None = None
    sizes_by_hook: Callable[[int], list[int | None]] | None = None
    sizes_beside: Callable[[int], list[int | None]] | None = None
    _sizes_made: dict[int, list[int]] = field(default_factory=dict, init=False)  # by size: the hook may be slow

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
        if self._is_longest(seq_len):
            seq_len = None
        for (loader, samples), size in zip(self._used, self._sizes(batch_size), strict=True):
            batch = samples.batch(size, longest=seq_len is None)
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

    def others(self, batch_size: int, seq_len: int | None = None) -> list[Callable[[], Any]]:
        """Make the batches of other lengths that an epoch has beside full ones of the longest samples.

        Where several loaders make up a batch, each has its part in them.
        """
        if self.make_batch is not None:
            return []
        parts = list(zip([samples for _, samples in self._used], self._sizes(batch_size), strict=True))
        each = [samples.others(size) for samples, size in parts] if self._is_longest(seq_len) else []

        @_refused()
        def combined(number: int) -> Any:
            both = zip(each, parts, strict=True)
            full = (made[number]() if number < len(made) else samples.batch(size) for made, (samples, size) in both)
            return combine_batches(self._combined, list(full))

        return [partial(combined, number) for number in range(max(map(len, each), default=0))]

    def left_out(self, batch_size: int) -> int:
        """How many samples of each epoch are in no batch of this size, since the loaders drop a smaller last one."""
        samples, trainer = self.dataset_size(), cast(Any, self.trainer)
        limit = trainer.limit_train_batches
        whole = isinstance(limit, float) and limit == 1.0 and not trainer.overfit_batches
        if samples is None or samples < batch_size or not whole or not any(map(_drops_last, self._combined.flattened)):
            return 0
        return samples % batch_size

    @_refused()
    def varies(self) -> bool:
        """Whether batches differ in length, as far as that can be told."""
        return self.make_batch is None and any(samples.varies() for _, samples in self._used)

    def last(self, batch_size: int, seq_len: int | None = None) -> list[Callable[[], Any]]:
        """Make an epoch's last batch, where it is smaller and a single loader tells so."""
        size = self.last_batch_size(batch_size)
        # One of a single sample changes little, and a batch norm raises on it in training as well.
        return [partial(self.batch, size, seq_len)] if size > 1 else []

    def _sizes(self, batch_size: int) -> list[int]:
        """The size of each loader's batches where the batch size is this one."""
        loaders = [loader for loader, _ in self._used]
        if self.sizes_by_hook is None or len({batch_size_of(loader) for loader in loaders}) < 2:
            return [batch_size] * len(loaders)
        if batch_size not in self._sizes_made:
            made = self.sizes_by_hook(batch_size)
            made = made if batch_size in made else [batch_size] * len(loaders)
            self._sizes_made[batch_size] = [size or batch_size for size in made]
        return self._sizes_made[batch_size]

    def last_batch_size(self, batch_size: int) -> int:
        """How large an epoch's last batch is where it is smaller and the trainer gets there; else 0."""
        if self.make_batch is not None or len(self._used) != 1 or self.source.name != "train_dataloader":
            return 0
        loader, samples = self._used[0][0], self.dataset_size()
        sampler = getattr(loader, "batch_sampler", None)
        now, total = batch_size_of(loader), sized_len(getattr(sampler, "sampler", None))
        if samples is None or now is None or total is None or getattr(sampler, "drop_last", True):
            return 0
        if sized_len(sampler) != -(-total // now):
            return 0  # it makes batches by a rule of its own
        batches, trainer = -(-samples // batch_size), cast(Any, self.trainer)
        share = trainer.limit_train_batches
        if trainer.overfit_batches or (share < batches if isinstance(share, int) else share < 1):
            return 0
        steps = -(-batches // trainer.accumulate_grad_batches)
        return samples % batch_size if trainer.max_steps == -1 or trainer.max_steps > steps else 0

    @_refused()
    def mixed(self, batch_size: int) -> Any:
        """Make a batch of samples as they come, of whatever lengths; of the longest where batches come ready-made."""
        if self.make_batch is not None:
            return self.make_batch(batch_size, None)
        return combine_batches(self._combined, [samples.mixed(batch_size) for _, samples in self._used])

    def _is_longest(self, seq_len: int | None) -> bool:
        """Whether batches of this length are those of the data's longest samples."""
        return seq_len is None or seq_len == self.longest_seq_len

    @cached_property
    @_refused()
    def longest_seq_len(self) -> int | None:
        """The sequence length of a batch of the longest samples; None for data without one, and for `make_batch`."""
        if self.make_batch is not None:
            return None
        found = [find_sequence(*samples.extremes(), guess=False) for _, samples in self._used]
        return max((dims.length for dims in found if isinstance(dims, SequenceDims)), default=None)

    def largest_batch(self) -> int | None:
        """The largest batch of use: the samples of an epoch, over the batches that the Trainer's limits ask for."""
        samples = self.dataset_size()
        return None if samples is None else max(1, samples // _fewest_batches(self.trainer, self.source.name))

    def dataset_size(self) -> int | None:
        """One device's samples in an epoch; None where only reading would tell.

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
                if _drops_last(loader):
                    dropping.append(size)
        if dropping:
            return min(dropping)
        return max(known) if known and len(known) == len(sizes) else None

    @cached_property
    def own_batch_size(self) -> int | None:
        """The size that the loaders have now, or all the samples if these are fewer; None where they do not say."""
        sizes = [batch_size_of(loader) for loader, _ in self._used]
        samples = self.dataset_size()
        known = [size for size in sizes if size is not None]
        return None if len(known) < len(sizes) else min([max(known), *([] if samples is None else [samples])])

    def size_beside(self, batch_size: int) -> int | None:
        """How large a validation's batches are where training's have a size; None where its loaders do not say."""
        if self.sizes_beside is None or self.own_batch_size is None:
            return self.own_batch_size
        if batch_size not in self._sizes_made:
            made = self.sizes_beside(batch_size)
            self._sizes_made[batch_size] = [self.own_batch_size if size is None else size for size in made]
        size, samples = max(self._sizes_made[batch_size], default=self.own_batch_size), self.dataset_size()
        return size if samples is None else min(size, samples)

    def batches_per_epoch(self, batch_size: int) -> int:
        """How many batches of a size an epoch takes, by the data and the Trainer's limits; 0 where nothing tells.

        Loaders of a validation take turns.
        """
        samples, trainer = self.dataset_size(), cast(Any, self.trainer)
        drops = samples is not None and samples >= batch_size and any(map(_drops_last, self._combined.flattened))
        batches = 0 if samples is None else samples // batch_size if drops else -(-samples // batch_size)
        if self.source.name == "val_dataloader" and samples is not None:
            share, counts = trainer.limit_val_batches, list[int]()
            for loader in self._combined.flattened:
                count = -(-(samples_per_epoch(self.trainer, loader) or 0) // batch_size)
                counts.append(min(share, count) if isinstance(share, int) else int(share * count))
            return sum(counts)
        if self.source.name != "train_dataloader":
            return batches
        limits = [] if samples is None else [batches]
        share = trainer.limit_train_batches
        if isinstance(share, int):
            limits.append(share)
        elif share < 1:
            limits.append(math.ceil(share * batches))
        if trainer.max_steps >= 0:
            limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
        return min(limits, default=0)

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
