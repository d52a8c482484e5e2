"""Initialising weights that have no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode


def is_pretending() -> bool:
    """Whether tensors made now would be fake ones."""
    return active_fake_mode() is not None


@contextmanager
def pretend_initialisation() -> Iterator[None]:
    """Let truncated normal initialisation pass on fake tensors.

    Of the functions in torch.nn.init it alone looks at the values it has drawn (torch 2.13, `_no_grad_trunc_normal_`:
    `if not mask.any()`), which fake tensors cannot answer. Vision transformers use it. Does nothing on real tensors.
    """
    drawn = getattr(nn.init, "_no_grad_trunc_normal_", None)
    if drawn is None or not is_pretending():
        yield
        return

    def skip(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    nn.init._no_grad_trunc_normal_ = skip
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = drawn
