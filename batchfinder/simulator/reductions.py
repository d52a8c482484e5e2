"""The global scratch of CUDA's reductions, whose size depends on how many multiprocessors a card has.

Where few outputs are made of many inputs, as a bias's gradient is of every token's, the inputs of one output are
divided among several blocks of threads. These leave their partial results in a buffer, and are counted by semaphores.

Source: `gpu_reduce_kernel` and `setReduceConfig` in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, prod
from operator import mul
from typing import Any, NamedTuple

from batchfinder.devices import Multiprocessors

_Sizes = tuple[int, ...]

_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_INT_MAX = 2**31 - 1
_SEMAPHORE_BYTES = 4


class Scratch(NamedTuple):
    """Bytes that one reduction allocates, in this order; 0 for what it does without."""

    sums: int
    buffer: int
    semaphores: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction as its kernel sees it: dimensions of size one are gone, and those that lie one after another merged.

    Attributes:
        shape: of the input; dimensions that are reduced come first, and among these and the others the fastest.
        strides: of the input, in elements.
        reduced: how many of the dimensions are reduced.
        offset: of the input in its storage, in elements.
        element_bytes: of an input.
        partial_bytes: of a partial result.
        vector: inputs that a thread reads at once where these lie side by side.
        separate_sums: whether an input of more than 2 GiB, which is reduced in parts, has sums of its own for that.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    reduced: int
    offset: int
    element_bytes: int
    partial_bytes: int
    vector: int = 4
    separate_sums: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], dims: Iterable[int], **how: Any) -> Reduction:
        """The reduction of a tensor along some dimensions, as `TensorIterator::reduce_op` lays it out.

        Args:
            shape, strides: of the tensor, the last dimension last.
            dims: those that are reduced; all of them where it is empty.
            how: the other attributes.

        Source: `reorder_dimensions` and `coalesce_dimensions` in
        https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/TensorIterator.cpp. Dimensions that are not
        reduced are ordered by the output, which is contiguous; the others by the tensor's strides.
        """
        count = len(shape)
        reduced = {dim % count for dim in dims} or set(range(count))
        kept = [dim for dim in range(count - 1, -1, -1) if dim not in reduced]
        steps = list(accumulate((shape[dim] for dim in kept), mul, initial=1))
        output = {**dict.fromkeys(reduced, 0), **dict(zip(kept, steps, strict=False))}
        order = [dim for dim in range(count - 1, -1, -1) if dim in reduced]
        for end in range(1, len(order)):
            at = end
            for before in range(end - 1, -1, -1):
                swap = _order(*((strides[dim], shape[dim]) for dim in (order[before], order[at])))
                if swap > 0:
                    order[before], order[at], at = order[at], order[before], before
                elif swap < 0:
                    break
        merged: list[tuple[int, int, int]] = []  # size, and the strides of the output and of the input
        for dim in [*order, *kept]:
            size, there, here = shape[dim], output[dim], strides[dim]
            before_size, before_there, before_here = merged[-1] if merged else (0, 0, 0)
            if merged and before_size == 1:
                merged[-1] = (size, there, here)
            elif merged and (size == 1 or (before_size * before_there, before_size * before_here) == (there, here)):
                merged[-1] = (before_size * size, before_there, before_here)
            else:
                merged.append((size, there, here))
        return cls(
            tuple(size for size, _, _ in merged),
            tuple(here for _, _, here in merged),
            sum(there == 0 for _, there, _ in merged),
            **how,
        )

    def scratch(self, card: Multiprocessors) -> Scratch:
        """What it takes on a card; nothing where that has no multiprocessors."""
        if not card.number or 0 in self.shape:
            return Scratch(0, 0, 0)
        parts = list(self._in_32_bits(self.shape, self.strides))
        sums = self.partial_bytes * prod(self.shape[self.reduced :]) if self.separate_sums and len(parts) > 1 else 0
        return Scratch(sums, *max(self._of_part(*part, card) for part in parts))

    def _in_32_bits(self, shape: _Sizes, strides: _Sizes) -> Iterator[tuple[_Sizes, _Sizes]]:
        """The parts, halves of halves, in which the kernel can number inputs and outputs by 32 bits."""
        output = self._output_strides(shape)
        reach = [
            sum((size - 1) * stride for size, stride in zip(shape, each, strict=True)) for each in (strides, output)
        ]
        if prod(shape) <= _INT_MAX and all(1 + self.element_bytes * far <= _INT_MAX for far in reach):
            yield shape, strides
            return
        extents = [
            (max((size - 1) * stride for stride in both), dim)
            for dim, (size, both) in enumerate(zip(shape, zip(strides, output, strict=True), strict=True))
        ]
        _, longest = max(extents)
        half = shape[longest] // 2
        for size in (half, shape[longest] - half):
            yield from self._in_32_bits((*shape[:longest], size, *shape[longest + 1 :]), strides)

    def _output_strides(self, shape: _Sizes) -> _Sizes:
        """Of a contiguous output, whose dimensions lie as the input's do; 0 for those that are reduced."""
        steps = accumulate(shape[self.reduced : -1], mul, initial=1) if self.reduced < len(shape) else ()
        return (*(0 for _ in shape[: self.reduced]), *steps)

    def _of_part(self, shape: _Sizes, strides: _Sizes, card: Multiprocessors) -> tuple[int, int]:
        """Bytes of the buffer and of the semaphores of one launch: `setReduceConfig` and `global_memory_size`."""
        reduced = self.reduced
        outputs, inputs = prod(shape[reduced:]), prod(shape[:reduced])
        along_inputs = reduced == len(shape) or strides[0] < strides[reduced]
        width, height = (inputs, outputs) if along_inputs else (outputs, inputs)
        output_vector = 1
        if shape and strides[0 if along_inputs else reduced] == 1:
            if not along_inputs:
                output_vector = self._output_vector(shape, strides)
                width //= output_vector
            elif reduced == 1 and width >= 128:
                width //= self.vector
        block_width, block_height = _block(width, height, _MAX_THREADS // output_vector)
        step_inputs, step_outputs = (block_width, 1) if along_inputs else (1, block_width)
        if _over(inputs, step_inputs) < min(16 * block_height, _MAX_VALUES_PER_THREAD):
            return 0, 0
        step_inputs *= block_height
        values = _over(inputs, step_inputs)
        grid = _over(outputs // output_vector, step_outputs)
        full_grid = card.number * (card.threads // (block_width * block_height))
        if values < _MAX_VALUES_PER_THREAD or grid > full_grid:
            return 0, 0
        blocks = min(_over(full_grid, grid), _over(values, _MIN_VALUES_PER_THREAD))
        blocks = max(blocks, _over(values, _MAX_VALUES_PER_THREAD))
        if blocks == 1:
            return 0, 0
        of_output = self.partial_bytes * (1 if along_inputs else block_width * output_vector)
        return of_output * outputs * blocks, _SEMAPHORE_BYTES * grid

    def _output_vector(self, shape: _Sizes, strides: _Sizes) -> int:
        """Outputs of a thread, whose inputs lie side by side: `get_output_vec_size`."""
        others = (*strides[: self.reduced], *strides[self.reduced + 1 :])
        return gcd(4, self.offset, shape[self.reduced], *others)


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """`ReduceConfig::set_block_dimension`."""
    wide, high = (1 << min(size, threads).bit_length() - 1 if size else 1 for size in (width, height))
    block_width = min(wide, _WARP)
    block_height = min(high, threads // block_width)
    return min(wide, threads // block_height), block_height


def _order(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Which of two reduced dimensions comes first, of each the stride and the size: below 0 for the first of both."""
    if 0 in (one[0], other[0]):
        return 0
    return one[0] - other[0] or int(one[1] > other[1])


def _over(a: int, b: int) -> int:
    return -(-a // b)
