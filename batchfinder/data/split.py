"""Splitting a batch into micro-batches of its own make, reordering its samples, and changing their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from batchfinder.data.batch import IGNORED, Layout, Path, children, rebuild, samples_in, tensors
from batchfinder.data.padding import trim
from batchfinder.errors import InvalidValue, NotSplittable

Weight = Literal["samples", "tokens", "next_tokens", "sum"] | Callable[[Any], float | Tensor]
WEIGHTS: tuple[Literal["samples", "tokens", "next_tokens", "sum"], ...] = ("samples", "tokens", "next_tokens", "sum")


def weigh(parts: Sequence[Any], weight: Weight = "samples") -> list[float]:
    """The factors with which the losses of a batch's parts make the loss of the batch.

    A part of which nothing counts (every label is ignored) has the factor 0. Its own loss is a mean over nothing, NaN,
    and 0 times NaN is NaN in the loss and in the gradients alike: leave such a part out of the forward and the
    backward. Where nothing counts in any part, the factors are the shares of samples, so that the sum is what the loss
    makes of such a batch.

    The weight is that of `split_batch`; what is raised, that of `count_in`.
    """
    if weight == "sum":
        return [1.0] * len(parts)
    counts = [count_in(part, weight) for part in parts]
    total = math.fsum(counts)
    if total == 0 and weight != "samples":
        return weigh(parts, "samples")
    return [count / total for count in counts]


def count_in(batch: Any, weight: Weight) -> float:
    """How much a batch or micro-batch counts; 1 for the weight `sum`.

    Raises:
        InvalidValue: the weight is not a known one, or the function returned something below 0 or not finite.
        NotSplittable: tokens are to be counted and no tensor is called `labels`, or the number of samples is not clear.
    """
    if callable(weight):
        count = float(weight(batch))
        if not (math.isfinite(count) and count >= 0):
            raise InvalidValue(
                "weight", count, "a function that returns a finite number, 0 or more, for each micro-batch"
            )
        return count
    if weight == "samples":
        return samples_in(batch)
    if weight in ("tokens", "next_tokens"):
        found = [tensor for path, tensor in tensors(batch) if path and path[-1] == "labels"]
        if len(found) != 1 or not found[0].ndim:
            there = "no tensor" if not found else "more than one tensor" if len(found) > 1 else "a single number"
            raise NotSplittable(
                f"weight={weight!r} counts the labels that are not {IGNORED}, and {there} in it is called labels",
                "Pass weight= a function that returns the number of tokens that the loss of a micro-batch is a mean"
                " over.",
            )
        labels = found[0][..., 1:] if weight == "next_tokens" else found[0]
        return int(labels.ne(IGNORED).sum())
    if weight == "sum":
        return 1
    raise InvalidValue("weight", weight, f"one of {', '.join(WEIGHTS)}, or a function of a micro-batch")


def split(batch: Any, sizes: Sequence[int], layout: Layout | None = None) -> list[Any]:
    """Split a batch into micro-batches of given sizes, in order.

    Tensors and arrays with as many rows as the batch has samples are split along their first dimension, into views of
    the same memory; lists and tuples with one item per sample are cut. Everything else goes to each part as it is. The
    containers are of the batch's own types; the batch itself is not changed.

    Args:
        sizes: samples of each part; together as many as the batch has.
        layout: what earlier batches have shown; it learns from this one.

    Raises:
        InvalidValue: a size is below 1, or nothing in the batch has as many rows or items as the sizes add up to.
        NotSplittable: it holds a tensor of a layout that cannot be cut.

    Example:
        >>> [part["x"].tolist() for part in split({"x": torch.arange(5)}, [3, 2])]
        [[0, 1, 2], [3, 4]]
    """
    sizes = [int(size) for size in sizes]
    if not sizes or min(sizes) < 1:
        raise InvalidValue("sizes", sizes, "at least one, each 1 or more")
    stops = list(accumulate(sizes))
    return _chosen(
        batch, [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)], stops[-1], layout
    )


def split_batch(batch: Any, largest: int, weight: Weight = "samples") -> list[tuple[Any, float]]:
    """Split a batch into the fewest micro-batches that fit, so that their gradients add up to the batch's.

    Each micro-batch is trimmed to its own longest sample where `attention_mask` and the rest of the batch allow it. One
    of which nothing counts (every label is ignored) is left out.

    Args:
        batch: tensors, arrays and lists, nested in dicts, tuples, dataclasses, BatchEncodings.
        largest: samples that a micro-batch may have at most.
        weight: what the loss is a mean over: `samples`; `tokens`, those whose label is not -100; `next_tokens`, these
            without each sequence's first label, which causal language models never predict; `sum`, for a loss that is
            a sum; or a function that says of a micro-batch how much it counts (the denominator of its mean).

    Returns:
        Micro-batches of the batch's own make, each with the factor for its loss.

    Raises:
        InvalidValue: `largest` is below 1, or the weight is not a known one.
        NotSplittable: the batch cannot be split, or the weight cannot be read from it.

    Example:
        >>> import torch
        >>> x, weight = torch.tensor([1.0, 2.0, 6.0]), torch.tensor(1.0, requires_grad=True)
        >>> for part, factor in split_batch(x, largest=2):
        ...     ((weight * part).mean() * factor).backward()
        >>> weight.grad
        tensor(3.)
    """
    parts = split(batch, equal_sizes(samples_in(batch), largest))
    factors = weigh(parts, weight)
    return [(trim(part), factor) for part, factor in zip(parts, factors, strict=True) if factor]


def reorder(batch: Any, order: Sequence[int], layout: Layout | None = None) -> Any:
    """A copy of a batch with its samples in another order: `order` holds the position of each.

    Raises:
        InvalidValue: nothing in the batch has as many rows or items as the order.
        NotSplittable: it holds a tensor of a layout that cannot be cut.
    """
    return _chosen(batch, [list(order)], len(order), layout)[0]


def equal_sizes(samples: int, largest: int) -> list[int]:
    """Sizes of the fewest parts that are at most `largest`, as equal as possible, larger ones first.

    Raises:
        InvalidValue: either is below 1.

    Example:
        >>> equal_sizes(10, 4)
        [4, 3, 3]
    """
    if samples < 1:
        raise InvalidValue("samples", samples, "1 or more")
    if largest < 1:
        raise InvalidValue("largest", largest, "1 or more")
    parts = -(-samples // largest)
    size, more = divmod(samples, parts)
    return [size + 1] * more + [size] * (parts - more)


def with_batch_size(batch: Any, batch_size: int) -> Any:
    """A copy of a batch with its samples repeated in turn, or cut, to another number of them.

    Returns:
        The copy; None where it is not clear how many samples the batch has.
    """
    try:
        samples = samples_in(batch)
    except NotSplittable:
        samples = 0
    if not samples:
        return None
    return _chosen(batch, [[index % samples for index in range(batch_size)]], samples, None)[0]


def _chosen(batch: Any, choices: Sequence[slice | list[int]], samples: int, layout: Layout | None) -> list[Any]:
    """The samples of each choice, as a batch."""
    layout = layout or Layout()
    if not _follows(batch, (), samples, layout):
        raise InvalidValue(
            "sizes", samples, "as many samples as the batch has; nothing in it has so many rows or items"
        )
    layout.learn(batch, samples)
    return [_part(batch, (), choice, samples, layout) for choice in choices]


def _follows(value: Any, path: Path, samples: int, layout: Layout) -> bool:
    reading = layout.read(value, path, samples)
    if reading == "inside":
        return any(_follows(child, (*path, key), samples, layout) for key, child in children(value) or ())
    return reading != "whole"


def _part(value: Any, path: Path, choice: slice | list[int], samples: int, layout: Layout) -> Any:
    """The chosen samples of a part of a batch."""
    reading = layout.read(value, path, samples)
    if reading == "whole":
        return value
    if reading == "inside":
        inside = children(value) or []
        part = rebuild(value, [(key, _part(child, (*path, key), choice, samples, layout)) for key, child in inside])
        encodings = getattr(value, "_encodings", None)  # of a BatchEncoding: one per sample, beside the tensors
        if isinstance(encodings, list) and len(encodings) == samples:
            part._encodings = _items(encodings, choice)
        return part
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        lengths = lengths[choice]
        return pack_padded_sequence(padded[choice, : int(lengths.max())], lengths, True, enforce_sorted=False)
    if isinstance(value, np.ndarray):
        return value[choice]
    if not isinstance(value, Tensor):
        return _items(value, choice)
    if value.is_nested:
        return torch.nested.as_nested_tensor(_items(list(value.unbind()), choice), layout=value.layout)
    if value.layout not in (torch.strided, torch.sparse_coo):
        raise NotSplittable(f"it holds a tensor of layout {value.layout}, of which no rows can be taken")
    if isinstance(choice, slice):
        if value.layout is torch.strided:
            return value[choice]
        choice = list(range(choice.start, choice.stop))
    return value.index_select(0, torch.tensor(choice, device=value.device))


def _items(value: Any, choice: slice | list[int]) -> Any:
    return type(value)(value[choice] if isinstance(choice, slice) else [value[index] for index in choice])
