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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, cast

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
DRAWN = 8  # batches as long as those of an epoch that a trial has beside those of the longest
MADE = 8  # batches that are compared where the loader has no samples
_BATCHES = 200  # batches of random samples whose longest ones a trial's other batches are spread over

_WHOLE_DATASET = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)


class UnreadableData(Exception):
    """No sample can be read from the data. The caller catches it and says what to pass instead."""


def read_samples(loader: DataLoader[Any], count: int) -> Iterator[Any]:
    """At most `count` of a loader's samples, spread over the dataset where it can be indexed, else its first ones.

    Raises:
        UnreadableData: the dataset can be read only once.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        yield from itertools.islice(_new_iterator(dataset), count)
        return
    sampler: Any = loader.batch_sampler
    keys: Any = _spread_keys(getattr(sampler, "sampler", None), dataset, count)
    if keys is None:
        keys = itertools.islice(itertools.chain.from_iterable(_first_keys(sampler, count)), count)
    for key in keys:  # fetched as a DataLoader does
        fetch_several = getattr(dataset, "__getitems__", None)
        yield fetch_several([key])[0] if fetch_several else dataset[key]


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
    else:
        keys = _spread_keys(loader.sampler, loader.dataset, count)
        made = (loader.dataset[key] for key in (_first_keys(loader.sampler, count) if keys is None else keys))
    yield from (loader.collate_fn(batch) for batch in made)


def spread(size: int, count: int) -> list[int]:
    """Up to `count` positions, evenly spread over `size`."""
    count = min(size, count)
    return [index * size // count for index in range(count)]


def _spread_keys(sampler: Any, dataset: Any, count: int) -> list[Any] | None:
    """Keys spread over the dataset; None for a sampler of the user's own, which alone knows them."""
    if isinstance(sampler, SubsetRandomSampler):
        return [sampler.indices[index] for index in spread(len(sampler.indices), count)]
    return spread(len(dataset), count) if type(sampler) in _WHOLE_DATASET else None


