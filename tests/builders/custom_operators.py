"""Models that call operators of their own, with Python kernels, and one whose kernel cannot run without a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from batchfinder.training.step import Workload
from tests.builders.small import IN, vectors


@torch.library.custom_op("batchfinder_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice the input, by way of a scratch tensor of four times its size."""
    scratch = x.new_empty(4, *x.shape)
    scratch[0] = x
    return scratch.sum(0) * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda context, grad: doubled(grad))  # type: ignore[no-untyped-call]


@torch.library.custom_op("batchfinder_tests::compiled", mutates_args=())
def compiled(x: torch.Tensor) -> torch.Tensor:
    """Twice the input, by way of numpy, which takes no fake tensor, as a kernel in C++ takes none."""
    scratch = x.new_empty(4, *x.shape)
    return torch.from_numpy(scratch.sum(0).numpy()) * 2


@compiled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


compiled.register_autograd(lambda context, grad: grad * 2)  # type: ignore[no-untyped-call]


@torch.library.custom_op("batchfinder_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    """Twice the input, by way of numpy; nothing says what comes out."""
    return torch.from_numpy(x.numpy()) * 2


unknown.register_autograd(lambda context, grad: grad * 2)  # type: ignore[no-untyped-call]


class _UnknownBackward(torch.autograd.Function):
    """Calls the operator of which nothing is known in the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return unknown(grad)


class Calling(nn.Module):
    """A linear layer, and what is called of its output."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, IN)
        self.which = which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self.which == "backward":
            return _UnknownBackward.apply(out)  # type: ignore[no-any-return,no-untyped-call]
        if self.which == "numpy":
            return out * float(out.detach().numpy().max())
        if self.which == "crash":
            return out + ctypes.string_at(0)
        if self.which == "flex":
            heads = out.view(1, 1, -1, IN)
            return flex_attention(heads, heads, heads)
        if self.which == "cuda":
            moved = nn.Linear(1, 1).to("cuda").to(torch.float32)(torch.ones(1).cuda())
            return out + torch.zeros(out.shape, device="cuda") + moved
        if self.which == "compared":
            return out if torch.equal(out, x) else out.exp()
        called = {"doubled": doubled, "compiled": compiled, "unknown": unknown}[self.which]
        return called(out)  # type: ignore[no-any-return]


def calling(which: str) -> Workload:
    """One of the models, on vectors."""
    return Workload(Calling(which), vectors)
