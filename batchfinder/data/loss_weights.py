"""Weights of the micro-batches' losses, with which they add up to the loss of the whole batch.

A loss that is a mean over n samples, of which a micro-batch has m, counts m / n: the sum of (m / n) times the mean over
the micro-batch is the mean over the batch, and so it is with the gradients. For a mean over tokens m and n are the
tokens that count, and a loss that is a sum is simply added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from batchfinder.data.batch import samples_in, tensors
from batchfinder.errors import InvalidValue, NotSplittable

Weight = Literal["samples", "tokens", "next_tokens", "sum"] | Callable[[Any], float | Tensor]
WEIGHTS: tuple[Literal["samples", "tokens", "next_tokens", "sum"], ...] = ("samples", "tokens", "next_tokens", "sum")
IGNORED = -100  # the label that torch.nn.functional.cross_entropy leaves out


def weigh(parts: Sequence[Any], weight: Weight = "samples") -> list[float]:
    """The factors with which the losses of a batch's parts make the loss of the batch.

    A part of which nothing counts (every label is ignored) has the factor 0. Its own loss is a mean over nothing, NaN,
    and 0 times NaN is NaN in the loss and in the gradients alike: leave such a part out of the forward and the
    backward. Where nothing counts in any part, the factors are the shares of samples, so that the sum is what the loss
    makes of such a batch.

    Args:
        weight: what the loss is a mean over: `samples`; `tokens`, those whose label is not -100; `next_tokens`, these
            without each sequence's first label, which causal language models never predict; `sum`, for a loss that is
            a sum; or a function that says of a micro-batch how much it counts (the denominator of its mean).

    Raises:
        InvalidValue: the weight is not a known one, or the function returned something below 0 or not finite.
        NotSplittable: tokens are to be counted and no tensor is called `labels`, or the number of samples is not clear.
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
        labels = _labels(batch, weight)
        return int((labels[..., 1:] if weight == "next_tokens" else labels).ne(IGNORED).sum())
    if weight == "sum":
        return 1
    raise InvalidValue("weight", weight, f"one of {', '.join(WEIGHTS)}, or a function of a micro-batch")


def _labels(batch: Any, weight: str) -> Tensor:
    found = [tensor for path, tensor in tensors(batch) if path and path[-1] == "labels"]
    if len(found) == 1 and found[0].ndim:
        return found[0]
    there = "no tensor" if not found else "more than one tensor" if len(found) > 1 else "a single number"
    raise NotSplittable(
        f"weight={weight!r} counts the labels that are not {IGNORED}, and {there} in it is called labels",
        "Pass weight= a function that returns the number of tokens that the loss of a micro-batch is a mean over.",
    )