def _first_keys(sampler: Any, count: int) -> list[Any]:
    """The first keys of a sampler of the user's, which stays where it is: a copy is read.

    The copy shares with it no generator, no list that it might shuffle, and no inner sampler.
    """

    def independent_copy(original: Any) -> Any:
        twin = copy.copy(original)
        for name, value in getattr(original, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                generator = torch.Generator(value.device)
                generator.set_state(value.get_state())
                twin.__dict__[name] = generator
            elif isinstance(value, Sampler):
                twin.__dict__[name] = independent_copy(value)
            elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
                twin.__dict__[name] = copy.deepcopy(value)
            elif isinstance(value, list | dict | set | np.ndarray):
                twin.__dict__[name] = copy.copy(value)
        return twin

    return list(itertools.islice(independent_copy(sampler), count))


def _new_iterator(iterable: Any) -> Iterator[Any]:
    """A new iterator over something that the training still has to read from its beginning."""
    iterator = iter(iterable)
    if iterator is iterable:
        with contextlib.suppress(Exception):
            return iter(copy.deepcopy(iterable))
    else:
        data = getattr(iterable, "dataset", iterable)
        if not isinstance(data, IterableDataset):  # `iter()` of anything else may start workers
            return iter(iterator)
        first: Any = iter(data)
        if first is data or iter(data) is not first:  # else a second iterator goes on where the first one is
            return iter(iterator)
    raise UnreadableData(
        f"{type(iterable).__name__} can be read only once: a batch that BatchFinder took from it to probe with would be"
        " missing from the training."
    )


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
        self._scanned: Extremes | None = None

    def batch(self, batch_size: int, longest: bool = True) -> Any:
        """Collate a batch of the samples, which are repeated as often as it takes.

        Beside more than one of the longest there is one of the shortest: a model that leaves a mask out where it is
        full takes less memory for a batch in which nothing is padded, and training has hardly any.
        """
        samples, (_, seen) = self._samples(longest), self._first
        if longest and seen.longest and batch_size > len(samples):
            repeated = [samples[index % len(samples)] for index in range(batch_size - 1)]
            samples = [*repeated, seen.shortest]
        return self._collate(samples, batch_size)

    def others(self, batch_size: int) -> list[Callable[[], Any]]:
        """Make batches of other lengths, as long as those of an epoch, and one of nothing but the longest.

        Lengths that change split the cache's blocks. An epoch's batch is as long as the longest of the samples that it
        draws, or that follow one another. None where no length differs.
        """
        _, seen = self._first
        longest = self._samples(longest=True) if seen.longest else []
        if not longest or batch_size <= len(longest):
            return []
        assert self._scanned is not None
        by_total = {**seen.by_total, **self._scanned.by_total}
        nearest = (min(by_total, key=lambda each: abs(each - most)) for most in self._most_in_batches(batch_size))
        lengths = list(dict.fromkeys(nearest))
        random.Random(0).shuffle(lengths)
        batches = [
            [by_total[each]] * (batch_size - 1) + [seen.shortest]
            for each in itertools.islice(itertools.cycle(lengths), DRAWN)
        ]
        return [partial(self._collate, each, batch_size) for each in (*batches, longest)]

    def _most_in_batches(self, batch_size: int) -> list[int]:
        """The lengths of the longest samples in an epoch's batches, spread over those that differ, the shortest first.

        The most of n draws is at most a length with the n-th power of the share of samples that are no longer. The rare
        batch without one of the longest samples counts: it leaves the cache in other pieces.
        """
        assert self._scanned is not None
        totals, sampler = self._scanned.totals, cast(Any, getattr(self.loader.batch_sampler, "sampler", None))
        if isinstance(sampler, SequentialSampler):
            each = max(1, batch_size * len(totals) // len(sampler))
            most = {max(totals[start : start + each]) for start in range(0, len(totals), each)}
        else:
            in_order, shares = sorted(totals), ((each + 0.5) / _BATCHES for each in range(_BATCHES))
            most = {in_order[int(len(totals) * share ** (1 / batch_size))] for share in shares}
        found = sorted(most)
        return [found[index] for index in spread(len(found), DRAWN)]

    def varies(self) -> bool:
        """Whether samples differ in length."""
        return bool(self._first[1].longest)

    def mixed(self, batch_size: int) -> Any:
        """Collate samples spread over the first 32 that are looked at."""
        samples, _ = self._first
        return self._collate(samples[:: max(1, len(samples) // batch_size)], batch_size)

    def extremes(self, longest: bool = True) -> tuple[Any, Any]:
        """A batch of the longest samples, and one of as many copies of the shortest."""
        samples, (_, seen) = self._samples(longest), self._first
        many = max(2, len(samples))
        return self._collate(samples, many), self._collate([seen.shortest if seen.longest else samples[0]], many)

    @cached_property
    def _first(self) -> tuple[list[Any], Extremes]:
        samples = list(read_samples(self.loader, DISTINCT))
        if not samples:
            raise UnreadableData(
                f"The dataset {type(self.loader.dataset).__name__} is empty: there is no sample to probe with."
            )
        return samples, find_extremes(samples)

    def _samples(self, longest: bool) -> list[Any]:
        """Those that make up a batch: all of the first where no length differs."""
        samples, seen = self._first
        if longest and seen.longest:
            if self._scanned is None:
                self._scanned = find_extremes(read_samples(self.loader, SCANNED), SCAN_SECONDS)
            return self._scanned.longest or seen.longest
        return seen.longest or samples

    def _collate(self, samples: list[Any], batch_size: int) -> Any:
        # A collate_fn may change what it is given, and here it is given the same samples many times over.
        repeated = (samples[index % len(samples)] for index in range(batch_size))
        return self.loader.collate_fn(
            [map_leaves(lambda _, leaf: list(leaf) if type(leaf) is list else leaf, sample) for sample in repeated]
        )


class MadeBatches:
    """Batches resized from those that a dataset or an iterable makes itself: the largest of the first eight."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batch(self, batch_size: int, longest: bool = True) -> Any:
        """Repeat or cut the samples of the largest batch; None if it is not clear how many it has."""
        return with_batch_size(self._made[-1], batch_size)

    mixed = batch

    def others(self, batch_size: int) -> list[Callable[[], Any]]:
        """Make the batch with the smallest samples, in so many copies, where it is another one."""
        return [partial(with_batch_size, self._made[0], batch_size)] if len(self._made) > 1 else []

    def varies(self) -> bool:
        """Whether there are several batches, of which one has larger samples."""
        return len(self._made) > 1

    def extremes(self, longest: bool = True) -> tuple[Any, Any]:
        """The batch with the largest samples, and the one with the smallest, cut to as many of them."""
        return with_batch_size(self._made[-1], 2), with_batch_size(self._made[0], 2)

    @cached_property
    def _made(self) -> list[Any]:
        """The batches, that with the fewest elements for each sample first."""
        made = []
        for batch in read_batches(self.loader, MADE):
            try:
                per_sample = sum(tensor.numel() for _, tensor in tensors(batch)) / max(1, samples_in(batch))
            except NotSplittable:
                per_sample = 0.0
            made.append((per_sample, batch))
        if not made:
            raise UnreadableData(f"{type(self.loader).__name__} is empty: there is no batch to probe with.")
        return [batch for _, batch in sorted(made, key=itemgetter(0))]


@dataclass(frozen=True)
class Extremes:
    """The longest and shortest of some samples."""

    # For each length that differs a sample that has the most of it, the one with most in all first; else empty.
    longest: list[Any]
    shortest: Any  # the one with least in all
    totals: list[int]  # each sample's lengths added up, in the samples' order
    by_total: dict[int, Any]  # a sample of each of the largest such sums


def find_extremes(samples: Iterable[Any], seconds: float = math.inf) -> Extremes:
    """Compare each dimension of each tensor, array, list of numbers and text, in one pass that keeps no other samples.

    Args:
        seconds: how long to look; a warning says where that did not do for all `SCANNED` samples.
    """
    start = time.monotonic()
    most: dict[tuple[Path, int], tuple[int, int, Any]] = {}  # the size, the sample's sizes in all, the sample
    least: dict[tuple[Path, int], int] = {}
    least_in_all, shortest = math.inf, None
    totals: list[int] = []
    by_total: dict[int, Any] = {}
    for count, sample in enumerate(samples, 1):
        sizes: dict[tuple[Path, int], int] = {}
        for path, leaf in leaves(sample):
            shape = getattr(leaf, "shape", None)
            if shape is None and isinstance(leaf, list | tuple | str | bytes):
                shape = (len(leaf),)
            for dim, size in enumerate(shape if isinstance(shape, tuple) else ()):
                sizes[path, dim] = int(size)
        total = sum(sizes.values())
        totals.append(total)
        if by_total.setdefault(total, sample) is sample and len(by_total) > DISTINCT:
            del by_total[min(by_total)]
        for place, size in sizes.items():
            if place not in most or size > most[place][0]:
                most[place] = (size, total, sample)
            least[place] = min(size, least.get(place, size))
        if total < least_in_all:
            least_in_all, shortest = total, sample
        if time.monotonic() - start > seconds and count < SCANNED:
            if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
                warnings.warn(
                    f"The longest sample was looked for among {count} only, as reading them took {seconds:.0f}"
                    " seconds. If there are longer ones, pass make_batch=, or their length: seq_lens= of BatchFinder,"
                    " seq_len= of tune_trainer.",
                    stacklevel=4,
                )
            break
    found = {id(sample): (total, sample) for place, (size, total, sample) in most.items() if size != least[place]}
    longest = [one for _, one in sorted(found.values(), key=lambda pair: -pair[0])[:DISTINCT]]
    return Extremes(longest, shortest, totals, by_total)
