"""A batch in the fewest micro-batches that fit, by the largest micro-batch of each sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchfinder.data.batch import Layout, samples_in
from batchfinder.data.padding import padded_length, sample_lengths, trim
from batchfinder.data.split import Weight, equal_sizes, reorder, split, weigh

FIRST_CUT = 0.8
"""Of a size that failed: what is left after the first cut of a batch. Most often a little memory is missing."""

NEXT_CUT = 0.5
"""The same for every further cut."""


class LengthTable:
    """The largest micro-batch by padded length.

    A batch gets the size of the smallest length in the table that is not below its own, so that no size is used that
    was not tried at this length or a longer one. Beyond the longest, sizes go down with the square of the length, as
    attention's memory goes up.

    Attributes:
        sizes: of each length, the shortest first, as they are now; `{None: size}` for data without lengths.
    """

    def __init__(self, sizes: Mapping[int | None, int]) -> None:
        lengths = sorted(length for length in sizes if length is not None)
        self.sizes: dict[int | None, int] = {length: sizes[length] for length in lengths}
        if not lengths:
            self.sizes = {None: sizes.get(None) or 1}
        self._beyond = sizes[lengths[-1]] * lengths[-1] ** 2 if lengths else 0

    def size_for(self, seq_len: int | None) -> int:
        """The largest micro-batch for a padded length in tokens; None, without lengths, gets what the longest gets."""
        tabled = self.tabled(seq_len)
        if tabled in self.sizes:
            return self.sizes[tabled]
        assert seq_len is not None
        return max(1, min(self._beyond // seq_len**2, *self.sizes.values()))

    def tabled(self, seq_len: int | None) -> int | None:
        """The length in the table whose size counts for a padded one; None without lengths, and beyond the longest."""
        lengths = [length for length in self.sizes if length is not None]
        if seq_len is None:
            return lengths[-1] if lengths else None
        return next((length for length in lengths if length >= seq_len), None)

    def lower(self, seq_len: int | None, size: int) -> None:
        """Allow no more samples than `size`, at least 1, at a padded length and at longer ones."""
        tabled = self.tabled(seq_len)
        if tabled not in self.sizes:
            assert seq_len is not None
            self._beyond = min(self._beyond, size * seq_len**2)
            return
        reached = list(self.sizes).index(tabled)  # the shortest comes first
        limits = [min(limit, size) if at >= reached else limit for at, limit in enumerate(self.sizes.values())]
        self.agree([*limits, self._beyond])

    def values(self) -> list[int]:
        """All of it in numbers, the same count on every rank; the smaller of two is the safer."""
        return [*self.sizes.values(), self._beyond]

    def agree(self, values: Sequence[int]) -> None:
        """Take over what all ranks can do: the least of what each rank's `values` said."""
        self.sizes = dict(zip(self.sizes, values[:-1], strict=True))
        longest = list(self.sizes)[-1]
        if longest is not None:
            self._beyond = min(values[-1], self.sizes[longest] * longest**2)


def smaller(size: int, cuts: int) -> int:
    """What to try where a micro-batch of `size` samples, more than 1, failed after so many cuts of its batch.

    Example:
        >>> smaller(10, 0), smaller(8, 1), smaller(2, 0)
        (8, 4, 1)
    """
    return max(1, min(size - 1, int(size * (NEXT_CUT if cuts else FIRST_CUT))))


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch that is trained on its own, of the same make as the whole."""

    batch: Any
    factor: float  # what its loss is multiplied with, so that all of them make the loss of the whole
    share: float  # what its logged means count of the whole's; all of them make 1
    seq_len: int | None  # padded length in tokens; None for data without lengths
    positions: Sequence[int]  # where its samples are in the whole

    @property
    def samples(self) -> int:
        return len(self.positions)


def micro_batches(
    batch: Any, table: LengthTable, weight: Weight, in_order: bool = False, layout: Layout | None = None
) -> list[MicroBatch]:
    """Split a batch.

    Where an attention mask shows how long each sample is, the longest come first: each micro-batch then holds samples
    of nearly one length, gets the size of its own longest and is padded no further. Elsewhere the samples stay in their
    order, in equal micro-batches of the size that the batch's padded length allows. What fits as one stays as it is.

    Args:
        in_order: keep the order of the samples although their lengths are known.
        layout: what earlier batches have told of which parts follow the samples; it learns from this one.

    Raises:
        NotSplittable: the batch cannot be split, or the weight cannot be had from it.
        InvalidValue: the user's weight returned a negative or infinite number.
    """
    samples = samples_in(batch, layout)

    def cut(sizes: list[int], order: Sequence[int]) -> tuple[list[Any], list[Sequence[int]]]:
        """The parts, and the places of their samples in the batch."""
        order = range(samples) if len(sizes) == 1 else order
        whole = batch if isinstance(order, range) else reorder(batch, order, layout)
        stops = accumulate(sizes)
        parts = [trim(part) for part in ([whole] if len(sizes) == 1 else split(whole, sizes, layout))]
        return parts, [order[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]

    parts = None
    lengths = None if in_order else sample_lengths(batch)
    if lengths is not None:
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        sizes: list[int] = []
        while (done := sum(sizes)) < len(lengths):
            sizes.append(min(table.size_for(lengths[longest_first[done]]), len(lengths) - done))
        parts, positions = cut(sizes, longest_first)
        padded = [padded_length(part) for part in parts]
        if any(
            length is not None and table.size_for(length) < size for length, size in zip(padded, sizes, strict=True)
        ):
            parts = None  # the padding that they are to do without cannot be cut off
    if parts is None:
        parts, positions = cut(equal_sizes(samples, table.size_for(padded_length(batch))), range(samples))
    factors = [1.0] if len(parts) == 1 else weigh(parts, weight)
    total = sum(factors)
    shares = [len(where) / samples for where in positions] if weight == "sum" else [f / total for f in factors]
    return [
        MicroBatch(part, factor, share, padded_length(part), where)
        for part, factor, share, where in zip(parts, factors, shares, positions, strict=True)
    ]
