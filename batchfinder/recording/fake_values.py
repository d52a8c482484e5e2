"""Answers for code that reads values of fake tensors: scalars, data-dependent shapes, lengths of packed sequences.

`.item()`, `bool(tensor)` and operators whose output's shape depends on values must not end a recording. Each gets one
fixed, plausible answer, and the recording says that it did so. Packed sequences are taken to be of full length, as in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/PackedSequence.cpp (read in a copy of 2024).
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.library import Library

from batchfinder.recording.kernel_memory import aten


def plausible_scalar(tensor: torch.Tensor, made_by: str, filled_with: float | None) -> bool | int | float:
    """What a tensor of one element may be taken to hold.

    The constant it was filled with; else True where `all` made it, False for `any` and other tests (nothing is masked,
    nothing is infinite), 1 for numbers.
    """
    if filled_with is not None:
        value: float = filled_with
    elif tensor.dtype is torch.bool:
        value = made_by.startswith("aten.all")
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


_FAILS = "LOAD_ASSERTION_ERROR"
_COPIES = frozenset({aten._to_copy.default, aten.clone.default})
_COMPARISONS: dict[Any, Callable[[float, float], bool]] = {
    aten.eq.Scalar: operator.eq,
    aten.ne.Scalar: operator.ne,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
}
# What becomes of the gradient of a loss that is scaled, or divided by a number of micro-batches.
_ARITHMETIC: dict[Any, Callable[[float, float], float]] = {
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
}
# Where the value that fills a new tensor stands among the arguments.
_FILLED = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2, "aten::scalar_tensor": 0}


def constant_of(func: Any, args: tuple[Any, ...], known: Callable[[torch.Tensor], float | None]) -> float | None:
    """The value that every element of an operator's new tensor is taken to have; None for an unknown one.

    The constant that a tensor is filled with, also if it is a copy (`known` tells that of an argument); the number of
    elements for the sum of a mask (nothing is masked: `mask.sum() == mask.numel()` is how transformers asks for
    `mask.all()`); what a comparison or a product of such numbers comes to.
    """
    if func in _COPIES:
        return known(args[0])
    if func is aten.sum.default and args[0].dtype is torch.bool:
        each = known(args[0])
        return float(args[0].numel()) * (1.0 if each is None else each)
    if func in _ARITHMETIC and isinstance(args[1], torch.Tensor):
        factors = known(args[0]), known(args[1])
        return None if factors[0] is None or not factors[1] else _ARITHMETIC[func](factors[0], factors[1])
    if func in _COMPARISONS:
        compared = known(args[0])
        return None if compared is None else float(_COMPARISONS[func](compared, args[1]))
    name = func._schema.name
    if name in ("aten::zeros", "aten::zeros_like", "aten::new_zeros"):
        return 0.0
    if name in ("aten::ones", "aten::ones_like", "aten::new_ones"):
        return 1.0
    if name in _FILLED:
        value = args[_FILLED[name]] if len(args) > _FILLED[name] else None
        return float(value) if isinstance(value, (bool, int, float)) else None
    return None


def are_equal(first: torch.Tensor, second: torch.Tensor, known: Callable[[torch.Tensor], float | None]) -> bool | None:
    """What `torch.equal` is known to say of two tensors: of one, of two shapes, of two constants; None for others."""
    if first.shape != second.shape or first is second:
        return first.shape == second.shape
    values = known(first), known(second)
    return None if None in values else values[0] == values[1]


_equal_lists: dict[int, tuple[weakref.ref[Any], int]] = {}


def known_element(tensor: torch.Tensor) -> int | None:
    """What each element of a list of lengths, or of samples per step, is that was made here; None for others."""
    known = _equal_lists.get(tensor.untyped_storage()._cdata)
    return None if known is None or known[0]() is None else known[1]


def _counts(number: int, each: int) -> torch.Tensor:
    """That many equal numbers on the CPU, where PyTorch keeps such lists; remembered, since its code reads them."""
    counts = torch.empty(number, dtype=torch.int64, device="cpu")
    storage = counts.untyped_storage()
    _equal_lists[storage._cdata] = (weakref.ref(storage), each)
    return counts


_MASKS = (torch.bool, torch.uint8)
_DATA_DEPENDENT = frozenset(
    {
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.bincount.default,
        aten.index.Tensor,
        aten._pack_padded_sequence.default,
    }
)


def largest_output(func: Any, args: tuple[Any, ...]) -> Any:
    """What an operator gives whose output's shape depends on values; None where the shape is known.

    It is as large as it can get: every element is selected, every element is different, every sequence is of full
    length.
    """
    if func not in _DATA_DEPENDENT:
        return None
    tensor = args[0]
    new = functools.partial(torch.empty, device=tensor.device)
    elements = tensor.numel()
    if func is aten.index.Tensor:
        # `tensor[mask]`: a mask stands for one index per dimension, of as many rows as it has elements.
        rows: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in _MASKS:
                rows.append(index)
            else:
                each = functools.partial(torch.empty, index.numel(), dtype=torch.int64, device=index.device)
                rows += [each() for _ in range(index.dim())]
        return None if len(rows) == len(args[1]) and all(map(operator.is_, rows, args[1])) else func(tensor, rows)
    if func is aten.nonzero.default:
        return new((elements, tensor.dim()), dtype=torch.int64)
    if func is aten.masked_select.default:
        return new(torch.broadcast_shapes(tensor.shape, args[1].shape).numel(), dtype=tensor.dtype)
    if func is aten._unique2.default:
        index = new(elements, dtype=torch.int64)
        return new(elements, dtype=tensor.dtype), index, torch.empty_like(index)
    if func is aten.bincount.default:
        weights = args[1] if len(args) > 1 else None
        least = args[2] if len(args) > 2 else 0
        return new(max(least, elements), dtype=torch.int64 if weights is None else weights.dtype)
    # Packed: all steps of the first sample of each, then the second; a copy, of another one if batches come first.
    by_step = (tensor.transpose(0, 1) if args[2] else tensor).contiguous()
    return torch.cat([by_step.flatten(0, 1)]), _counts(by_step.size(0), by_step.size(1))


@functools.cache
def register() -> tuple[Library, ...]:
    """Let the fake GPU unpack sequences and run the backward of packing them, while the libraries returned are held."""

    def pack_backward(
        grad: torch.Tensor, input_size: list[int], batch_sizes: torch.Tensor, batch_first: bool
    ) -> torch.Tensor:
        size = list(input_size)
        if batch_first:
            size[:2] = size[1], size[0]
        padded = torch.zeros(size, dtype=grad.dtype, device=grad.device)
        padded.copy_(grad.view(size))
        return padded.transpose(0, 1) if batch_first else padded

    def unpack(
        packed: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = batch_sizes.size(0)
        batch, rest = packed.size(0) // steps, packed.shape[1:]
        length = max(steps, total_length)
        padded = torch.full((length, batch, *rest), padding_value, dtype=packed.dtype, device=packed.device)
        padded.narrow(0, 0, steps).narrow(1, 0, batch).copy_(packed.view(steps, batch, *rest))
        return (padded.transpose(0, 1) if batch_first else padded), _counts(batch, steps)

    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    for library in libraries:
        library.impl("_pack_padded_sequence_backward", pack_backward)
        library.impl("_pad_packed_sequence", unpack)
    return libraries
