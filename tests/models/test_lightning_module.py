"""Tests of batchfinder/models/lightning_module.py."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from batchfinder.errors import InvalidValue, UserCodeFailed
from batchfinder.models.build import workload_from_object
from batchfinder.models.lightning_module import call_step
from batchfinder.training.step import Workload


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
    workload = workload_from_object(module, "user:Lit")
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
    names = [name for name, _ in workload_from_object(Lit(), "user:Lit").model.named_modules()]
    assert names == ["", "module", "module.body", "module.head"]


def test_it_runs_on_fake_tensors() -> None:
    """The training step of a model made of fake tensors runs, and logs nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = workload_from_object(Lit(), "user:Lit")
        loss_of(workload, 1 << 40).backward()


def test_a_dict_with_loss() -> None:
    """training_step may return a dict."""

    class Other(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.head(batch["x"]).sum(), "more": 1}

    assert loss_of(workload_from_object(Other(), "user:Other")).dim() == 0


class BatchAlone(Lit):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class Underscore(Lit):
    def training_step(self, samples: Any, _: int) -> Any:
        return super().training_step(samples, _)


class PositionalOnly(Lit):
    def training_step(self, x: Any, i: int, /) -> Any:
        return super().training_step(x, i)


class AnyNumber(Lit):
    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args)


class WithDefault(Lit):
    def training_step(self, one: Any, two: int = 7) -> Any:
        assert two == 0
        return super().training_step(one, two)


class Prints(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.print("here")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [BatchAlone, Underscore, PositionalOnly, AnyNumber, WithDefault, Prints])
def test_a_step_is_called_as_lightning_calls_it(kind: type[Lit]) -> None:
    """By position, with the index wherever there is room for it, whatever the arguments are called; as a fit does."""
    assert loss_of(workload_from_object(kind(), "user:Lit")).dim() == 0
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False,
    )  # fmt: skip
    trainer.fit(kind(), DataLoader([{"x": torch.ones(4)}] * 2, batch_size=2))
    assert trainer.global_step == 1


def test_a_validation_step_of_several_dataloaders() -> None:
    """dataloader_idx is passed where the third argument is called so, and nowhere else."""
    assert call_step(lambda batch, batch_idx, dataloader_idx: (batch, batch_idx, dataloader_idx), "b") == ("b", 0, 0)
    assert call_step(lambda batch, i, dataloader_idx=5: (batch, i, dataloader_idx), "b") == ("b", 0, 0)
    assert call_step(lambda batch, i, other=5: (batch, i, other), "b") == ("b", 0, 5)


def test_a_step_without_a_loss() -> None:
    """A training step that returns nothing is said to be so."""

    class Other(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(InvalidValue, match='returns a tensor or a dict with "loss"'):
        loss_of(workload_from_object(Other(), "user:Other"))


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

    workload = workload_from_object(Other(), "user:Other")
    assert workload.optimizer is not None
    assert isinstance(workload.optimizer(workload.model.parameters()), torch.optim.SGD)


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        (lambda module: [sgd(module), sgd(module)], "Other has 2, which the simulator does not support yet"),
        (lambda module: ([sgd(module), sgd(module)], []), "Other has 2, which the simulator does not support"),
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
        workload_from_object(Other(), "user:Other")


def test_manual_optimization_is_refused() -> None:
    """A module that steps its optimizers itself is refused by name."""
    module = Lit()
    module.automatic_optimization = False
    with pytest.raises(InvalidValue, match="Lit uses manual optimization, which the simulator does not support yet"):
        workload_from_object(module, "user:Lit")


def test_make_batch_is_asked_for() -> None:
    """A LightningModule without make_batch is told what is missing."""

    class Other(pl.LightningModule):
        pass

    with pytest.raises(InvalidValue, match=r"a LightningModule with make_batch.*its Other has no make_batch"):
        workload_from_object(Other(), "user:Other")


def test_configure_optimizers_that_raises() -> None:
    """An error in configure_optimizers is the user's, and shown as such."""

    class Other(Lit):
        def configure_optimizers(self) -> Any:
            raise KeyError("lr")

    with pytest.raises(UserCodeFailed, match="KeyError: 'lr'") as caught:
        workload_from_object(Other(), "user:Other")
    assert caught.value.what == "user:Other (Other.configure_optimizers)"


def test_configure_model_runs_first() -> None:
    """Layers made in configure_model are there when the optimizer is configured."""

    class Other(Lit):
        def configure_model(self) -> None:
            self.late = nn.Linear(4, 2)

    assert "module.late" in dict(workload_from_object(Other(), "user:Other").model.named_modules())
