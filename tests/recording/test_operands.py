"""Tests of batchfinder/recording/operands.py: what cuBLAS, cuDNN and cuFFT take besides the outputs, by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.recording import kernel_memory, operands
from batchfinder.recording.kernel_memory import aten
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload

Record = Callable[..., Trace]


def blocks_of(trace: Trace, operator: str) -> list[int]:
    """The blocks that an operator allocated."""
    return [i for i, name in enumerate(trace.structure.operators) if name == operator]


class Convolutions(nn.Module):
    """One that is no matrix product, and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.each(self.one(x).relu())


def convolutions(layout: torch.memory_format) -> Workload:
    """Images laid out so; the weights are contiguous."""
    images = torch.zeros(2, 4, 16, 16).contiguous(memory_format=layout)
    return Workload(Convolutions(), lambda *_: (images,), seq_len_unit="none")


class Circulant(nn.Module):
    """A product for each place of a block, as peft's C3A has it: the places are innermost in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2, 8))  # (outputs, inputs, places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.view(*x.shape[:-1], 2, 8)
        product: torch.Tensor = torch.einsum("...nb,mnb->...mb", blocks, self.weight)
        return product


def test_cublas_reads_dense_rows_or_columns() -> None:
    """Others are copied: places innermost, rows that overlap, and what is conjugated and not transposed."""
    batch = torch.empty(4, 6, 8, device="meta")
    numbers = torch.empty(6, 8, dtype=torch.complex64, device="meta")
    read = [
        batch,
        batch.transpose(1, 2),
        batch[:, :, :5],
        batch[:, ::2],
        batch[0].t(),
        numbers.t().conj(),
        torch.empty(4, 6, 1, device="meta"),
        torch.empty(0, 8, device="meta").expand(0, 8),
    ]
    copied = [
        batch.permute(2, 1, 0),
        batch[:, :, ::2],
        torch.empty(4, 1, 8, device="meta").expand(4, 6, 8),
        torch.empty((), device="meta").expand(6, 8),
        numbers.conj(),
    ]
    assert [operands.is_copied_for_cublas(each) for each in read] == [False] * len(read)
    assert [operands.is_copied_for_cublas(each) for each in copied] == [True] * len(copied)


def test_a_product_by_place_copies_both_operands(record: Record) -> None:
    """For 4 x 5 rows of 2 x 8 numbers in fp32: the product of 3 x 8 for each row, then copies of rows and weight."""
    trace = record(lambda: Workload(Circulant(), lambda batch_size, seq_len: (torch.zeros(4, 5, 16),)), 4)
    sizes = [trace.sizes[block] for block in blocks_of(trace, "aten.bmm.default")]
    rows, weight, product = 4 * 4 * 5 * 2 * 8, 4 * 3 * 2 * 8, 4 * 4 * 5 * 3 * 8
    assert sizes[:4] == [product, trace.sizes[trace.structure.kinds.index("workspace")], rows, weight]


def test_fourier_transforms() -> None:
    """Of 6 x 8 numbers in fp32, which are 6 x 8 complex ones or 6 x 5 of one side.

    A work area for several dimensions, a second tensor for a whole matrix, and a copy on the way back.
    """
    x = torch.empty(6, 8, device="meta")
    whole, half = torch.empty(6, 8, dtype=torch.complex64, device="meta"), 240
    batch, batch_half = torch.empty(2, 6, 8, device="meta"), 2 * half
    assert (operands._fft_c2c(whole, [0, 1], 0, True), operands._fft_c2c(whole, [1], 0, True)) == ([384], [])
    assert [operands._fft_r2c(x, [0, 1], 0, onesided) for onesided in (False, True)] == [[384], [half]]
    assert operands._fft_r2c(x, [1], 0, False) == []
    assert operands._fft_r2c(batch, [1, 2], 0, True) == [batch_half]
    assert operands._fft_r2c(batch, [0, 1, 2], 0, True) == [batch_half, batch_half]
    back = torch.empty(2, 6, 5, dtype=torch.complex64, device="meta")
    assert operands._fft_c2r(back, [2], 0, 8) == [batch_half]
    assert operands._fft_c2r(back, [1, 2], 0, 8) == operands._fft_c2r(back, [0, 1, 2], 0, 8) == [batch_half] * 2
    assert operands._fft_c2r(back[0], [0, 1], 0, 8) == [half]


def test_a_block_diagonal_is_one_tensor() -> None:
    """As PyTorch's own, of matrices, a vector and a number of several types."""
    parts = [torch.ones(2, 3), torch.ones(4, dtype=torch.float64), torch.ones(()), torch.ones(1, 2)]
    ours, theirs = kernel_memory.REPLACED[aten.block_diag.default](parts), torch.block_diag(*parts)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize(
    ("layout", "sizes"), [(torch.contiguous_format, [16384, 16384]), (torch.channels_last, [16384, 1152, 16384])]
)
def test_convolutions_stay_channels_last(record: Record, layout: torch.memory_format, sizes: list[int]) -> None:
    """As on CUDA an output is laid out like its input: nothing after it is copied but a weight that lies otherwise."""
    trace = record(partial(convolutions, layout), 2, None, mode="forward")
    assert [trace.sizes[i] for i in blocks_of(trace, "aten.convolution.default")] == sizes
    assert "convolutions of compiled code are taken to be contiguous, not channels last" not in trace.unmodelled


