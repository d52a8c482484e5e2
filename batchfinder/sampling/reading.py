"""Reading a few of a loader's own samples, without its workers and without moving its samplers or generators on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

_WHOLE_DATASET = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)


class UnreadableData(Exception):
    """Data that no sample can be had from. Who serves the user catches it and says what to pass instead."""


def read_samples(loader: DataLoader[Any], count: int) -> Iterator[Any]:
    """Some of a loader's samples, spread over the dataset where it can be indexed, else its first ones.

    Args:
        loader: a loader that collates samples to batches.
        count: how many at most.

    Raises:
        UnreadableData: the dataset can be read only once.
    """
    if isinstance(loader.dataset, IterableDataset):
        yield from itertools.islice(_again(loader.dataset), count)
        return
    sampler: Any = loader.batch_sampler
    if hasattr(sampler, "sampler") and _is_plain(sampler.sampler):
        keys = _spread(sampler.sampler, loader.dataset, count)
    else:
        keys = itertools.islice(itertools.chain.from_iterable(_read_keys(sampler, count)), count)
    for key in keys:
        yield _item(loader.dataset, key)


def read_batches(loader: Any, count: int) -> Iterator[Any]:
    """Some of the batches that a dataset, or an iterable that is no DataLoader, makes itself.

    Args:
        loader: a DataLoader with `batch_size=None`, or any iterable.
        count: how many at most.

    Raises:
        UnreadableData: it can be read only once.
    """
    if not isinstance(loader, DataLoader):
        if isinstance(loader, Sequence):
            yield from (loader[index] for index in spread(len(loader), count))
        else:
            yield from itertools.islice(_again(loader), count)
        return
    made: Iterator[Any]
    if isinstance(loader.dataset, IterableDataset):
        made = itertools.islice(_again(loader.dataset), count)
    elif _is_plain(loader.sampler):
        made = (loader.dataset[key] for key in _spread(loader.sampler, loader.dataset, count))
    else:
        made = (loader.dataset[key] for key in _read_keys(loader.sampler, count))
    yield from (loader.collate_fn(batch) for batch in made)


def spread(size: int, count: int) -> list[int]:
    """Up to `count` positions, evenly spread over `size`.

    Args:
        size: how many positions there are.
        count: how many are wanted.
    """
    count = min(size, count)
    return [index * size // count for index in range(count)]


def _is_plain(sampler: Any) -> bool:
    return type(sampler) in _WHOLE_DATASET or isinstance(sampler, SubsetRandomSampler)


def _spread(sampler: Any, dataset: Any, count: int) -> Iterator[Any]:
    if isinstance(sampler, SubsetRandomSampler):
        return (sampler.indices[index] for index in spread(len(sampler.indices), count))
    return iter(spread(len(dataset), count))


def _read_keys(sampler: Any, count: int) -> list[Any]:
    """What a sampler of the user's yields first."""
    return list(itertools.islice(_apart(sampler), count))


def _apart(sampler: Any) -> Any:
    """A copy of a sampler that shares with it no generator, no list that it might shuffle, and no inner sampler."""
    apart = copy.copy(sampler)
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, torch.Generator):
            generator = torch.Generator(value.device)
            generator.set_state(value.get_state())
            apart.__dict__[name] = generator
        elif isinstance(value, Sampler):
            apart.__dict__[name] = _apart(value)
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            apart.__dict__[name] = copy.deepcopy(value)
        elif isinstance(value, list | dict | set | np.ndarray):
            apart.__dict__[name] = copy.copy(value)
    return apart


def _item(dataset: Any, key: Any) -> Any:
    """One sample, fetched the way a DataLoader fetches it."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__([key])[0]
    return dataset[key]


def _again(iterable: Any) -> Iterator[Any]:
    """A new iterator over something that the training still has to read from its beginning."""
    iterator = iter(iterable)
    if iterator is iterable:
        with contextlib.suppress(Exception):
            return iter(copy.deepcopy(iterable))
    elif not _goes_on(getattr(iterable, "dataset", iterable)):
        return iter(iterator)
    raise UnreadableData(
        f"{type(iterable).__name__} can be read only once: a batch that BatchFinder took from it to probe with would be"
        " missing from the training."
    )


def _goes_on(data: Any) -> bool:
    """Whether a second iterator over a stream goes on where the first one is."""
    if not isinstance(data, IterableDataset):  # `iter()` of anything else may start workers
        return False
    iterator = iter(data)
    return iterator is not data and iter(data) is iterator
