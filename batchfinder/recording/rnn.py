"""Recurrent layers and cells as a GPU runs them: `nn.GRU`, `nn.LSTM` and `nn.RNN` through cuDNN's operators.

PyTorch's fake kernel of cuDNN's forward returns an empty reserve space, and its backward has none at all; here are
both, with what they keep for the backward and take while they run.

Sources: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/RNN.cpp for which kernel runs, and
`_cudnn_impl` in https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cudnn/RNN.cpp for how it is called
(read in copies of 2025). It is assumed that cuDNN takes every type and size, and was not turned off by the user.

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

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.library import Library

from batchfinder.recording import kernel_memory
from batchfinder.recording.fake_device import DEVICE_TYPE
from batchfinder.recording.kernel_memory import aten

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers, `cudnnRNNMode_t`."""

_KEPT = {MODES["rnn_relu"]: 1, MODES["rnn_tanh"]: 1, MODES["lstm"]: 5, MODES["gru"]: 6}
"""How many times the hidden state's size is kept per step of one layer and direction."""

_GRU_CELL_KEEPS = 5  # GRU_WORKSPACE_MULTIPLIER in aten/src/ATen/native/cuda/RNN.cu


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

    Both are in bytes. The printed sizes are larger, by 4, 6 and 18 MB: some more for each sample, which did not show
    from what.
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
        weight: by layer and direction, `weight_stride0` to each.
        weight_buf: the block that all weights are parts of; None where they lie apart, and are copied into one.
        hx: (layers x directions, batch, output's size).
        cx: (layers x directions, batch, hidden size) for an LSTM.
        mode: a number of `MODES`.
        proj_size: the output's size if it is projected, else 0.
        train: whether a reserve space is needed.
        batch_sizes: samples at each step, of packed sequences; else empty.
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

    The arguments up to `cx` are those of `rnn`; the last of the rest says which gradients are wanted. Those of the data
    and the states are made all the same.
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
    in_order = (data.transpose(0, 1) if batch_first and not batch_sizes else data).is_contiguous()
    return [*([] if in_order else [data.nbytes]), workspace_bytes(weights, output, directions)]


def backward_scratch(data: torch.Tensor, weight: Sequence[torch.Tensor], *rest: Any) -> list[int]:
    """Zeros in place of missing gradients, copies in the order of steps, and the workspace.

    There are two kernels, one after the other, each with a copy of the data and a workspace; the second one counts, as
    the weights' gradients are there by then.
    """
    _stride, weight_buf, hx, cx, output, grad_output, grad_hy, grad_cy = rest[:8]
    batch_first, batch_sizes = rest[12], rest[16]
    bidirectional = rest[15]
    missing = [(output, grad_output), (hx, grad_hy), (cx, grad_cy)]
    zeros = [like.nbytes for like, grad in missing if grad is None and like is not None]
    in_order = (data.transpose(0, 1) if batch_first and not batch_sizes else data).is_contiguous()
    copies = [] if in_order else [data.nbytes]
    return [*zeros, *copies, workspace_bytes(weight_buf.nbytes, output.nbytes, 2 if bidirectional else 1)]


def flatten_weights(module: nn.Module) -> None:
    """What `nn.RNNBase` does at the end of `.to("cuda")`: all its weights become parts of one new block.

    Weights of several types, and a weight that is there twice, leave them apart. Source: `flatten_parameters` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/rnn.py.
    """
    if not isinstance(module, nn.RNNBase):
        return
    weights: list[nn.Parameter] = [getattr(module, name) for name in module._flat_weights_names]
    module._flat_weights = weights  # type: ignore[assignment]
    if len({weight.dtype for weight in weights}) > 1 or len({id(weight) for weight in weights}) < len(weights):
        return
    block = torch.zeros(sum(weight.numel() for weight in weights), dtype=weights[0].dtype, device=weights[0].device)
    start = 0
    for weight in weights:
        weight.data = block.narrow(0, start, weight.numel()).view(weight.shape)
        start += weight.numel()


def _run_cudnn(mode: int, packed: bool, data: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """`gru.input` and the like, or for packed sequences `gru.data`; an LSTM's state is a pair.

    Packed sequences are all taken to be of full length.
    """
    batch_sizes: list[int] = []
    batch_first = False
    if packed:
        counts, state, params, has_biases, num_layers, dropout, train, bidirectional = rest
        steps = counts.size(0)
        batch_sizes = [data.size(0) // steps] * steps
    else:
        state, params, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    hx, cx = state if mode == MODES["lstm"] else (state, None)
    hidden, proj = hx.size(2), 0
    if cx is not None and cx.size(2) != hidden:
        hidden, proj = cx.size(2), hidden
    weights: tuple[torch.Tensor, ...] = tuple(params)
    if torch.is_autocast_enabled(DEVICE_TYPE):
        # `_cudnn_rnn_cast_reflatten`: not the weights one by one, but all into one block of half precision.
        dtype = torch.get_autocast_dtype(DEVICE_TYPE)
        data, hx = data.to(dtype), hx.to(dtype)
        cx = None if cx is None else cx.to(dtype)
        if weights[0].dtype is not dtype:
            weights = _HalfWeights.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    # The block that all weights are parts of; None where they lie apart (`try_get_weight_buf`).
    block = None
    if len({weight.untyped_storage()._cdata for weight in weights}) == 1:
        block = weights[0].detach().as_strided((sum(weight.numel() for weight in weights),), (1,), 0)
    output, hy, cy, _reserve, _weights = aten._cudnn_rnn(
        data,
        weights,
        (4 if has_biases else 2) + (proj != 0),
        block,
        hx,
        cx,
        mode,
        hidden,
        proj,
        num_layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )
    return (output, hy) if cx is None else (output, hy, cy)


class _HalfWeights(torch.autograd.Function):
    """Weights as parts of one block of another type."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtype = weights[0].dtype
        block = torch.zeros(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)
        parts, start = [], 0
        for weight in weights:
            parts.append(block.narrow(0, start, weight.numel()).view(weight.shape))
            start += weight.numel()
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(grad.to(ctx.dtype) for grad in grads))


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`aten::_thnn_fused_gru_cell`: the next state, and what its backward reads."""
    return torch.empty_like(hx), hx.new_empty(hx.size(0), _GRU_CELL_KEEPS * hx.size(1))


def _gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`aten::_thnn_fused_gru_cell_backward`: gradients of both gates, of the state and of both biases."""
    gates = (grad_hy.size(0), 3 * grad_hy.size(1))
    for_input, for_hidden = workspace.new_empty(gates), workspace.new_empty(gates)
    grad_hx = torch.empty_like(grad_hy)
    if not has_bias:
        return for_input, for_hidden, grad_hx, None, None
    return for_input, for_hidden, grad_hx, for_input.sum(0), for_hidden.sum(0)


@functools.cache
def register() -> tuple[Library, ...]:
    """Send the fake GPU's recurrent layers to cuDNN's operators, for as long as the libraries returned are held."""
    kernel_memory.REPLACED.update(
        {
            aten._cudnn_rnn.default: rnn,
            aten._cudnn_rnn_backward.default: rnn_backward,
            aten._thnn_fused_gru_cell.default: _gru_cell,
            aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
        }
    )
    kernel_memory.SCRATCH[aten._cudnn_rnn.default] = forward_scratch
    kernel_memory.SCRATCH[aten._cudnn_rnn_backward.default] = backward_scratch
    # Inference mode skips the autograd key, so the backend's own key needs the routing too.
    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    for library in libraries:
        for name, mode in MODES.items():
            library.impl(f"{name}.input", functools.partial(_run_cudnn, mode, False))
            library.impl(f"{name}.data", functools.partial(_run_cudnn, mode, True))
    return libraries
