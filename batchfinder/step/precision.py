"""The four precisions a step can run in: `fp32`, and three by Lightning's names for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Precision:
    """How numbers are held and computed.

    Attributes:
        name: as options and reports call it.
        autocast: the type that autocast casts to; None without autocast.
        weights: the type of weights, and of floating-point inputs; None leaves them.
        scaled: whether a GradScaler is used.
    """

    name: str
    autocast: torch.dtype | None = None
    weights: torch.dtype | None = None
    scaled: bool = False

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """What the forward and the loss run in."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def input_type(self, tensor: torch.Tensor) -> torch.dtype:
        """The type an input tensor should have on the device."""
        return self.weights if self.weights is not None and tensor.is_floating_point() else tensor.dtype

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """A new GradScaler where the precision uses one, at a scale that does not overflow.

        At the usual 65536 the first steps often do, and are skipped: Adam's state would be missing at the peak. The
        scale itself changes nothing about the memory.
        """
        return torch.amp.GradScaler(device.type, init_scale=1.0) if self.scaled else None


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32"),
        Precision("bf16-mixed", autocast=torch.bfloat16),
        Precision("16-mixed", autocast=torch.float16, scaled=True),
        Precision("bf16-true", weights=torch.bfloat16),
    )
}
