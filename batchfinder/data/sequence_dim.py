"""Stretching a collated batch to another number of samples or another sequence length, by repeating or cutting.

Which dimension is the sequence:

1. Where batches of long and of short samples differ, the dimensions (after the first) that differ: those of tokens,
   labels, masks (B, S) and (B, S, S) alike, and of whatever else is as long as the tokens or longer by a constant. When
   they do not all follow one length (source and target of a translation) nobody can tell what a length asked for means.
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


@dataclass(frozen=True)
class Sequence:
    """Where in a batch the sequence is.

    Attributes:
        length: the longest observed, in tokens.
        dims: what each dimension that follows the length has more than it, by the tensor's path and the dimension.
        lengths: the vectors that hold lengths, by their paths.
    """

    length: int
    dims: dict[tuple[Path, int], int]
    lengths: frozenset[Path] = field(default=frozenset())

    def stretch(self, batch: Any, seq_len: int) -> Any:
        """A copy of the batch whose sequences have another length.

        Args:
            batch: a batch of the same make as the ones that were observed.
            seq_len: the new length.
        """

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
        """The length of the sequences in a batch, in tokens, padding included; None if it holds none of them.

        Args:
            batch: a batch of the same make as the ones that were observed.
        """
        found = dict(tensors(batch))
        lengths = [
            found[path].size(dim) - more
            for (path, dim), more in self.dims.items()
            if path in found and dim < found[path].ndim
        ]
        return max(lengths, default=None)


def find_sequence(long: Any, short: Any, guess: bool = True) -> Sequence | str:
    """Find the sequence by comparing two batches.

    Args:
        long: a batch with the longest samples.
        short: a batch of as many of the shortest samples.
        guess: whether integers in a tensor of any name may be tokens, where no length varies.

    Returns:
        Where it is, or in words why nobody can tell.
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
    return _varying(longs, shorts, varying) if varying else _named(longs, guess)


def with_batch_size(batch: Any, batch_size: int) -> Any:
    """A copy of the batch with its samples repeated or cut to another number of them.

    Args:
        batch: a batch with the samples along the first dimension of its tensors.
        batch_size: the new number of samples.

    Returns:
        The copy; None if nothing in the batch tells how many samples it has.
    """
    have = next((len(tensor) for _, tensor in tensors(batch) if tensor.ndim), 0)
    if not have:
        return None

    def resized(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return cycle(leaf, batch_size, 0) if leaf.ndim and len(leaf) == have else leaf
        if isinstance(leaf, list | tuple) and len(leaf) == have:
            return type(leaf)(leaf[index % have] for index in range(batch_size))
        return leaf

    return map_leaves(resized, batch)


def cycle(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Repeat or cut a tensor along a dimension; the tensor itself if it has the size.

    Args:
        tensor: any tensor that is not empty along the dimension.
        size: the size it is to have.
        dim: the dimension.
    """
    have = tensor.size(dim)
    return tensor if have == size else tensor.index_select(dim, torch.arange(size, device=tensor.device) % have)


def _varying(
    longs: dict[Path, Tensor], shorts: dict[Path, Tensor], varying: dict[tuple[Path, int], tuple[int, int]]
) -> Sequence | str:
    first = min(varying, key=lambda place: (not _is_named(place[0]), _is_float(longs[place[0]])))
    length, shortest = varying[first]
    dims = {}
    for place, (most, least) in varying.items():
        if most - length != least - shortest:
            return f"{_text(first)} and {_text(place)} vary independently"
        dims[place] = most - length
    lengths = {
        path
        for path, tensor in longs.items()
        if _is_vector(tensor) and int(tensor.max()) == length and int(shorts[path].max()) == shortest
    }
    return Sequence(length, dims, frozenset(lengths))


def _named(found: dict[Path, Tensor], guess: bool) -> Sequence | str:
    tables = {path: tensor.size(1) for path, tensor in found.items() if tensor.ndim == 2 and _is_integer(tensor)}
    tables = {path: size for path, size in tables.items() if size > 1}
    sizes = {size for path, size in tables.items() if _is_named(path)}
    if not sizes and guess:
        sizes = set(tables.values())
    if not sizes:
        return "no length varies between samples, and no two-dimensional integer tensor could hold tokens"
    if len(sizes) > 1:
        return f"tensors that could hold tokens have the lengths {', '.join(map(str, sorted(sizes)))}"
    (length,) = sizes
    dims = {}
    for path, tensor in found.items():
        every = not _is_float(tensor) or "mask" in str(path[-1:]) or "bias" in str(path[-1:])
        for dim in range(1, tensor.ndim if every else min(2, tensor.ndim)):
            if tensor.size(dim) == length:
                dims[path, dim] = 0
    lengths = {
        path
        for path, tensor in found.items()
        if _is_vector(tensor) and "len" in str(path[-1:]) and int(tensor.max()) == length
    }
    return Sequence(length, dims, frozenset(lengths))


def _is_named(path: Path) -> bool:
    return bool(path) and path[-1] in TOKEN_NAMES


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_integer(tensor: Tensor) -> bool:
    return not _is_float(tensor) and tensor.dtype != torch.bool


def _is_vector(tensor: Tensor) -> bool:
    return tensor.ndim == 1 and len(tensor) > 0 and _is_integer(tensor)


def _text(place: tuple[Path, int]) -> str:
    path, dim = place
    name = "the batch" if not path else f"batch{''.join(f'[{key!r}]' for key in path)}"
    return f"dimension {dim} of {name}"
