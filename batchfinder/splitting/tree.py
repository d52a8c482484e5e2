"""Walking through a batch or a sample, whatever it is nested in: dicts, tuples, dataclasses, BatchEncodings."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

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
