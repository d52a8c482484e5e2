"""A net that runs out of memory above a size, without taking any, and what a search must leave as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn

from tests.lightning import nets

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


class Bounded(nets.ConvNet):
    """Fits `most` samples; from the second optimizer step on, `later` of them."""

    def __init__(self, most: int | None = None, rows: int = 96, later: int | None = None, batch_size: int = 2) -> None:
        super().__init__(batch_size, rows, side=4, width=2)
        self.most, self.later = most, later
        self.drawn = 0.0

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.drawn = random.random() + np.random.rand()
        most = self.later if self.later is not None and self.trainer.global_step > 0 else self.most
        if most is not None and len(batch[0]) > most:
            raise torch.OutOfMemoryError(MESSAGE)
        return loss


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Everything that training depends on, as plain values."""
    module: Any = trainer.lightning_module
    connector = trainer._logger_connector
    plain = (bool, int, float, str, type(None))
    return {
        "tensors": {name: tensor.detach().numpy().tobytes() for name, tensor in _tensors(module)},
        "grads": {name: parameter.grad for name, parameter in module.named_parameters()},
        "modes": {name: part.training for name, part in module.named_modules()},
        "attributes": copy.deepcopy({k: v for k, v in vars(module).items() if isinstance(v, (*plain, list))}),
        "optimizers": [repr(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
        "trainer": {k: v if isinstance(v, plain) else id(v) for k, v in vars(trainer).items()},
        "loops": repr(trainer.fit_loop.state_dict()),
        "loader": id(trainer.fit_loop._combined_loader),
        "state": repr(vars(trainer.state)),
        "metrics": repr((connector._callback_metrics, connector._logged_metrics, connector._first_loop_iter)),
        "callbacks": [id(callback) for callback in trainer.callbacks],
    }


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
