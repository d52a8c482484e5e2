"""On a CUDA device nothing of a search stays, whatever the stage, and however the search ends."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

from batchfinder.errors import OutOfMemory
from batchfinder.lightning.callback import BatchFinder
from batchfinder.units import GIB
from tests.lightning import nets

pytestmark = pytest.mark.gpu

STAGES = {
    "fit": "on_fit_start",
    "validate": "on_validation_start",
    "test": "on_test_start",
    "predict": "on_predict_start",
}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
_GLOBAL_HOOKS = [
    (modules, "_global_forward_hooks"),
    (modules, "_global_forward_pre_hooks"),
    (modules, "_global_backward_hooks"),
    (modules, "_global_backward_pre_hooks"),
    (optimizers, "_global_optimizer_pre_hooks"),
    (optimizers, "_global_optimizer_post_hooks"),
]
_SETTINGS = (
    "limit_val_batches",
    "num_sanity_val_steps",
    "should_stop",
    "gradient_clip_val",
    "global_step",
    "current_epoch",
)


def process() -> dict[str, Any]:
    """What a process has whatever it trains."""
    return {
        "hooks": [len(getattr(owner, name)) for owner, name in _GLOBAL_HOOKS],
        "backward": torch.autograd.backward,
        "fraction": torch.cuda.get_per_process_memory_fraction(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cuda"),
        "dtype": torch.get_default_dtype(),
        "cudnn": [getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")],
        "stream": torch.cuda.current_stream(),
        "frozen": gc.get_freeze_count(),
    }


def numbers() -> list[Any]:
    """What each generator would give next."""
    name, keys, position, *rest = np.random.get_state()
    cuda = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    return [random.getstate(), name, list(keys), position, rest, torch.get_rng_state().tolist(), cuda]


def weights(module: torch.nn.Module) -> dict[str, list[float]]:
    """Parameters, their gradients and buffers."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    gradients = [(f"{name}'s gradient", one.grad) for name, one in module.named_parameters() if one.grad is not None]
    return {name: one.detach().flatten().tolist() for name, one in (*tensors, *gradients)}


def snapshot(trainer: Any, module: pl.LightningModule) -> dict[str, Any]:
    """All that a search could leave on a trainer, a module and the device."""
    torch.cuda.synchronize()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "allocated": torch.cuda.memory_allocated(),
        "numbers": numbers(),
        "process": process(),
        "weights": weights(module),
        "modes": [part.training for part in module.modules()],
        "module's hooks": [len(getattr(part, name)) for part in module.modules() for name in _HOOKS],
        "optimizers": copy.deepcopy([each.state_dict() for each in trainer.optimizers]),
        "optimizers' hooks": [
            [len(each._optimizer_step_pre_hooks), len(each._optimizer_step_post_hooks)] for each in trainer.optimizers
        ],
        "schedulers": copy.deepcopy(
            [[each.interval, each.scheduler.state_dict()] for each in trainer.lr_scheduler_configs]
        ),
        "scaler": None if scaler is None else scaler.state_dict(),
        "loops": copy.deepcopy(trainer.fit_loop.state_dict()),
        "settings": [getattr(trainer, name) for name in _SETTINGS],
        "state": [trainer.state.fn, trainer.state.stage, trainer.state.status],
        "callbacks": list(map(id, trainer.callbacks)),
        "loggers": list(map(id, trainer.loggers)),
        "noted": list(module.losses),  # type: ignore[arg-type]
    }


class Watch(pl.Callback):
    """Takes a snapshot when it is its turn as a stage starts."""

    def __init__(self, stage: str) -> None:
        setattr(self, STAGES[stage], self._look)

    def _look(self, trainer: Any, pl_module: Any) -> None:
        self.reserved = torch.cuda.memory_reserved()
        self.seen = snapshot(trainer, pl_module)


class Net(nets.Transformer):
    """With the steps of all stages, a scheduler, and the size from which it has a bug."""

    def __init__(self, bug_from: int = 1 << 30) -> None:
        super().__init__(2, rows=4096, seq_len=128, width=256, scheduled=True)
        self.bug_from = bug_from

    def loss(self, batch: Any) -> torch.Tensor:
        if len(batch["input_ids"]) >= self.bug_from:
            raise ZeroDivisionError("a bug of the user's")
        return super().loss(batch)

    def _evaluation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    validation_step = test_step = predict_step = _evaluation_step

    def _loader(self) -> Any:
        return DataLoader(nets.Text(self.rows, self.seq_len), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = _loader


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """The process may reserve 1 GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(GIB / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def run(stage: str, module: Net, *callbacks: Any, precision: str = "32-true", **options: Any) -> pl.Trainer:
    """A trainer at a stage, for a step."""
    trainer = nets.trainer(
        accelerator="gpu",
        callbacks=list(callbacks),
        precision=precision,
        max_epochs=-1,
        max_steps=1,
        limit_val_batches=1,
        limit_test_batches=1,
        limit_predict_batches=1,
        **options,
    )
    getattr(trainer, stage)(module)
    return trainer


@pytest.mark.parametrize(
    ("stage", "precision"),
    [*((stage, "32-true") for stage in STAGES), ("fit", "16-mixed")],  # which has a scaler
)
def test_a_search_leaves_nothing(stage: str, precision: str) -> None:
    """All is as it was before it, and no more is reserved."""
    before, after = Watch(stage), Watch(stage)
    finder = BatchFinder(cache=False, also=[stage] if stage != "fit" else [])
    run(stage, Net(), before, finder, after, precision=precision)
    assert finder.results[stage]
    assert {name for name, seen in before.seen.items() if seen != after.seen[name]} == set()
    assert after.reserved <= before.reserved


def test_a_fit_with_its_validation_leaves_nothing() -> None:
    """Both are searched as the fit starts."""
    before, after = Watch("fit"), Watch("fit")
    finder = BatchFinder(cache=False, also=["validate"])
    run("fit", Net(), before, finder, after)
    assert set(finder.results) == {"fit", "validate"}
    assert {name for name, seen in before.seen.items() if seen != after.seen[name]} == set()
    assert after.reserved <= before.reserved


@pytest.mark.parametrize("stage", [*STAGES])
@pytest.mark.parametrize("fails", ["a bug", "nothing fits"])
def test_a_search_that_fails_leaves_nothing(stage: str, fails: str) -> None:
    """The error is the user's own, or says that no size fits; the process goes on as it was."""
    gc.collect()
    module, before, at_start = Net(7 if fails == "a bug" else 1 << 30), Watch(stage), process()
    finder = BatchFinder(
        cache=False, also=[stage] if stage != "fit" else [], budget="8MiB" if fails != "a bug" else None
    )
    start = weights(module)
    with pytest.raises(ZeroDivisionError if fails == "a bug" else OutOfMemory):
        run(stage, module, before, finder)
    gc.collect()
    assert weights(module) == start
    assert module.losses == []
    assert module.batch_size == 2
    assert process() == at_start
    assert numbers() == before.seen["numbers"]
    module.cpu()
    del finder, before
    gc.collect()
    assert torch.cuda.memory_allocated() == 0