def test_a_convolution_copies_what_lies_otherwise() -> None:
    """The backward reads gradient and input for the weight's gradient, and the weight for the input's."""
    data = torch.empty(2, 4, 8, 8, device="meta").contiguous(memory_format=torch.channels_last)
    grad, weight = torch.empty(2, 8, 8, 8, device="meta"), torch.empty(8, 4, 3, 3, device="meta")
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    copies = operands._backward_copies
    assert copies(grad, data, weight, *rest, [True, True, False]) == [grad.nbytes, weight.nbytes]
    assert copies(grad, data.contiguous(), weight, *rest, [True, True, False]) == []
    assert copies(grad.double(), data.double(), weight.double(), *rest, [False, True, False]) == [data.nbytes * 2]


@pytest.mark.parametrize("transposed", [False, True])
def test_cudnn_pads_channels_for_tensor_cores(transposed: bool) -> None:
    """Of images and of an output with one channel a padded copy, as large as the channels are then, both ways."""
    data, weight = torch.empty(2, 3, 9, 12, device="meta"), torch.empty(3, 1, 3, 2, device="meta")
    weight = weight if transposed else weight.transpose(0, 1).contiguous()
    rest = (None, [2, 3], [1, 0], [1, 2], transposed, [1, 2] if transposed else [0, 0], 1)
    out = aten.convolution.default(data, weight, *rest)
    expected = [4 * 2 * 4 * (9 * 12 + out[0, 0].numel())]
    ada, pascal = operands.convolution_scratch((8, 9)), operands.convolution_scratch((6, 1))
    assert ada[aten.convolution.default](data, weight, *rest) == expected
    assert ada[aten.convolution_backward.default](out, data, weight, *rest, [True, True, False]) == expected
    short = (None, [2], [1], [1], transposed, [0], 1)  # one figure for all dimensions
    long = (None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1)
    assert ada[aten.convolution.default](data, weight, *short) == ada[aten.convolution.default](data, weight, *long)
    half = operands.convolution_scratch((7, 0))[aten.convolution.default]
    assert half(data.half(), weight.half(), *rest) == expected  # two bytes each, and 8 channels
    assert half(data, weight, *rest) == pascal[aten.convolution.default](data, weight, *rest) == []


def test_a_padding_in_words_is_read_as_its_figure(record: Record) -> None:
    """`padding="valid"` reaches the operator as one figure, as in the patches of SigLIP, and takes what 0 takes."""

    def patches(padding: Any) -> Workload:
        images = torch.zeros(2, 3, 16, 16)
        return Workload(nn.Conv2d(3, 8, 4, 4, padding=padding), lambda *_: (images,), seq_len_unit="none")

    in_words, in_figures = (record(partial(patches, padding), 2, None, capability=(8, 0)) for padding in ("valid", 0))
    assert in_words.sizes == in_figures.sizes
    assert [in_words.sizes[i] for i in blocks_of(in_words, "aten.convolution.default")]


def test_cudnn_pads_nothing_of_whole_or_last_channels() -> None:
    """Nor of convolutions that tensor cores do not run: in groups, or in fp64."""
    forward = operands.convolution_scratch((8, 9))[aten.convolution.default]
    images, rest = torch.empty(2, 3, 8, 8, device="meta"), (None, [1, 1], [0, 0], [1, 1], False, [0, 0])
    weight = torch.empty(8, 3, 3, 3, device="meta")
    last = torch.channels_last
    assert forward(torch.empty(2, 4, 8, 8, device="meta"), torch.empty(8, 4, 3, 3, device="meta"), *rest, 1) == []
    assert forward(images.contiguous(memory_format=last), weight.contiguous(memory_format=last), *rest, 1) == []
    assert forward(images, weight[:3, :1].contiguous(), *rest, 3) == []
    assert forward(images.double(), weight.double(), *rest, 1) == []
