"""Packed sequences without their lengths: all are taken to be as long as the longest one can be.

Source: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/PackedSequence.cpp (read in a copy of
2024), for sequences of one length.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.library import Library

from batchfinder.tracing import values
from batchfinder.tracing.kernels import aten

_known: dict[int, tuple[weakref.ref[Any], int]] = {}


@functools.cache
def register() -> tuple[Library, ...]:
    """Let the pretend GPU pack sequences and unpack them. Once per process.

    Returns:
        The libraries that hold the registrations; they last as long as these do.
    """
    values.LARGEST_OUTPUT[aten._pack_padded_sequence.default] = _pack
    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    for library in libraries:
        library.impl("_pack_padded_sequence_backward", _pack_backward)
        library.impl("_pad_packed_sequence", _unpack)
    return libraries


def known_element(tensor: torch.Tensor) -> int | None:
    """What each element is of a list of lengths, or of samples per step, that was made here; None for other tensors."""
    known = _known.get(tensor.untyped_storage()._cdata)
    return None if known is None or known[0]() is None else known[1]


def _counts(number: int, each: int) -> torch.Tensor:
    """That many equal numbers on the CPU, where such lists belong. The code reads them, so they are remembered."""
    counts = torch.empty(number, dtype=torch.int64, device="cpu")
    storage = counts.untyped_storage()
    _known[storage._cdata] = (weakref.ref(storage), each)
    return counts


def _pack(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """All steps of the first sample of each, then the second: a copy, made of another one if batches come first."""
    by_step = (padded.transpose(0, 1) if batch_first else padded).contiguous()
    return torch.cat([by_step.flatten(0, 1)]), _counts(by_step.size(0), by_step.size(1))


def _pack_backward(
    grad: torch.Tensor, input_size: list[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    size = list(input_size)
    if batch_first:
        size[:2] = size[1], size[0]
    padded = torch.zeros(size, dtype=grad.dtype, device=grad.device)
    padded.copy_(grad.view(size))
    return padded.transpose(0, 1) if batch_first else padded


def _unpack(
    packed: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = batch_sizes.size(0)
    batch, rest = packed.size(0) // steps, packed.shape[1:]
    length = max(steps, total_length)
    padded = torch.full((length, batch, *rest), padding_value, dtype=packed.dtype, device=packed.device)
    padded.narrow(0, 0, steps).narrow(1, 0, batch).copy_(packed.view(steps, batch, *rest))
    return (padded.transpose(0, 1) if batch_first else padded), _counts(batch, steps)
