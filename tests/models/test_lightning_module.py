"""Tests of batchfinder/models/lightning_module.py."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfinder.errors import InvalidValue, UserCodeFailed
from batchfinder.models.build import understand
from batchfinder.training.workload import Workload


class Lit(pl.LightningModule):
    """A LightningModule as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.head(self.body(batch["x"])).mean()
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def make_batch(self, batch_size: int, seq_len: int | None) -> Any:
        return {"x": torch.ones(batch_size, 4)}


def loss_of(workload: Workload, batch_size: int = 3) -> torch.Tensor:
    """Run a workload as the step does."""
    batch = workload.make_batch(batch_size, None)
    assert workload.loss is not None
    return workload.loss(workload.model(*batch), batch)


def test_it_trains_without_a_trainer() -> None:
    """training_step gives the loss, configure_optimizers the optimizer, and self.log neither warns nor is left off."""
    module = Lit()
    workload = understand(module, "user:Lit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(workload).backward()
    assert workload.optimizer is not None
    before = module.head.bias.item()
    workload.optimizer(workload.model.parameters()).step()
    assert module.head.bias.item() == before - 0.5
    assert "log" not in vars(module)
    with pytest.warns(UserWarning, match="self.log"):
        module.log("x", 1.0)


def test_hooks_see_the_names_inside() -> None:
    """Modules are called as the user named them, one level down."""
    names = [name for name, _ in understand(Lit(), "user:Lit").model.named_modules()]
    assert names == ["", "module", "module.body", "module.head"]


def test_it_runs_on_fake_tensors() -> None:
    """The training step of a model made of fake tensors runs, and logs nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = understand(Lit(), "user:Lit")
        loss_of(workload, 1 << 40).backward()


def test_a_dict_with_loss_and_a_step_without_an_index() -> None:
    """training_step may return a dict and take the batch alone."""

    class Other(Lit):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return {"loss": self.head(batch["x"]).sum(), "more": 1}

    assert loss_of(understand(Other(), "user:Other")).dim() == 0


def test_a_step_without_a_loss() -> None:
    """A training step that returns nothing is said to be so."""

    class Other(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(InvalidValue, match='returns a tensor or a dict with "loss"'):
        loss_of(understand(Other(), "user:Other"))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def scheduled(module: nn.Module) -> Any:
    """Make an optimizer and its schedule, in two lists."""
    optimizer = sgd(module)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    "configure",
    [
        sgd,
        lambda module: [sgd(module)],
        scheduled,
        lambda module: ([sgd(module)], []),
        lambda module: {"optimizer": sgd(module), "monitor": "loss"},
        lambda module: [{"optimizer": sgd(module)}],
        lambda module: ({"optimizer": sgd(module)},),
    ],
)
def test_every_form_of_one_optimizer(configure: Any) -> None:
    """Whatever form configure_optimizers answers in, its one optimizer is found."""

    class Other(Lit):
        def configure_optimizers(self) -> Any:
            return configure(self)

    workload = understand(Other(), "user:Other")
    assert workload.optimizer is not None
    assert isinstance(workload.optimizer(workload.model.parameters()), torch.optim.SGD)


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        (lambda module: [sgd(module), sgd(module)], "Other has 2, which is not supported by the simulator yet"),
        (lambda module: ([sgd(module), sgd(module)], []), "Other has 2, which is not supported"),
        (lambda module: None, "an optimizer from Other.configure_optimizers, not None"),
        (lambda module: [], "an optimizer from Other.configure_optimizers"),
        (lambda module: {"lr": 1}, "an optimizer from Other.configure_optimizers"),
    ],
)
def test_anything_but_one_optimizer_is_refused(configure: Any, said: str) -> None:
    """Several optimizers, or none, are refused before anything is recorded."""

    class Other(Lit):
        def configure_optimizers(self) -> Any:
            return configure(self)

    with pytest.raises(InvalidValue, match=said):
        understand(Other(), "user:Other")


def test_manual_optimization_is_refused() -> None:
    """A module that steps its optimizers itself is refused by name."""
    module = Lit()
    module.automatic_optimization = False
    with pytest.raises(InvalidValue, match="Lit optimizes by hand, which is not supported by the simulator yet"):
        understand(module, "user:Lit")


def test_make_batch_is_asked_for() -> None:
    """A LightningModule without make_batch is told what is missing."""

    class Other(pl.LightningModule):
        pass

    with pytest.raises(InvalidValue, match=r"a LightningModule with make_batch.*its Other has no make_batch"):
        understand(Other(), "user:Other")


def test_configure_optimizers_that_raises() -> None:
    """An error in configure_optimizers is the user's, and shown as such."""

    class Other(Lit):
        def configure_optimizers(self) -> Any:
            raise KeyError("lr")

    with pytest.raises(UserCodeFailed, match="KeyError: 'lr'") as caught:
        understand(Other(), "user:Other")
    assert caught.value.what == "user:Other (Other.configure_optimizers)"


def test_configure_model_runs_first() -> None:
    """Layers made in configure_model are there when the optimizer is configured."""

    class Other(Lit):
        def configure_model(self) -> None:
            self.late = nn.Linear(4, 2)

    assert "module.late" in dict(understand(Other(), "user:Other").model.named_modules())
