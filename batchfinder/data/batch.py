"""Walking through a batch or a sample, whatever it is nested in: dicts, tuples, dataclasses, BatchEncodings.

Which parts of a batch follow its samples, one batch at a time or remembered over many.

A tensor whose first dimension happens to be as long as the batch has samples need not hold one row for each: a table of
ten class weights in a batch of ten, or three images of three channels in a list. One batch alone cannot tell; another
one with another number of samples can.

How many samples a batch has.

Samples lie along the first dimension of tensors and arrays, or are the items of a list. Each part of a batch says which
numbers it could mean, and the batch has the one that all agree on. A scalar, a tensor with one row among others with
more, a plain number, a string alone and None say nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from batchfinder.errors import NotSplittable

Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each thing in a batch or sample that contains no others, with the keys, fields and positions that lead to it.

    A list or tuple of plain numbers is a leaf, as are a list of strings, a string and a PackedSequence.

    Args:
        value: the batch or sample.
        path: what leads to it.
    """
    inside = children(value)
    if inside is None:
        yield path, value
        return
    for key, child in inside:
        yield from leaves(child, (*path, key))


def tensors(value: Any) -> Iterator[tuple[Path, Tensor]]:
    """The leaves that are tensors.

    Args:
        value: the batch or sample.
    """
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """A batch or sample of the same make with other leaves. The containers are copied, never changed.

    Args:
        function: makes the new leaf out of the path and the old one.
        value: the batch or sample.
        path: what leads to it.
    """
    inside = children(value)
    if inside is None:
        return function(path, value)
    return rebuild(value, [(key, map_leaves(function, child, (*path, key))) for key, child in inside])


def rebuild(value: Any, made: list[tuple[Any, Any]]) -> Any:
    """A container of the same make that contains other things. The container itself is copied, never changed.

    Args:
        value: the container.
        made: what the copy is to contain, by the keys, fields or positions of the container's `children`.
    """
    if isinstance(value, Mapping):
        try:
            new = copy.copy(value)
            for key, child in made:
                new[key] = child  # type: ignore[index]
        except TypeError:  # one that cannot be changed
            return type(value)(dict(made))  # type: ignore[call-arg]
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(child for _, child in made))
    if isinstance(value, list | tuple):
        return type(value)(child for _, child in made)
    new = copy.copy(value)
    for key, child in made:
        object.__setattr__(new, key, child)
    return new


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """What a part of a batch contains, by key, field or position; None for a leaf.

    Args:
        value: the part.
    """
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        plain = str if isinstance(value, list) and value and isinstance(value[0], str) else (int, float)
        if value and all(isinstance(item, plain) for item in value) and not hasattr(value, "_fields"):
            return None
        fields = getattr(value, "_fields", range(len(value)))
        return list(zip(fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        ]
    return None


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


# What the first thing a model is called with is named, besides tokens.
TOKEN_NAMES = frozenset({"input_ids", "token_ids", "inputs_ids", "tokens", "ids", "src"})
INPUT_NAMES = TOKEN_NAMES | {"inputs_embeds", "pixel_values", "input_values", "input_features", "inputs", "x"}


def samples_in(batch: Any, layout: Layout | None = None) -> int:
    """How many samples a batch has.

    Where the parts do not agree (a table of class weights beside the samples), it is the number that a tensor named
    as in `INPUT_NAMES` has, or that of the first tensor if another one has it too.

    Args:
        batch: tensors, arrays and lists, nested in dicts, tuples, dataclasses, BatchEncodings.
        layout: what earlier batches have told.

    Raises:
        NotSplittable: nobody can tell.
    """
    layout = layout or Layout()
    rows = [
        (path, size)
        for path, leaf in leaves(batch)
        if (size := size_of(leaf)) is not None and not layout.is_whole(path)
    ]
    inside = children(batch) or ()
    agreed = _common(_possible(child, (key,), layout) for key, child in inside) or _possible(batch, (), layout)
    if agreed:
        of_tensors = {size_of(leaf) for _, leaf in leaves(batch) if isinstance(leaf, Tensor | np.ndarray)}
        return min(agreed, key=lambda count: (count not in of_tensors, count))
    named = {size for path, size in rows if path and path[-1] in INPUT_NAMES}
    if len(named) == 1:
        return named.pop()
    counted = [size for _, size in rows if size != 1]
    if not named and counted and Counter(counted)[counted[0]] > 1:
        return counted[0]
    raise NotSplittable(
        f"nobody can tell how many samples it has: the first dimensions of what it holds are {_text(rows)}"
        if rows
        else "it holds no tensors, arrays or lists"
    )


def _possible(value: Any, path: Path, layout: Layout) -> frozenset[int] | None:
    """The numbers of samples that all of a part would do for, empty if none does; None if it says nothing."""
    inside = children(value)
    if inside is None:
        size = size_of(value)
        return None if size is None or layout.is_whole(path) else frozenset({size})
    agreed = _common(_possible(child, (*path, key), layout) for key, child in inside)
    if isinstance(value, list | tuple) and value and is_alike(value):
        return (agreed or frozenset()) | {len(value)}
    return agreed


def _common(says: Iterable[frozenset[int] | None]) -> frozenset[int] | None:
    heard = [numbers for numbers in says if numbers is not None]
    several = [numbers for numbers in heard if numbers != {1}]
    return frozenset.intersection(*(several or heard)) if heard else None


def _text(rows: list[tuple[Path, int]]) -> str:
    return ", ".join(
        f"{size} ({''.join(f'[{key!r}]' for key in path) or 'the batch itself'})" for path, size in rows[:6]
    )
