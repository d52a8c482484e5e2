"""Recurrent layers and cells as a GPU runs them: `nn.GRU`, `nn.LSTM` and `nn.RNN` through cuDNN's operators.

Sources: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/RNN.cpp for which kernel runs, and
`_cudnn_impl` in https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cudnn/RNN.cpp for how it is called
(both read in copies of 2025). It is assumed that cuDNN takes every type and size, and was not turned off by the user.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.library import Library

from batchfinder.tracing import kernels
from batchfinder.tracing.cudnn_rnn import MODES, backward_scratch, forward_scratch, rnn, rnn_backward
from batchfinder.tracing.kernels import aten
from batchfinder.tracing.pretend import DEVICE_TYPE

_GRU_CELL_KEEPS = 5  # GRU_WORKSPACE_MULTIPLIER in aten/src/ATen/native/cuda/RNN.cu


@functools.cache
def register() -> tuple[Library, ...]:
    """Send the pretend GPU's recurrent layers to cuDNN's operators. Once per process.

    Returns:
        The libraries that hold the registrations; they last as long as these do.
    """
    kernels.REPLACED.update(
        {
            aten._cudnn_rnn.default: rnn,
            aten._cudnn_rnn_backward.default: rnn_backward,
            aten._thnn_fused_gru_cell.default: _gru_cell,
            aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
        }
    )
    kernels.SCRATCH[aten._cudnn_rnn.default] = forward_scratch
    kernels.SCRATCH[aten._cudnn_rnn_backward.default] = backward_scratch
    # Inference mode skips the autograd key, so the backend's own key needs the routing too.
    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    for library in libraries:
        for name, mode in MODES.items():
            library.impl(f"{name}.input", _layers(mode))
            library.impl(f"{name}.data", _packed_layers(mode))
    return libraries


def flatten_weights(module: nn.Module) -> None:
    """What `nn.RNNBase` does at the end of `.to("cuda")`: all its weights become parts of one new block.

    Weights of several types, and a weight that is there twice, leave them apart. Source: `flatten_parameters` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/rnn.py.

    Args:
        module: any module, whose parameters are on the device already.
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


def _layers(mode: int) -> Callable[..., Any]:
    """`gru.input` and the like; an LSTM's state is a pair."""

    def run(data: torch.Tensor, hx: Any, params: Sequence[torch.Tensor], has_biases: bool, *rest: Any) -> Any:
        num_layers, dropout, train, bidirectional, batch_first = rest
        options = (num_layers, batch_first, dropout, train, bidirectional)
        return _cudnn(mode, data, hx, params, has_biases, options, [])

    return run


def _packed_layers(mode: int) -> Callable[..., Any]:
    """`gru.data` and the like, for packed sequences, all of which are taken to be of full length."""

    def run(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        *rest: Any,
    ) -> Any:
        num_layers, dropout, train, bidirectional = rest
        steps = batch_sizes.size(0)
        options = (num_layers, False, dropout, train, bidirectional)
        return _cudnn(mode, data, hx, params, has_biases, options, [data.size(0) // steps] * steps)

    return run


def _cudnn(
    mode: int,
    data: torch.Tensor,
    state: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    options: tuple[int, bool, float, bool, bool],
    batch_sizes: list[int],
) -> tuple[torch.Tensor, ...]:
    num_layers, batch_first, dropout, train, bidirectional = options
    hx, cx = state if mode == MODES["lstm"] else (state, None)
    hidden, proj = hx.size(2), 0
    if cx is not None and cx.size(2) != hidden:
        hidden, proj = cx.size(2), hidden
    weights = tuple(params)
    if torch.is_autocast_enabled(DEVICE_TYPE):
        # `_cudnn_rnn_cast_reflatten`: not the weights one by one, but all into one block of half precision.
        dtype = torch.get_autocast_dtype(DEVICE_TYPE)
        data, hx = data.to(dtype), hx.to(dtype)
        cx = None if cx is None else cx.to(dtype)
        if weights[0].dtype is not dtype:
            weights = _HalfWeights.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    stride = (4 if has_biases else 2) + (proj != 0)
    output, hy, cy, _reserve, _weights = aten._cudnn_rnn(
        data,
        weights,
        stride,
        _block_of(weights),
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


def _block_of(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The block that all weights are parts of; None where they lie apart (`try_get_weight_buf`)."""
    if len({weight.untyped_storage()._cdata for weight in weights}) > 1:
        return None
    return weights[0].detach().as_strided((sum(weight.numel() for weight in weights),), (1,), 0)


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
