"""The optimizers that can be asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-5),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-5, fused=True),
    "adam": partial(torch.optim.Adam, lr=1e-5),
    "sgd": partial(torch.optim.SGD, lr=1e-5),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-5, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-5),
}
