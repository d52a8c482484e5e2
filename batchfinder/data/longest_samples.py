"""The samples a probe's batch is made of: the longest of the user's own, where they differ in length.

They are read without the loader's workers, and without advancing its samplers or generators.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import distributed
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

from batchfinder.data.batch import Path, leaves, map_leaves, samples_in, tensors
from batchfinder.data.split import with_batch_size
from batchfinder.errors import NotSplittable

DISTINCT = 32  # samples that are compared at first, and kept at most
SCANNED = 2048  # samples that are looked at where lengths differ, for at most SCAN_SECONDS
SCAN_SECONDS = 10.0
MADE = 8  # batches that are compared where the loader has no samples

_WHOLE_DATASET = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)


class UnreadableData(Exception):
    """No sample can be read from the data. The caller catches it and says what to pass instead."""


def read_samples(loader: DataLoader[Any], count: int) -> Iterator[Any]:
    """At most `count` of a loader's samples, spread over the dataset where it can be indexed, else its first ones.

    Raises:
        UnreadableData: the dataset can be read only once.
    """
    if isinstance(loader.dataset, IterableDataset):
        yield from itertools.islice(_new_iterator(loader.dataset), count)
        return
    sampler: Any = loader.batch_sampler
    if hasattr(sampler, "sampler") and _is_plain(sampler.sampler):
        keys = _spread(sampler.sampler, loader.dataset, count)
    else:
        keys = itertools.islice(itertools.chain.from_iterable(_read_keys(sampler, count)), count)
    for key in keys:
        yield _item(loader.dataset, key)


def read_batches(loader: Any, count: int) -> Iterator[Any]:
    """At most `count` of the batches that a dataset, or an iterable that is no DataLoader, makes itself.

    Args:
        loader: a DataLoader with `batch_size=None`, or any iterable.

    Raises:
        UnreadableData: it can be read only once.
    """
    if not isinstance(loader, DataLoader):
        if isinstance(loader, Sequence):
            yield from (loader[index] for index in spread(len(loader), count))
        else:
            yield from itertools.islice(_new_iterator(loader), count)
        return
    made: Iterator[Any]
    if isinstance(loader.dataset, IterableDataset):
        made = itertools.islice(_new_iterator(loader.dataset), count)
    elif _is_plain(loader.sampler):
        made = (loader.dataset[key] for key in _spread(loader.sampler, loader.dataset, count))
    else:
        made = (loader.dataset[key] for key in _read_keys(loader.sampler, count))
    yield from (loader.collate_fn(batch) for batch in made)


def spread(size: int, count: int) -> list[int]:
    """Up to `count` positions, evenly spread over `size`."""
    count = min(size, count)
    return [index * size // count for index in range(count)]


def _is_plain(sampler: Any) -> bool:
    return type(sampler) in _WHOLE_DATASET or isinstance(sampler, SubsetRandomSampler)


def _spread(sampler: Any, dataset: Any, count: int) -> Iterator[Any]:
    if isinstance(sampler, SubsetRandomSampler):
        return (sampler.indices[index] for index in spread(len(sampler.indices), count))
    return iter(spread(len(dataset), count))


def _read_keys(sampler: Any, count: int) -> list[Any]:
    """The first keys of a sampler of the user's, which stays where it is."""
    return list(itertools.islice(_independent_copy(sampler), count))


def _independent_copy(sampler: Any) -> Any:
    """A copy of a sampler that shares with it no generator, no list that it might shuffle, and no inner sampler."""
    twin = copy.copy(sampler)
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, torch.Generator):
            generator = torch.Generator(value.device)
            generator.set_state(value.get_state())
            twin.__dict__[name] = generator
        elif isinstance(value, Sampler):
            twin.__dict__[name] = _independent_copy(value)
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            twin.__dict__[name] = copy.deepcopy(value)
        elif isinstance(value, list | dict | set | np.ndarray):
            twin.__dict__[name] = copy.copy(value)
    return twin


def _item(dataset: Any, key: Any) -> Any:
    """One sample, fetched the way a DataLoader fetches it."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__([key])[0]
    return dataset[key]


def _new_iterator(iterable: Any) -> Iterator[Any]:
    """A new iterator over something that the training still has to read from its beginning."""
    iterator = iter(iterable)
    if iterator is iterable:
        with contextlib.suppress(Exception):
            return iter(copy.deepcopy(iterable))
    elif not _is_one_stream(getattr(iterable, "dataset", iterable)):
        return iter(iterator)
    raise UnreadableData(
        f"{type(iterable).__name__} can be read only once: a batch that BatchFinder took from it to probe with would be"
        " missing from the training."
    )


def _is_one_stream(data: Any) -> bool:
    """Whether a second iterator over a stream goes on where the first one is."""
    if not isinstance(data, IterableDataset):  # `iter()` of anything else may start workers
        return False
    iterator = iter(data)
    return iterator is not data and iter(data) is iterator


def batches_of(loader: Any) -> SampleBatches | MadeBatches:
    """A maker of batches of any size from a loader's data."""
    sampled = isinstance(loader, DataLoader) and loader.batch_sampler is not None
    return SampleBatches(loader) if sampled else MadeBatches(loader)


