"""timm's vision transformers as torchao's benchmark of optimizers trains them.

Written after benchmarks/benchmark_adam_8bit.py and benchmark_low_bit_adam.py of https://github.com/pytorch/ao, at the
commits that README.md names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

import benchmarks.measured.xmem  # noqa: F401  # defines operators that torchvision's wheel misses
from batchfinder.models.build import allow_fake_weights
from batchfinder.training.optimizers import AdamW8bitStates, OptimizerFactory
from batchfinder.training.step import Workload

CLASSES, PIXELS = 45, 224  # of RESISC45, as it is cropped
LEAST_OFFLOADED = 4096
"""Elements from which on a parameter's optimizer is on the CPU (`minimal_size`)."""


def build(model: str, full_bf16: bool, compiled: bool, checkpointing: bool, optimizer: str, offload: str) -> Workload:
    """A model of timm's with 45 classes, and its optimizer.

    Args:
        model: its name in timm.
        full_bf16: whether weights and images are bf16.
        compiled: whether torch.compile has all of it.
        checkpointing: of each block.
        optimizer: of `OPTIMIZERS`.
        offload: what is on the CPU: nothing where empty, `states`, or `states and gradients`.
    """
    import timm

    with allow_fake_weights():
        made: Any = timm.create_model(model, num_classes=CLASSES, img_size=PIXELS)
        if full_bf16:
            made.bfloat16()
    made.set_grad_checkpointing(checkpointing)
    if compiled:
        made.compile(fullgraph=True)
    images_in = torch.bfloat16 if full_bf16 else torch.float32

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        images = torch.zeros(batch_size, 3, PIXELS, PIXELS, dtype=images_in)
        return {"images": images, "target": torch.zeros(batch_size, dtype=torch.int64)}

    make_optimizer = OPTIMIZERS[optimizer]
    if offload:
        make_optimizer = partial(Offloaded, make=make_optimizer, gradients=offload == "states and gradients")
    return Workload(Classifier(made), make_batch, optimizer=make_optimizer, seq_len_unit="none", sums_in_place=True)


class Classifier(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.model(images), target)}


class Offloaded(torch.optim.Optimizer):
    """What torchao's CPUOffloadOptimizer has on the GPU: gradients, and all that is of small parameters.

    Large parameters are updated on the CPU and copied back. If asked for, their gradients go as soon as they are made:
    allocated memory does not wait until they are copied.
    """

    def __init__(self, parameters: Iterable[Any], make: OptimizerFactory, gradients: bool) -> None:
        everything = list(parameters)
        super().__init__(everything, {})
        self.large = [each for each in everything if each.numel() >= LEAST_OFFLOADED]
        self.small = make([each for each in everything if each.numel() < LEAST_OFFLOADED])
        for parameter in self.large if gradients else ():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Of the small parameters alone; the others' is no matter of the GPU."""
        self.small.step()


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _of_torchao(name: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    from torchao import optim

    made: torch.optim.Optimizer = getattr(optim, name)(list(parameters), lr=1e-4)
    return made


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "Adam": partial(torch.optim.Adam, lr=1e-4),
    "AdamW (fused)": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "bnb 8-bit": AdamW8bitStates,
    "ao 8-bit": partial(_of_torchao, "AdamW8bit"),
    "ao FP8 E4M3": partial(_of_torchao, "AdamWFp8"),
    "ao 4-bit": partial(_of_torchao, "AdamW4bit"),
}
