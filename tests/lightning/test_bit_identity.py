"""Training with the callback is bit for bit the training started with its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets


def fit(module: nets.Module, **options: Any) -> pl.Trainer:
    """Train quietly."""
    trainer = nets.trainer(**options)
    trainer.fit(module)
    return trainer


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules hold the same bits, buffers that are not saved included."""
    tensors = [dict([*module.named_parameters(), *module.named_buffers()]) for module in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(torch.equal(tensors[0][n], tensors[1][n]) for n in tensors[0])


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("net", [nets.Transformer, nets.ConvNet])
def test_losses_and_weights_equal_those_of_a_run_started_with_the_sizes(
    net: type[nets.Module], precision: str, scheduled: bool
) -> None:
    """Seed for seed, with shuffling, dropout, BatchNorm and accumulation, with a scheduler or without."""
    pl.seed_everything(1)
    found = net(scheduled=scheduled)
    finder = BatchFinder(target_batch_size=32, max_batch_size=8)
    trainer = fit(found, callbacks=[finder], precision=precision, max_epochs=2)
    assert finder.plan is not None
    assert (finder.batch_size, finder.plan.accumulation, trainer.global_step) == (8, 4, 6)

    pl.seed_everything(1)
    direct = net(batch_size=8, scheduled=scheduled)
    fit(direct, precision=precision, max_epochs=2, accumulate_grad_batches=4)
    assert found.losses == direct.losses
    assert len(found.losses) == 24
    assert same(found, direct)


@pytest.mark.slow
def test_training_after_sizes_were_timed_equals_that_of_a_run_started_with_the_sizes() -> None:
    """With accumulation, dropout, BatchNorm and a scheduler, whichever size is found to be at full speed."""
    pl.seed_everything(1)
    found = nets.ConvNet(scheduled=True)
    finder = BatchFinder(target_batch_size=16, max_batch_size=4, goal="throughput", cache=False)
    fit(found, callbacks=[finder], max_epochs=2)
    assert finder.plan is not None
    throughput = finder.results["fit"][None].throughput
    assert throughput is not None
    assert [rate.batch_size for rate in throughput.rates] == [1, 2, 4]
    assert finder.batch_size == throughput.batch_size

    pl.seed_everything(1)
    direct = nets.ConvNet(batch_size=finder.batch_size, scheduled=True)
    fit(direct, max_epochs=2, accumulate_grad_batches=finder.plan.accumulation)
    assert found.losses == direct.losses
    assert same(found, direct)


class Noisy(nets.Pictures):
    """Draws random numbers for each sample, from torch and from a generator of its own."""

    def __init__(self, rows: int, side: int) -> None:
        super().__init__(rows, side)
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture, label = super().__getitem__(index)
        return picture + torch.randn(1) + torch.randn(1, generator=self.generator), label


class NoisyNet(nets.ConvNet):
    """Keeps its data."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(batch_size)
        self.data = Noisy(self.rows, self.side)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


def test_a_start_from_the_cache_is_identical_too() -> None:
    """Looking at the data for the key leaves no trace, though the data draw random numbers."""
    finder = BatchFinder(max_batch_size=8)
    fit(NoisyNet(), callbacks=[finder])
    pl.seed_everything(1)
    found = NoisyNet()
    fit(found, callbacks=[again := BatchFinder(max_batch_size=8)])
    assert [outcome.source for outcome in again.results["fit"].values()] == ["cache"]
    assert [len(outcome.trials) for outcome in again.results["fit"].values()] == [1]
    pl.seed_everything(1)
    direct = NoisyNet(batch_size=8)
    fit(direct)
    assert found.losses == direct.losses
    assert same(found, direct)


def test_manual_optimization_with_two_optimizers_and_no_step_at_first() -> None:
    """The tries go on until every optimizer has stepped twice, and are undone."""

    class Manual(nets.ConvNet):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__(batch_size)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            layers = list(self.net.children())
            return [
                torch.optim.Adam(torch.nn.ModuleList(part).parameters(), lr=1e-3) for part in (layers[:4], layers[4:])
            ]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            if (batch_idx + 1) % 3 == 0:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()

    tried: list[int] = []

    class Counting(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            tried.append(len(batch[0]))
            super().training_step(batch, batch_idx)

    pl.seed_everything(1)
    found = Counting()
    fit(found, callbacks=[BatchFinder(max_batch_size=8, cache=False)])
    pl.seed_everything(1)
    direct = Manual(batch_size=8)
    fit(direct)
    assert found.losses == direct.losses
    assert same(found, direct)
    assert tried[:6] == [1] * 6


def test_an_average_of_the_weights_takes_part_and_comes_back() -> None:
    """A callback that holds a module takes part; its average ends up as without the finder."""
    averages: list[pl.callbacks.WeightAveraging] = []
    results = []
    for callbacks, size in (([BatchFinder(max_batch_size=8, cache=False)], 2), ([], 8)):
        pl.seed_everything(1)
        module = nets.Transformer(batch_size=size)
        averages.append(pl.callbacks.EMAWeightAveraging(decay=0.9))
        fit(module, callbacks=[*callbacks, averages[-1]])
        results.append(module)
    assert same(*results)
    assert same(averages[0]._average_model, averages[1]._average_model)  # type: ignore[arg-type]


def test_loggers_see_nothing_of_the_tries(tmp_path: Path) -> None:
    """The log is the one of a run started with the size, but for the peak that is logged as the fit ends."""
    logs = []
    for callbacks, size, name in (([BatchFinder(max_batch_size=8)], 2, "found"), ([], 8, "direct")):
        pl.seed_everything(1)
        logger = pl.loggers.CSVLogger(tmp_path, name)
        fit(nets.ConvNet(batch_size=size), callbacks=callbacks, logger=logger, log_every_n_steps=1)
        logs.append(Path(logger.log_dir, "metrics.csv").read_text())
    assert nets.without_peak(logs[0]) == logs[1]
    assert logs[1].count("\n") == 13


def test_what_on_fit_start_makes_is_there_in_the_tries() -> None:
    """A module that needs its own on_fit_start is tried after it, though Lightning calls it after the callback's."""

    class Needs(nets.ConvNet):
        started = 0

        def on_fit_start(self) -> None:
            self.scale = torch.ones(1)
            type(self).started += 1

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * self.scale

    module = Needs()
    fit(module, callbacks=[BatchFinder(max_batch_size=8, cache=False)])
    assert module.batch_size == 8
    assert not hasattr(nets.ConvNet(), "scale")
