"""cuDNN's recurrent kernels: what they return, keep for the backward and take while they run.

PyTorch's fake kernel of the forward returns an empty reserve space, and the backward has none at all; here are both.

Source: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cudnn/RNN.cpp (read in a copy of 2025).
How large the reserve space and the workspace are is for cuDNN to say, at run time, and is not documented. They are
modelled here on sizes that were printed by users of PyTorch in 2017, with cuDNN 6 and 7 in fp32:

    GRU, 4 layers of 320, 123 features       reserve 864,000,000, workspace 13,169,920
    LSTM, the same                           reserve 736,000,000, workspace 17,730,560
                                             https://github.com/pytorch/pytorch/issues/2895
    GRU, both directions, 800, 672 features,
    64 samples of 326 steps                  reserve 801,177,600, workspace 313,344,000
                                             https://github.com/SeanNaren/deepspeech.pytorch/issues/172
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers, `cudnnRNNMode_t`."""

_KEPT = {MODES["rnn_relu"]: 1, MODES["rnn_tanh"]: 1, MODES["lstm"]: 5, MODES["gru"]: 6}
"""How many times the hidden state's size is kept per step of one layer and direction."""


def reserve_bytes(mode: int, hidden: int, layers: int, directions: int, samples: int, element_size: int) -> int:
    """What the forward keeps for the backward.

    For each sample, step and direction a layer keeps 6 times the hidden state's size in a GRU and 5 times in an LSTM,
    and what goes from one layer to the next is kept once. This gives all three printed sizes exactly; the first two are
    of 25,000 samples, a number that was not printed with them. For plain RNNs, 1 is assumed. Later versions of cuDNN,
    half types and dropout between layers were not compared.

    Args:
        mode: a number of `MODES`.
        hidden: size of the hidden state.
        layers: how many.
        directions: 1 or 2.
        samples: samples times steps.
        element_size: bytes per number.
    """
    return element_size * samples * directions * hidden * (layers * _KEPT[mode] + layers - 1)


def workspace_bytes(weights: int, output: int, directions: int) -> int:
    """What a kernel takes while it runs: as much as the weights, and for two directions twice the output as well.

    The printed sizes are larger than this, by 4, 6 and 18 MB: some more for each sample, which did not show from what.

    Args:
        weights: bytes of all weights.
        output: bytes of the last layer's output.
        directions: 1 or 2.
    """
    return weights + (2 * output if directions == 2 else 0)


def rnn(
    data: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten::_cudnn_rnn`: output, last hidden state, last cell state, reserve space, all weights in one block.

    Args:
        data: (length, batch, features), (batch, length, features), or (samples, features) of packed sequences.
        weight: by layer and direction.
        weight_stride0: weights per layer and direction.
        weight_buf: the block that all weights are parts of; None where they lie apart, and are copied into one.
        hx: (layers x directions, batch, output's size).
        cx: (layers x directions, batch, hidden size) for an LSTM.
        mode: a number of `MODES`.
        hidden_size: of one direction.
        proj_size: the output's size if it is projected, else 0.
        num_layers: how many.
        batch_first: which of the first two forms the data have.
        dropout: probability, between layers.
        train: whether a reserve space is needed.
        bidirectional: whether there are two directions.
        batch_sizes: samples at each step, of packed sequences; else empty.
        dropout_state: the random state on the device.
    """
    directions = 2 if bidirectional else 1
    width = directions * (proj_size or hidden_size)
    if batch_first and not batch_sizes:
        output = data.new_empty(data.size(1), data.size(0), width).transpose(0, 1)
    else:
        output = data.new_empty(*data.shape[:-1], width)
    hy = hx.new_empty(hx.shape)
    cy = hx.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    samples = data.numel() // data.size(-1)
    size = reserve_bytes(mode, hidden_size, num_layers, directions, samples, data.element_size()) if train else 0
    reserve = data.new_empty(size, dtype=torch.uint8)
    if weight_buf is None:
        weight_buf = data.new_empty(sum(each.numel() for each in weight))
    return output, hy, cy, reserve, weight_buf


def rnn_backward(
    data: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """`aten::_cudnn_rnn_backward`: gradients of data, states and weights; the last are parts of one block.

    Args:
        data: as for `rnn`.
        weight: as for `rnn`.
        weight_stride0: as for `rnn`.
        weight_buf: as for `rnn`, never None.
        hx: as for `rnn`.
        cx: as for `rnn`.
        rest: the other arguments, the last of which says which gradients are wanted. Those of the data and the states
            are made all the same.
    """
    wanted: Sequence[bool] = rest[-1]
    grad_data = torch.empty_like(data, memory_format=torch.contiguous_format)
    grad_hx = hx.new_empty(hx.shape)
    grad_cx = None if cx is None else cx.new_empty(cx.shape)
    grad_weight: list[torch.Tensor] = []
    if wanted[3]:
        block = weight_buf.new_zeros(weight_buf.numel())
        start = 0
        for each in weight:
            grad_weight.append(block.narrow(0, start, each.numel()).view(each.shape))
            start += each.numel()
    return grad_data, grad_hx, grad_cx, grad_weight


def forward_scratch(data: torch.Tensor, weight: Sequence[torch.Tensor], *rest: Any) -> list[int]:
    """The data in the order of steps, if they are not, and the workspace."""
    hidden, proj, _layers, batch_first, _dropout, _train, bidirectional, batch_sizes = rest[5:13]
    directions = 2 if bidirectional else 1
    output = data.numel() // data.size(-1) * directions * (proj or hidden) * data.element_size()
    weights = sum(each.numel() for each in weight) * data.element_size()
    return [*_copies((data,), batch_first and not batch_sizes), workspace_bytes(weights, output, directions)]


def backward_scratch(data: torch.Tensor, weight: Sequence[torch.Tensor], *rest: Any) -> list[int]:
    """Zeros for the gradients that nobody has, copies in the order of steps, and the workspace.

    There are two kernels, one after the other, each with a copy of the data and a workspace; the second one counts, as
    the weights' gradients are there by then.
    """
    _stride, weight_buf, hx, cx, output, grad_output, grad_hy, grad_cy = rest[:8]
    batch_first, batch_sizes = rest[12], rest[16]
    bidirectional = rest[15]
    missing = [(output, grad_output), (hx, grad_hy), (cx, grad_cy)]
    zeros = [_bytes(like) for like, grad in missing if grad is None and like is not None]
    copies = _copies((data,), batch_first and not batch_sizes)
    return [*zeros, *copies, workspace_bytes(_bytes(weight_buf), _bytes(output), 2 if bidirectional else 1)]


def _copies(tensors: Sequence[torch.Tensor], transposed: bool) -> list[int]:
    """Bytes of those that are not contiguous, after their first two dimensions were exchanged if they are."""
    return [
        _bytes(tensor) for tensor in tensors if not (tensor.transpose(0, 1) if transposed else tensor).is_contiguous()
    ]


def _bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
