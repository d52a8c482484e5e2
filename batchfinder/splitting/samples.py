"""How many samples a batch has.

Samples lie along the first dimension of tensors and arrays, or are the items of a list. Each part of a batch says which
numbers it could mean, and the batch has the one that all agree on. A scalar, a tensor with one row among others with
more, a plain number, a string alone and None say nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from batchfinder.errors import NotSplittable
from batchfinder.splitting.layout import Layout, is_alike, size_of
from batchfinder.splitting.stretch import TOKEN_NAMES
from batchfinder.splitting.tree import Path, children, leaves

# What the first thing a model is called with is named, besides tokens.
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
