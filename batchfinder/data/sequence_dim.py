"""Which dimensions of a batch are the sequence, and giving it another length by repeating or cutting.

1. Where batches of long and of short samples differ, the dimensions (after the first) that differ: those of tokens,
   labels, masks (B, S) and (B, S, S) alike, and of whatever else is as long as the tokens or longer by a constant.
   Where they do not all follow one length (source and target of a translation), a length asked for is ambiguous.
2. Where all are padded alike, dimension 1 of a two-dimensional integer tensor named as in `TOKEN_NAMES`, or of the only
   such tensors there are; and each dimension of that size of an integer or boolean tensor or a mask, and dimension 1 of
   that size of any other tensor.

An integer vector that holds each sample's length is set to the new length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchfinder.data.batch import TOKEN_NAMES, Path, map_leaves, tensors

_TOKENS = {(name,) for name in TOKEN_NAMES}


@dataclass(frozen=True)
class SequenceDims:
    """The dimensions of a batch that follow the sequence length.

    Attributes:
        length: the longest observed, in tokens.
        dims: what each dimension that follows the length has more than it, by the tensor's path and the dimension.
        lengths: the vectors that hold lengths, by their paths.
    """

    length: int
    dims: dict[tuple[Path, int], int]
    lengths: frozenset[Path] = field(default=frozenset())

    def stretch(self, batch: Any, seq_len: int) -> Any:
        """A copy of the batch whose sequences have another length, repeated or cut."""

        def stretched(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if path in self.lengths:
                return torch.full_like(leaf, seq_len)
            for dim in range(1, leaf.ndim):
                if (path, dim) in self.dims:
                    leaf = cycle(leaf, max(1, seq_len + self.dims[path, dim]), dim)
            return leaf

        return map_leaves(stretched, batch)

    def length_of(self, batch: Any) -> int | None:
        """The length of the sequences in a batch, in tokens, padding included; None if it holds none of them."""
        found = dict(tensors(batch))
        lengths = [
            found[path].size(dim) - more
            for (path, dim), more in self.dims.items()
            if path in found and dim < found[path].ndim
        ]
        return max(lengths, default=None)


def find_sequence(long: Any, short: Any, guess: bool = True) -> SequenceDims | str:
    """Find the sequence by comparing two batches.

    Args:
        guess: whether integers in a tensor of any name may be tokens, where no length varies.

    Returns:
        The dimensions, or in words why they are not clear.
    """
    longs, shorts = dict(tensors(long)), dict(tensors(short))
    if not longs:
        return "they hold no tensors"
    if longs.keys() != shorts.keys() or any(longs[path].ndim != shorts[path].ndim for path in longs):
        return "long and short samples make batches of different structure"
    varying = {
        (path, dim): (longs[path].size(dim), shorts[path].size(dim))
        for path in longs
        for dim in range(longs[path].ndim)
        if longs[path].size(dim) != shorts[path].size(dim)
    }
    if any(dim == 0 for _, dim in varying):
        return "their first dimension, which should be the batch, grows with the samples' lengths"
    if varying:
        first = min(varying, key=lambda place: (place[0][-1:] not in _TOKENS, _is_float(longs[place[0]])))
        length, shortest = varying[first]
        dims = {}
        for place, (most, least) in varying.items():
            if most - length != least - shortest:
                one, other = (
                    f"dimension {dim} of {'batch' if path else 'the batch'}{''.join(f'[{key!r}]' for key in path)}"
                    for path, dim in (first, place)
                )
                return f"{one} and {other} vary independently"
            dims[place] = most - length
        lengths = {
            path
            for path, tensor in longs.items()
            if _is_vector(tensor) and int(tensor.max()) == length and int(shorts[path].max()) == shortest
        }
        return SequenceDims(length, dims, frozenset(lengths))

    # All are padded alike: tokens are known by their names.
    tables = {
        path: tensor.size(1)
        for path, tensor in longs.items()
        if tensor.ndim == 2 and tensor.size(1) > 1 and not _is_float(tensor) and tensor.dtype != torch.bool
    }
    sizes = {size for path, size in tables.items() if path[-1:] in _TOKENS}
    if not sizes and guess:
        sizes = set(tables.values())
    if not sizes:
        return "no length varies between samples, and no two-dimensional integer tensor could hold tokens"
    if len(sizes) > 1:
        return f"tensors that could hold tokens have the lengths {', '.join(map(str, sorted(sizes)))}"
    (length,) = sizes
    dims = {}
    for path, tensor in longs.items():
        every = not _is_float(tensor) or "mask" in str(path[-1:]) or "bias" in str(path[-1:])
        for dim in range(1, tensor.ndim if every else min(2, tensor.ndim)):
            if tensor.size(dim) == length:
                dims[path, dim] = 0
    lengths = {
        path
        for path, tensor in longs.items()
        if _is_vector(tensor) and "len" in str(path[-1:]) and int(tensor.max()) == length
    }
    return SequenceDims(length, dims, frozenset(lengths))


def cycle(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Repeat or cut a tensor along a dimension; the tensor itself if it has the size."""
    have = tensor.size(dim)
    return tensor if have == size else tensor.index_select(dim, torch.arange(size, device=tensor.device) % have)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_vector(tensor: Tensor) -> bool:
    return tensor.ndim == 1 and len(tensor) > 0 and not _is_float(tensor) and tensor.dtype != torch.bool
