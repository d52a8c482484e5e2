"""Which parts of a batch follow its samples, one batch at a time or remembered over many.

A tensor whose first dimension happens to be as long as the batch has samples need not hold one row for each: a table of
ten class weights in a batch of ten, or three images of three channels in a list. One batch alone cannot tell; another
one with another number of samples can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from batchfinder.splitting.tree import Path, children, leaves

Reading = Literal["items", "rows", "inside", "whole"]
_IMAGE_NDIM = 3  # channels, height, width


class Layout:
    """Reads the parts of batches, and remembers what one batch has told for those in which it cannot be told.

    Where nothing is remembered, what has as many rows as there are samples holds one for each. A list of n tensors of n
    rows, for n samples, is fields of the batch, as `default_collate` makes them; but within another container, n
    tensors of three dimensions are n images. Only items of one kind can be one per sample.
    """

    def __init__(self) -> None:
        self._items: set[Path] = set()
        self._whole: set[Path] = set()

    def learn(self, batch: Any, samples: int) -> None:
        """Remember what a batch tells.

        Args:
            batch: a batch of the make that will be read.
            samples: how many it has.
        """
        self._learn(batch, (), samples)

    def read(self, value: Any, path: Path, samples: int) -> Reading:
        """How a part of a batch follows its samples.

        Args:
            value: the part.
            path: the keys, fields and positions that lead to it.
            samples: how many the batch has.

        Returns:
            `items`, a list or tuple of one item per sample; `rows`, a tensor, array or plain list of one row for each;
            `inside`, a container whose contents are to be read; `whole`, the same for all samples.
        """
        inside = children(value)
        if inside is not None:
            return "items" if self._is_items(value, path, samples) else "inside"
        return "rows" if size_of(value) == samples and path not in self._whole else "whole"

    def is_whole(self, path: Path) -> bool:
        """Whether a part is known to be the same for all samples.

        Args:
            path: what leads to it.
        """
        return path in self._whole

    def _learn(self, value: Any, path: Path, samples: int) -> None:
        inside = children(value)
        if inside is None:
            if size_of(value) not in (None, samples):
                self._whole.add(path)
            return
        if _is_list(value) and len(value) == samples:
            if is_alike(value) and not _is_fields(value, samples):
                self._items.add(path)
                return
            if _is_images(value, path):
                return
        for key, child in inside:
            self._learn(child, (*path, key), samples)

    def _is_items(self, value: Any, path: Path, samples: int) -> bool:
        if not _is_list(value) or len(value) != samples or not is_alike(value):
            return False
        return path in self._items or not _is_fields(value, samples) or _is_images(value, path)


def size_of(leaf: Any) -> int | None:
    """How many rows, or items, something has that contains no other part of a batch; None if it has no such thing.

    Args:
        leaf: a tensor, an array, a list of strings or numbers, a PackedSequence, or anything else.
    """
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, Tensor | np.ndarray):
        return int(leaf.shape[0]) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list | tuple) else None


def is_alike(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items of a list could be samples: of one kind, tensors of one rank and type, dicts of the same keys.

    Args:
        value: the list or tuple.
    """
    return not hasattr(value, "_fields") and len({_kind(item) for item in value}) == 1


def _kind(item: Any) -> tuple[Any, ...]:
    if isinstance(item, Tensor | np.ndarray):
        return Tensor, item.ndim, item.dtype
    if isinstance(item, Mapping):
        return Mapping, frozenset(item)
    return (type(item),)


def _is_images(value: Any, path: Path) -> bool:
    return bool(path) and all(isinstance(item, Tensor) and item.ndim == _IMAGE_NDIM for item in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _is_fields(value: list[Any] | tuple[Any, ...], samples: int) -> bool:
    sizes = [size_of(leaf) for item in value for _, leaf in leaves(item) if isinstance(leaf, Tensor | np.ndarray)]
    return bool(sizes) and all(size == samples for size in sizes)
