"""Batches of any make (dicts, tuples, dataclasses, BatchEncodings): their leaves, and how many samples they have.

Samples lie along the first dimension of tensors and arrays, or are the items of a list. Each part of a batch says which
numbers of samples it could have, and the batch has the one that all agree on. A scalar, a tensor with one row among
others with more, a plain number, a string alone and None say nothing.

A tensor whose first dimension happens to be as long as the batch has samples need not hold one row for each: a table of
ten class weights in a batch of ten, or three images of three channels in a list. One batch alone does not show it;
another one with another number of samples does, and `Layout` remembers it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from batchfinder.errors import NotSplittable

Path = tuple[Any, ...]
Reading = Literal["items", "rows", "inside", "whole"]
_IMAGE_NDIM = 3  # channels, height, width
IGNORED = -100  # the label that torch.nn.functional.cross_entropy leaves out

# The usual names of a model's first input: tokens, and everything else.
TOKEN_NAMES = frozenset({"input_ids", "token_ids", "inputs_ids", "tokens", "ids", "src"})
INPUT_NAMES = TOKEN_NAMES | {"inputs_embeds", "pixel_values", "input_values", "input_features", "inputs", "x"}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf of a batch or sample, with the keys, fields and positions that lead to it.

    A list or tuple of plain numbers is a leaf, as are a list of strings, a string and a PackedSequence.
    """
    inside = children(value)
    if inside is None:
        yield path, value
        return
    for key, child in inside:
        yield from leaves(child, (*path, key))


def tensors(value: Any) -> Iterator[tuple[Path, Tensor]]:
    """The leaves that are tensors."""
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """A batch or sample of the same make with the leaves `function(path, leaf)`. Containers are copied, not changed."""
    inside = children(value)
    if inside is None:
        return function(path, value)
    return rebuild(value, [(key, map_leaves(function, child, (*path, key))) for key, child in inside])


def rebuild(value: Any, made: list[tuple[Any, Any]]) -> Any:
    """A copy of a container with other contents, by the keys, fields or positions of its `children`."""
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
    """The contents of a part of a batch, by key, field or position; None for a leaf."""
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


def size_of(leaf: Any) -> int | None:
    """How many rows or items a leaf has; None if it has neither."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, Tensor | np.ndarray):
        return int(leaf.shape[0]) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list | tuple) else None


def is_alike(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items of a list could be samples: all of one type, rank and dtype, or dicts of the same keys."""
    kinds: set[tuple[Any, ...]] = set()
    for item in value:
        if isinstance(item, Tensor | np.ndarray):
            kinds.add((Tensor, item.ndim, item.dtype))
        elif isinstance(item, Mapping):
            kinds.add((Mapping, frozenset(item)))
        else:
            kinds.add((type(item),))
    return not hasattr(value, "_fields") and len(kinds) == 1


def samples_in(batch: Any, layout: Layout | None = None) -> int:
    """How many samples a batch has.

    Where the parts do not agree (a table of class weights beside the samples), it is the number of rows of the tensors
    named as in `INPUT_NAMES`, or that of the first tensor if another one has as many.

    Raises:
        NotSplittable: the number is not clear.
    """
    layout = layout or Layout()
    rows = [
        (path, size) for path, leaf in leaves(batch) if (size := size_of(leaf)) is not None and path not in layout.whole
    ]
    named = {size for path, size in rows if path and path[-1] in INPUT_NAMES}
    if named == {1}:
        return 1  # a batch of one sample, beside whatever else it holds
    agreed = _possible_sizes(batch, (), layout, by_length=False) or _possible_sizes(batch, (), layout)
    if agreed:
        of_tensors = {size_of(leaf) for _, leaf in leaves(batch) if isinstance(leaf, Tensor | np.ndarray)}
        return min(agreed, key=lambda count: (count not in of_tensors, count))
    if len(named) == 1:
        return named.pop()
    counted = [size for _, size in rows if size != 1]
    if not named and counted and Counter(counted)[counted[0]] > 1:
        return counted[0]
    if not rows:
        raise NotSplittable("it holds no tensors, arrays or lists")
    places = [f"{size} ({''.join(f'[{key!r}]' for key in path) or 'the batch itself'})" for path, size in rows[:6]]
    raise NotSplittable(
        f"its number of samples is not clear: the first dimensions of its parts are {', '.join(places)}"
    )


def _possible_sizes(value: Any, path: Path, layout: Layout, by_length: bool = True) -> frozenset[int] | None:
    """The numbers of samples that a part could have, empty if its contents disagree; None if it says nothing."""
    inside = children(value)
    if inside is None:
        size = size_of(value)
        return None if size is None or path in layout.whole else frozenset({size})
    possible = [_possible_sizes(child, (*path, key), layout) for key, child in inside]
    known = [numbers for numbers in possible if numbers is not None]
    above_one = [numbers for numbers in known if numbers != {1}]
    agreed = frozenset.intersection(*(above_one or known)) if known else None
    if by_length and isinstance(value, list | tuple) and value and is_alike(value):
        return (agreed or frozenset()) | {len(value)}
    return agreed


@dataclasses.dataclass
class Layout:
    """Tells which parts of a batch follow its samples, and remembers what batches of other sizes have shown.

    Where nothing is remembered, a leaf with as many rows as there are samples holds one for each. A list of n tensors
    of n rows, for n samples, is fields of the batch, as `default_collate` makes them; but within another container, n
    tensors of three dimensions are n images. Only items of one kind can be one per sample.
    """

    items: set[Path] = dataclasses.field(default_factory=set)  # lists that are known to have one item per sample
    whole: set[Path] = dataclasses.field(default_factory=set)  # leaves that are known to be the same for all samples

    def learn(self, batch: Any, samples: int, path: Path = ()) -> None:
        """Remember which parts of a batch, or of the part at a path, follow its samples, and which do not."""
        inside = children(batch)
        if inside is None:
            if size_of(batch) not in (None, samples):
                self.whole.add(path)
            return
        contents = _list_contents(batch, path, samples)
        if contents == "samples":
            self.items.add(path)
        elif contents != "images":
            for key, child in inside:
                self.learn(child, samples, (*path, key))

    def read(self, value: Any, path: Path, samples: int) -> Reading:
        """How a part of a batch follows its samples.

        Returns:
            `items`, a list or tuple of one item per sample; `rows`, a tensor, array or plain list of one row for each;
            `inside`, a container whose contents are to be read; `whole`, the same for all samples.
        """
        if children(value) is None:
            return "rows" if size_of(value) == samples and path not in self.whole else "whole"
        contents = _list_contents(value, path, samples)
        if contents == "samples":
            return "items"
        shown = contents == "images" or (contents == "fields" and path in self.items)
        return "items" if shown and is_alike(value) else "inside"


def _list_contents(value: Any, path: Path, samples: int) -> Literal["samples", "images", "fields"] | None:
    """What a list with as many items as there are samples holds, to all appearance; None for anything else."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != samples:
        return None
    sizes = [size_of(leaf) for item in value for _, leaf in leaves(item) if isinstance(leaf, Tensor | np.ndarray)]
    if is_alike(value) and not (sizes and all(size == samples for size in sizes)):
        return "samples"
    images = bool(path) and all(isinstance(item, Tensor) and item.ndim == _IMAGE_NDIM for item in value)
    return "images" if images else "fields"
