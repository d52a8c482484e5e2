"""The samples of a batch by their own lengths, so that each micro-batch is as short as its samples allow."""

from __future__ import annotations

from typing import Any

import torch

from batchfinder.splitting.length import MASK
from batchfinder.splitting.tree import tensors


def sample_lengths(batch: Any) -> list[int] | None:
    """How many tokens each sample needs, its own padding left out.

    They are read from the one attention mask of shape (samples, length) that the batch has. Where sequences are padded
    on the right a sample needs all up to its last token, where they are padded on the left all from its first.

    Args:
        batch: a batch as the loader made it, on any device.

    Returns:
        Tokens of each sample, at least 1; None where there is no such mask, or padding on both sides.
    """
    masks = [tensor for path, tensor in tensors(batch) if path and path[-1] == MASK and tensor.ndim == 2]
    if len(masks) != 1 or not masks[0].numel():
        return None
    here = masks[0].ne(0)
    length = here.size(1)
    places = torch.arange(length, device=here.device)
    last = torch.where(here, places, 0).amax(1) + 1
    first = torch.where(here, places, length).amin(1) % length  # a sample without tokens has no side
    on_the_left, on_the_right = (first > 0).any(), (last < length).any()
    told = torch.stack([last, length - first]).tolist()  # one wait for the device instead of several
    if bool(on_the_left) and bool(on_the_right):
        return None
    return [max(1, tokens) for tokens in told[1 if bool(on_the_left) else 0]]