class SampleBatches:
    """Batches of a loader that collates samples.

    The first 32 samples are compared. If a length differs, up to 2048 spread over the dataset are looked at, for at
    most 10 seconds; of these only the longest are kept, one for each length that differs (a padded batch of source and
    target sentences is as wide as the longest of either).
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def batch(self, batch_size: int, longest: bool = True) -> Any:
        """Collate a batch of the samples, which are repeated as often as it takes."""
        return self._collate(self._samples(longest), batch_size)

    def mixed(self, batch_size: int) -> Any:
        """Collate samples spread over the first 32 that are looked at."""
        kept = self._first.kept
        return self._collate(kept[:: max(1, len(kept) // batch_size)], batch_size)

    def extremes(self, longest: bool = True) -> tuple[Any, Any]:
        """A batch of the longest samples, and one of as many copies of the shortest."""
        samples = self._samples(longest)
        many = max(2, len(samples))
        return self._collate(samples, many), self._collate(
            [self._first.shortest if self._first.vary else samples[0]], many
        )

    def _samples(self, longest: bool) -> list[Any]:
        if not self._first.vary:
            return self._first.kept
        return self._scanned.longest() if longest and self._scanned.vary else self._first.longest()

    @cached_property
    def _first(self) -> Extremes:
        samples = list(read_samples(self.loader, DISTINCT))
        if not samples:
            raise UnreadableData(
                f"The dataset {type(self.loader.dataset).__name__} is empty: there is no sample to probe with."
            )
        return Extremes(samples, keep=True)

    @cached_property
    def _scanned(self) -> Extremes:
        return Extremes(_for_seconds(read_samples(self.loader, SCANNED)))

    def _collate(self, samples: list[Any], batch_size: int) -> Any:
        # a collate_fn may change what it is given, and here it is given the same samples many times over
        return self.loader.collate_fn([_copied(samples[index % len(samples)]) for index in range(batch_size)])


class MadeBatches:
    """Batches resized from those that a dataset or an iterable makes itself: the largest of the first eight.

    Args:
        loader: a DataLoader with `batch_size=None`, or any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batch(self, batch_size: int, longest: bool = True) -> Any:
        """Repeat or cut the samples of the largest batch; None if it is not clear how many it has."""
        return with_batch_size(self._made[-1], batch_size)

    def mixed(self, batch_size: int) -> Any:
        """The same as `batch`."""
        return self.batch(batch_size)

    def extremes(self, longest: bool = True) -> tuple[Any, Any]:
        """The batch with the largest samples, and the one with the smallest, cut to as many of them."""
        return with_batch_size(self._made[-1], 2), with_batch_size(self._made[0], 2)

    @cached_property
    def _made(self) -> list[Any]:
        made = list(read_batches(self.loader, MADE))
        if not made:
            raise UnreadableData(f"{type(self.loader).__name__} is empty: there is no batch to probe with.")
        return sorted(made, key=_elements_per_sample)


class Extremes:
    """The longest and shortest of some samples, in one pass that keeps no others (with `keep`, all in `kept`)."""

    def __init__(self, samples: Iterable[Any], keep: bool = False) -> None:
        self.kept: list[Any] = []
        self._most: dict[tuple[Path, int], tuple[int, Any]] = {}
        self._least: dict[tuple[Path, int], int] = {}
        self._total = math.inf
        self.shortest: Any = None
        for sample in samples:
            sizes = _sizes(sample)
            if keep:
                self.kept.append(sample)
            for place, size in sizes.items():
                if place not in self._most or size > self._most[place][0]:
                    self._most[place] = (size, sample)
                self._least[place] = min(size, self._least.get(place, size))
            if (total := sum(sizes.values())) < self._total:
                self._total, self.shortest = total, sample

    @property
    def vary(self) -> bool:
        """Whether any length differs."""
        return any(most != self._least[place] for place, (most, _) in self._most.items())

    def longest(self) -> list[Any]:
        """For each length that differs a sample that has the most of it; the one with most in all comes first."""
        found = {
            id(sample): sample for place, (most, sample) in self._most.items() if most != self._least[place]
        }.values()
        return sorted(found, key=lambda sample: -sum(_sizes(sample).values()))[:DISTINCT]


def _sizes(sample: Any) -> dict[tuple[Path, int], int]:
    """The size of each dimension of each tensor, array, list of numbers and text in a sample."""
    sizes = {}
    for path, leaf in leaves(sample):
        shape = getattr(leaf, "shape", None)
        if shape is None and isinstance(leaf, list | tuple | str | bytes):
            shape = (len(leaf),)
        for dim, size in enumerate(shape if isinstance(shape, tuple) else ()):
            sizes[path, dim] = int(size)
    return sizes


def _for_seconds(samples: Iterator[Any]) -> Iterator[Any]:
    start = time.monotonic()
    for count, sample in enumerate(samples, 1):
        yield sample
        if time.monotonic() - start > SCAN_SECONDS and count < SCANNED:
            if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
                warnings.warn(
                    f"The longest sample was looked for among {count} only, as reading them took {SCAN_SECONDS:.0f}"
                    " seconds. If there are longer ones, pass make_batch=, or their length: seq_lens= of BatchFinder,"
                    " seq_len= of tune_trainer.",
                    stacklevel=4,
                )
            return


def _copied(sample: Any) -> Any:
    return map_leaves(lambda path, leaf: list(leaf) if type(leaf) is list else leaf, sample)


def _elements_per_sample(batch: Any) -> float:
    try:
        return sum(tensor.numel() for _, tensor in tensors(batch)) / max(1, samples_in(batch))
    except NotSplittable:
        return 0.0
