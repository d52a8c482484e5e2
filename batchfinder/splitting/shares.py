"""A batch in micro-batches and what each one's loss counts, for a loop of one's own."""

from __future__ import annotations

from typing import Any

from batchfinder.splitting.length import trim
from batchfinder.splitting.samples import samples_in
from batchfinder.splitting.split import equal_sizes, split
from batchfinder.splitting.weights import Weight, weigh


def split_batch(batch: Any, largest: int, weight: Weight = "samples") -> list[tuple[Any, float]]:
    """Take a batch apart into the fewest micro-batches that fit, so that their gradients make the batch's.

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
        InvalidValue: `largest` is below 1, or the weight cannot be meant.
        NotSplittable: the batch cannot be taken apart, or the weight cannot be had from it.

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
