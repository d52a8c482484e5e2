"""Giving a loader another batch size in place, so that nothing else about it changes.

The size lives in the loader's batch sampler, which reads it whenever it is iterated; `DataLoader.batch_size` is a copy
of it for `len()` and for Lightning. Changing both leaves dataset, sampler, generator, workers and collate_fn the very
objects they were. Lightning builds some loaders anew (distributed sampling, overfit_batches, predict) from the
arguments they were first made with; it repeats recorded calls on the new loader, so the
change is recorded there as well.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from lightning_fabric.utilities.data import has_iterable_dataset, sized_len
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from batchfinder.data.bucket_sampler import LengthBucketBatchSampler
from batchfinder.lightning.compat import (
    inner_batch_sampler,
    is_a,
    needs_distributed_sampler,
    record_call,
    recorded_calls,
)


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
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
        return None if samples is None else -(-samples // int(replicas))
    return sized_len(loader.dataset if sampler is None else sampler)


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
