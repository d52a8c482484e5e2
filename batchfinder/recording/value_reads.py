"""What code gets that reads a value on a card that computes nothing: one policy, for both recorders.

A value that is known is right. Another one gets a fixed, plausible answer, which is counted and told.
"""

from __future__ import annotations

import dis
import itertools
import os
import sys
from types import FrameType
from typing import Any

import torch

from batchfinder.cuda_stub.launch import VALUES_VARIABLE

WHOLE_NUMBERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
"""Types of ids, masks, lengths and counters."""

CHOICES_ASSUMED = "what is largest (experts, classes): each is chosen equally often"

_OF_ANY_SIZE = os.environ.get(VALUES_VARIABLE) == "all"
ANY_BYTES = sys.maxsize if _OF_ANY_SIZE else 256 << 10
"""Floating-point tensors up to this size are computed by every operator."""
FROM_HOST_BYTES = sys.maxsize if _OF_ANY_SIZE else 1 << 20
"""Floating-point tensors up to this size are copied from the host; larger ones are weights and images."""
SIMPLE_BYTES = sys.maxsize if _OF_ANY_SIZE else 16 << 20
"""Floating-point tensors up to this size are computed by operators that read each number once, as masks are made."""
WHOLE_NUMBER_BYTES = sys.maxsize if _OF_ANY_SIZE else 64 << 20
"""Whole numbers and masks up to this size are computed."""

# Operators that read each number once, or as often as they write one, besides those that PyTorch calls pointwise.
_READ_ONCE = frozenset(
    {
        "copy",
        "_to_copy",
        "clone",
        "fill",
        "zero",
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
        "where",
        "masked_fill",
        "masked_scatter",
        "sum",
        "any",
        "all",
        "amax",
        "amin",
        "max",
        "min",
        "mean",
        "prod",
        "cumsum",
        "flip",
        "roll",
        "repeat",
        "expand",
        "tril",
        "triu",
        "arange",
        "linspace",
        "full",
        "ones",
        "zeros",
        "scatter",
        "index_put",
        "constant_pad_nd",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "embedding",
        "one_hot",
        "lift_fresh_copy",
        "_unsafe_view",
        "slice_scatter",
        "select_scatter",
    }
)


def most_bytes(op: Any, dtype: torch.dtype) -> int:
    """How large what an operator reads and makes may be for its values to be computed."""
    if dtype in WHOLE_NUMBERS or op.is_view:
        return WHOLE_NUMBER_BYTES
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    return SIMPLE_BYTES if torch.Tag.pointwise in op.tags or name in _READ_ONCE else ANY_BYTES


_FAILS = "LOAD_ASSERTION_ERROR"
# What PyTorch calls that asks a tensor whether all of it is so.
_ALL = ("aten.all", "aten._is_all_true")


def plausible_scalar(tensor: torch.Tensor, made_by: str, filled_with: float | None) -> bool | int | float:
    """What a tensor of one element may be taken to hold.

    The constant it was filled with; else True where `all` made it, False for `any` and other tests (nothing is masked,
    nothing is infinite), 1 for numbers.
    """
    if filled_with is not None:
        value: float = filled_with
    elif tensor.dtype is torch.bool:
        value = made_by.startswith(_ALL)
    else:
        value = 1.0
    if tensor.dtype is torch.bool:
        return bool(value)
    return float(value) if tensor.dtype.is_floating_point else int(value)


def is_asserted() -> bool:
    """Whether the value that is being read decides an `assert` of the code that called PyTorch.

    The frame stands at the jump that the value decides: over the AssertionError where it is true, or to it where not.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "batchfinder.")):
        frame = frame.f_back
    if frame is None:
        return False
    following = (each for each in dis.get_instructions(frame.f_code) if each.offset >= frame.f_lasti)
    for jump in itertools.islice(following, 2):  # Python 3.13 makes a bool of the value first
        if "JUMP" in jump.opname and "IF_FALSE" in jump.opname:
            target = next(each for each in dis.get_instructions(frame.f_code) if each.offset == jump.argval)
            return target.opname == _FAILS
        if "JUMP" in jump.opname and "IF_TRUE" in jump.opname:
            return any(each.opname == _FAILS for each in itertools.islice(following, 2))
    return False


def equally_often(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """Indices that go through all there is to choose from, one after the other.

    Args:
        chosen: what they are for, of any shape.
        number: of what there is to choose from.
    """
    return (torch.arange(chosen.numel(), device="cpu", dtype=chosen.dtype) % max(1, number)).reshape(chosen.shape)
