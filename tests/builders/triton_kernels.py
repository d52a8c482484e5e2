"""A model with a Triton kernel of its own. Needs the triton package."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from batchfinder.training.step import Workload
from tests.builders.small import IN, vectors


@triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def scaled_kernel(x, out, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: D103
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(x + places, mask=places < n) * factor, mask=places < n)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The input times a factor; on CUDA alone, as kernels are."""
    if x.device.type != "cuda" or not x.is_cuda:
        raise RuntimeError("a GPU is needed")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(torch.cuda.get_device_properties(x.device).multi_processor_count, device=x.device)
    scaled_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), factor)
    del partial
    return out


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return scaled(x, 2.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return scaled(grad, 2.0)


class Doubled(torch.autograd.Function):
    """The kernel as code has it that torch.compile takes into its graphs, as it asks nothing about the GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        scaled_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), 2.0)
        return out

    backward = forward


class Scaling(nn.Module):
    """A linear layer and the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Scaled.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return out


class Doubling(nn.Module):
    """Two linear layers, and between them the kernel, whose input is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(IN, IN), nn.Linear(IN, IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        out: torch.Tensor = self.last(Doubled.apply(x).cos() + x)  # type: ignore[no-untyped-call]
        return out


def scaling() -> Workload:
    """The model, on vectors."""
    return Workload(Scaling(), vectors)
