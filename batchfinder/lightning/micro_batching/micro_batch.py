"""A batch in the fewest micro-batches that fit, by the largest micro-batch of each sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchfinder.data.batch import Layout, samples_in
from batchfinder.data.loss_weights import Weight, weigh
from batchfinder.data.padding import padded_length, sample_lengths, trim
from batchfinder.data.split import equal_sizes, reorder, split

FIRST_CUT = 0.8
"""Of a size that failed: what is left after the first cut of a batch. Most often a little memory is missing."""

NEXT_CUT = 0.5
"""The same for every further cut."""


class LengthTable:
    """The largest micro-batch by padded length.

    A batch gets the size of the smallest length in the table that is not below its own, so that no size is used that
    was not tried at this length or a longer one. Beyond the longest, sizes go down with the square of the length, as
    attention's memory goes up.

    Args:
        sizes: what a search found for each length; `{None: size}` for data without lengths.
    """

    def __init__(self, sizes: Mapping[int | None, int]) -> None:
        self._fixed = sizes.get(None)
        self._sizes = {length: sizes[length] for length in sorted(key for key in sizes if key is not None)}
        longest = max(self._sizes, default=0)
        self._beyond = self._sizes[longest] * longest**2 if longest else 0

    @property
    def sizes(self) -> dict[int | None, int]:
        """The largest micro-batch of each length, as it is now."""
        sizes: dict[int | None, int] = dict.fromkeys(self._sizes, 0)
        return {length: self.size_for(length) for length in sizes} or {None: self._fixed or 1}

    def size_for(self, seq_len: int | None) -> int:
        """The largest micro-batch for a padded length.

        Args:
            seq_len: in tokens; None for data without lengths, which get what the longest gets.
        """
        if not self._sizes:
            return self._fixed or 1
        tabled = self.tabled(seq_len)
        if tabled is not None:
            return self._sizes[tabled]
        assert seq_len is not None
        return max(1, min(self._beyond // seq_len**2, *self._sizes.values()))

    def tabled(self, seq_len: int | None) -> int | None:
        """The length in the table whose size counts; None without lengths, and beyond the longest.

        Args:
            seq_len: a padded length, in tokens.
        """
        if seq_len is None:
            return max(self._sizes, default=None)
        return next((length for length in self._sizes if length >= seq_len), None)

    def lower(self, seq_len: int | None, size: int) -> None:
        """Allow no more than a size at a length, and at longer ones.

        Args:
            seq_len: a padded length, in tokens.
            size: samples, at least 1.
        """
        if not self._sizes:
            self._fixed = min(self._fixed or 1, size)
            return
        tabled = self.tabled(seq_len)
        if tabled is None:
            assert seq_len is not None
            self._beyond = min(self._beyond, size * seq_len**2)
            return
        lowered = [min(limit, size) if length >= tabled else limit for length, limit in self._sizes.items()]
        self.agree([*lowered, self._beyond])

    def values(self) -> list[int]:
        """All of it in numbers, the same count on every rank; the smaller of two is the safer."""
        return [*self._sizes.values(), self._beyond] if self._sizes else [self._fixed or 1]

    def agree(self, values: Sequence[int]) -> None:
        """Take over what all ranks can do.

        Args:
            values: the least of what each rank's `values` said.
        """
        if not self._sizes:
            (self._fixed,) = values
            return
        self._sizes = dict(zip(self._sizes, values[:-1], strict=True))
        longest = max(self._sizes)
        self._beyond = min(values[-1], self._sizes[longest] * longest**2)


def smaller(size: int, cuts: int) -> int:
    """What to try where a size failed.

    Args:
        size: samples of the micro-batch that failed, more than 1.
        cuts: how often this batch's micro-batches were made smaller before.

    Example:
        >>> smaller(10, 0), smaller(8, 1), smaller(2, 0)
        (8, 4, 1)
    """
    return max(1, min(size - 1, int(size * (NEXT_CUT if cuts else FIRST_CUT))))


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch that is trained on its own.

    Attributes:
        batch: of the same make as the whole.
        factor: what its loss is multiplied with, so that all of them make the loss of the whole.
        share: what its logged means count of the whole's; all of them make 1.
        seq_len: padded length in tokens; None for data without lengths.
        positions: where its samples are in the whole.
    """

    batch: Any
    factor: float
    share: float
    seq_len: int | None
    positions: Sequence[int]

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.positions)


def micro_batches(
    batch: Any, table: LengthTable, weight: Weight, in_order: bool = False, layout: Layout | None = None
) -> list[MicroBatch]:
    """Split a batch.

    Where an attention mask shows how long each sample is, the longest come first: each micro-batch then holds samples
    of nearly one length, gets the size of its own longest and is padded no further. Elsewhere the samples stay in their
    order, in equal micro-batches of the size that the batch's padded length allows. What fits as one stays as it is.

    Args:
        batch: as the loader made it.
        table: the largest micro-batch of each length.
        weight: what the loss is a mean over; see `weigh`.
        in_order: keep the order of the samples although their lengths are known.
        layout: what earlier batches have told of which parts follow the samples; it learns from this one.

    Raises:
        NotSplittable: the batch cannot be split, or the weight cannot be had from it.
        InvalidValue: the user's weight returned a negative or infinite number.
    """
    samples = samples_in(batch, layout)
    lengths = None if in_order else sample_lengths(batch)
    cut = None if lengths is None else _by_length(batch, lengths, table, layout)
    if cut is None:
        sizes = equal_sizes(samples, table.size_for(padded_length(batch)))
        cut = _cut(batch, sizes, layout), _positions(sizes, range(samples))
    parts, positions = cut
    factors = [1.0] if len(parts) == 1 else weigh(parts, weight)
    total = sum(factors)
    shares = [len(where) / samples for where in positions] if weight == "sum" else [f / total for f in factors]
    return [
        MicroBatch(part, factor, share, padded_length(part), where)
        for part, factor, share, where in zip(parts, factors, shares, positions, strict=True)
    ]


def _by_length(
    batch: Any, lengths: list[int], table: LengthTable, layout: Layout | None
) -> tuple[list[Any], list[Sequence[int]]] | None:
    """The parts, longest samples first; None where the padding that they are to do without cannot be cut off."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    sizes: list[int] = []
    while (done := sum(sizes)) < len(order):
        sizes.append(min(table.size_for(lengths[order[done]]), len(order) - done))
    if len(sizes) == 1:
        order = list(range(len(order)))
    parts = _cut(batch if len(sizes) == 1 else reorder(batch, order, layout), sizes, layout)
    positions = _positions(sizes, order)
    for part, where in zip(parts, positions, strict=True):
        padded = padded_length(part)
        if padded is not None and table.size_for(padded) < len(where):
            return None
    return parts, positions


def _cut(batch: Any, sizes: list[int], layout: Layout | None) -> list[Any]:
    return [trim(part) for part in ([batch] if len(sizes) == 1 else split(batch, sizes, layout))]


def _positions(sizes: list[int], order: Sequence[int]) -> list[Sequence[int]]:
    stops = list(accumulate(sizes))
    return [order[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
