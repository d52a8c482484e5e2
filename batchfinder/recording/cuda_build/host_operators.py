"""Operators that the CPU lacks or does otherwise: how it computes what a card would have written."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

aten = torch.ops.aten
RUNTIME = ctypes.CDLL(None)
"""The CUDA stub, which was loaded before all else."""


def _softmax(log: bool, scores: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    scores = scores.float() if half_to_float else scores
    return torch.log_softmax(scores, dim) if log else torch.softmax(scores, dim)


def _softmax_backward(
    log: bool, grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    if log:
        return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(dtype)
    return (output * (grad - (grad * output).sum(dim, keepdim=True))).to(dtype)


def _batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    out = aten.native_batch_norm(data.float(), weight.float(), bias, mean, variance, training, momentum, epsilon)
    return out[0].to(data.dtype), out[1], out[2], torch.empty(0, dtype=torch.uint8)


def _batch_norm_backward(
    data: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_variance: torch.Tensor | None,
    epsilon: float,
    _reserve: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    grads = aten.native_batch_norm_backward(
        grad.float(), data.float(), weight.float(), mean, variance, save_mean, save_variance, True, epsilon, [True] * 3
    )
    return grads[0].to(data.dtype), grads[1], grads[2]


class Attention:
    """Fused attention by plain operators: forward, or backward by autograd.

    Args:
        bias_at: where the bias stands among the arguments; None for no bias.
        dropout_at: where the dropout stands, with the causal mask `causal_at`.
        seed_at: of a backward, where the seed of the dropout stands; None for a forward.
    """

    def __init__(self, bias_at: int | None, dropout_at: int, causal_at: int, seed_at: int | None = None) -> None:
        self._bias_at, self._dropout_at, self._causal_at, self._seed_at = bias_at, dropout_at, causal_at, seed_at

    def __call__(self, *args: Any, scale: float | None = None) -> Any:
        dropout = args[self._dropout_at] if len(args) > self._dropout_at else 0.0
        causal = len(args) > self._causal_at and args[self._causal_at]
        bias = None if self._bias_at is None else args[self._bias_at]
        if self._seed_at is None:
            seed = int(torch.randint(1 << 31, ())) if dropout else None
            return (_attend(args[0], args[1], args[2], bias, causal, scale, dropout, seed), seed)
        seed = int(args[self._seed_at].flatten()[0]) if dropout else None
        grad, query, key, value = args[:4]

        def grads() -> Any:
            leaves = [each.detach().requires_grad_() for each in (query, key, value, *([] if bias is None else [bias]))]
            given = leaves[3] if bias is not None else None
            out = _attend(leaves[0], leaves[1], leaves[2], given, causal, scale, dropout, seed)
            return torch.autograd.grad(out, leaves, grad)

        return _with_autograd(grads)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    seed: int | None,
) -> torch.Tensor:
    scale = query.size(-1) ** -0.5 if scale is None else scale
    key, value = (each.repeat_interleave(query.size(1) // each.size(1), 1) for each in (key, value))
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -torch.inf)
    shares = scores.softmax(-1).nan_to_num(0.0)
    if seed is not None:
        kept = torch.rand(shares.shape, generator=torch.Generator().manual_seed(seed)) >= dropout
        shares = shares * kept / (1 - dropout)
    return (shares @ value.float()).to(query.dtype)


_RECURRENT = {0: aten.rnn_relu, 1: aten.rnn_tanh, 2: aten.lstm, 3: aten.gru}
_autograd: list[ThreadPoolExecutor] = []


def _with_autograd(work: Callable[[], Any]) -> Any:
    """Do something that needs autograd, which is off in this thread below its key, in a thread where it is not."""
    if not _autograd:
        _autograd.append(ThreadPoolExecutor(1))
    return _autograd[0].submit(work).result()


def _recurrent_forward(
    data: torch.Tensor, weight: list[torch.Tensor], stride: int, _block: Any, hx: torch.Tensor, cx: torch.Tensor | None,
    mode: int, _hidden: int, _projected: int, layers: int, batch_first: bool, dropout: float, train: bool, both: bool,
    batch_sizes: list[int], *_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    if dropout and train:
        raise NotImplementedError("dropout between recurrent layers")
    state = [hx, cx] if cx is not None else hx
    how = (weight, stride >= 4, layers, 0.0, train, both)
    if batch_sizes:
        return tuple(_RECURRENT[mode].data(data, torch.tensor(batch_sizes), state, *how))
    return tuple(_RECURRENT[mode].input(data, state, *how, batch_first))


def _recurrent_backward(
    data: torch.Tensor, weight: list[torch.Tensor], stride: int, block: Any, hx: torch.Tensor, cx: torch.Tensor | None,
    _output: torch.Tensor, grad: torch.Tensor | None, grad_hy: torch.Tensor | None, grad_cy: torch.Tensor | None,
    *how: Any,
) -> tuple[Any, ...]:  # fmt: skip
    def grads() -> tuple[Any, ...]:
        leaves = [each.detach().requires_grad_() for each in (data, hx, *([] if cx is None else [cx]), *weight)]
        states = leaves[1 : 2 if cx is None else 3]
        weights = leaves[1 + len(states) :]
        cell = None if cx is None else states[1]
        outs = _recurrent_forward(leaves[0], weights, stride, block, states[0], cell, *how)
        given = [(out, each) for out, each in zip(outs, (grad, grad_hy, grad_cy), strict=False) if each is not None]
        found = torch.autograd.grad([out for out, _ in given], leaves, [each for _, each in given], allow_unused=True)
        return (*found[: 1 + len(states)], list(found[1 + len(states) :]))

    return tuple(_with_autograd(grads))


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    if ends is None:
        return torch.bmm(left, right)
    bounds = [0, *ends.tolist()]
    parts = list(itertools.pairwise(bounds))
    if left.dim() == 2 and right.dim() == 3:
        rest = left.new_zeros(left.size(0) - bounds[-1], right.size(2))
        return torch.cat([*(left[start:end] @ right[place] for place, (start, end) in enumerate(parts)), rest])
    if left.dim() == 2:
        return torch.stack([left[:, start:end] @ right[start:end] for start, end in parts])
    rest = left.new_zeros(left.size(1), right.size(1) - bounds[-1])
    return torch.cat([*(left[place] @ right[:, start:end] for place, (start, end) in enumerate(parts)), rest], 1)


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        return tensor.zero_()
    RUNTIME.stub_zero(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
    return tensor


def _histc(data: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
    return torch.histc(data.double(), *how, **more).to(data.dtype)


ON_HOST: dict[str, Callable[..., Any]] = {
    "_softmax": functools.partial(_softmax, False),
    "_log_softmax": functools.partial(_softmax, True),
    "_softmax_backward_data": functools.partial(_softmax_backward, False),
    "_log_softmax_backward_data": functools.partial(_softmax_backward, True),
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_flash_attention": Attention(None, 3, 4),
    "_scaled_dot_product_efficient_attention": Attention(3, 5, 6),
    "_scaled_dot_product_cudnn_attention": Attention(3, 5, 6),
    "_scaled_dot_product_flash_attention_backward": Attention(None, 10, 11, 12),
    "_scaled_dot_product_efficient_attention_backward": Attention(4, 9, 11, 7),
    "_scaled_dot_product_cudnn_attention_backward": Attention(8, 13, 14, 6),
    "_cudnn_rnn": _recurrent_forward,
    "_cudnn_rnn_backward": _recurrent_backward,
    "_grouped_mm": _grouped_mm,
    "histc": _histc,
    "zero_": _zero,
}
