"""A batch as the loader made it, in the micro-batches that fit: the fewest that the lengths of its samples allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchfinder.lightning.length_table import LengthTable
from batchfinder.splitting.by_length import sample_lengths
from batchfinder.splitting.layout import Layout
from batchfinder.splitting.length import padded_length, trim
from batchfinder.splitting.samples import samples_in
from batchfinder.splitting.split import equal_sizes, reorder, split
from batchfinder.splitting.weights import Weight, weigh


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch that is trained on its own.

    Attributes:
        batch: of the same make as the whole.
        factor: what its loss is multiplied with, so that all of them make the loss of the whole.
        share: what its logged means count of the whole's; all of them make 1.
        seq_len: padded length in tokens; None where nobody can tell.
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
    """Take a batch apart.

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
        NotSplittable: the batch cannot be taken apart, or the weight cannot be had from it.
        InvalidValue: the user's weight returned what cannot be meant.
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
