"""timm's models as its benchmark.py of July 2022 trains them, on today's timm.

Written after benchmark.py of https://github.com/huggingface/pytorch-image-models at c865028c, and PyTorch 1.12.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

import benchmarks.measured.xmem  # noqa: F401  # defines operators that torchvision's wheel misses
from batchfinder.models.build import allow_fake_weights
from batchfinder.training.step import Workload


class Sgd2022(torch.optim.SGD):
    """SGD with Nesterov momentum, as `create_optimizer_v2(opt="sgd")` makes it, on PyTorch 1.12.

    It went through the parameters one by one, and `zero_grad` filled the gradients with zeros:
    https://github.com/pytorch/pytorch/blob/v1.12.0/torch/optim/sgd.py, `foreach: Optional[bool] = None` is False there;
    https://github.com/pytorch/pytorch/blob/v1.12.0/torch/optim/optimizer.py, `zero_grad(set_to_none=False)`.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=1e-4, momentum=0.9, nesterov=True, foreach=False)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill the gradients with zeros."""
        super().zero_grad(set_to_none=set_to_none)


_interpolate = nn.functional.interpolate


def without_autocast(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Interpolation in the input's own type."""
    with torch.autocast(data.device.type, enabled=False):
        return _interpolate(data, *args, **kwargs)


def norm_in_place(norm: nn.Module, x: torch.Tensor) -> Any:
    """A norm's forward, as `InPlaceNorm` takes it."""
    return InPlaceNorm.apply(x, norm.weight, norm.bias)


class Benchmarked(nn.Module):
    """A model with its loss; the output is there until the backward has ended, as are the images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output: Any = None

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.model(images)
        self.output = output[0] if isinstance(output, tuple) else output
        return {"loss": nn.functional.cross_entropy(self.output, target)}


class InPlaceNorm(torch.autograd.Function):
    """Batch norm with its activation in place: the output is kept where the input was, and nothing else is.

    The backward makes two tensors of that size: the normalized input, and the gradient.

    Source: `InPlaceABN` in inplace_abn/functions.py and `backward_reduce_template` in src/inplace_abn_cuda.cu of
    https://github.com/mapillary/inplace_abn at 01d23bfe.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x.mul_(1)
        ctx.save_for_backward(x, weight, bias)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        output, weight, bias = ctx.saved_tensors
        _normalized, gradient = torch.empty_like(output), torch.empty_like(output)
        return gradient, torch.empty_like(weight), torch.empty_like(bias)


def build(model: str, image_size: int) -> Workload:
    """A model in channels last, with the attention that timm 0.6 wrote out, and TResNet's norms of that time.

    Interpolation stays in fp16, as on PyTorch 1.12: autocast has it in fp32 since
    https://github.com/pytorch/pytorch/issues/121072 was closed in 2024.
    """
    import timm
    from timm.layers import BatchNormAct2d, set_fused_attn

    set_fused_attn(False)
    nn.functional.interpolate = without_autocast  # type: ignore[assignment]
    with allow_fake_weights():
        made = timm.create_model(model).to(memory_format=torch.channels_last)
    if model.startswith("tresnet"):
        for norm in made.modules():
            if isinstance(norm, BatchNormAct2d):
                norm.forward = partial(norm_in_place, norm)

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        images = torch.zeros(batch_size, 3, image_size, image_size).to(memory_format=torch.channels_last)
        return {"images": images, "target": torch.zeros(batch_size, dtype=torch.int64)}

    # PyTorch 1.12 summed the gradients of a tensor into a new one: https://github.com/pytorch/pytorch/pull/88339
    return Workload(Benchmarked(made), make_batch, optimizer=Sgd2022, seq_len_unit="none")
