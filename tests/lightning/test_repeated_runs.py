"""Runs after the first: the same trainer, the same callback, other stages; each starts from the user's own settings."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from batchfinder.errors import OutOfMemory
from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE


class Sees(pl.Callback):
    """Notes the batches of a run. Not the module does: what it and its globals hold is part of the cache's key."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.values: list[float] = []
        self.accumulated: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        self.accumulated.append(trainer.accumulate_grad_batches)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.sizes.append(len(batch[0]))
        self.values.append(outputs.item())

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


class Net(pl.LightningModule):
    """Three batches of eight in an epoch."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.Dropout(0.2))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(24, 4), batch_size=self.batch_size, shuffle=True)


class Evaluated(Net):
    """Evaluates shuffled data with dropout, and draws a number per batch; three batches of eight too."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.net.train()
        return self.loss(batch) + torch.rand(())

    test_step = predict_step = validation_step

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(24, 4), batch_size=self.size, shuffle=True)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.fixture
def sees() -> Sees:
    """What a test's runs see."""
    return Sees()


def test_a_second_fit_starts_from_the_users_own_accumulation_and_size(sees: Sees) -> None:
    """It looks the answer up, is set the same way, and leaves the trainer as the user made it."""
    finder = BatchFinder(16, max_batch_size=8)
    trainer = nets.trainer(callbacks=[finder, sees], accumulate_grad_batches=3)
    module = Net(batch_size=4)
    trainer.fit(module)
    assert trainer.accumulate_grad_batches == 3
    assert [trial.batch_size for trial in finder.results["fit"][None].trials] == [1, 8]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert sees.accumulated == [2] * 6
    assert trainer.accumulate_grad_batches == 3
    assert [(found.source, len(found.trials)) for found in finder.results["fit"].values()] == [("cache", 1)]
    assert sees.sizes == [8] * 6
    assert module.batch_size == 8


def test_a_second_fit_is_set_up_with_the_users_own_size() -> None:
    """The first one's size is taken back before anything asks for it, unless the user has set another since."""
    noted = []

    class Notes(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            noted.append(pl_module.batch_size)

    module, trainer = Net(batch_size=4), nets.trainer(callbacks=[BatchFinder(max_batch_size=8), Notes()])
    trainer.fit(module)
    trainer.fit(module)
    module.batch_size = 6
    trainer.fit(module)
    assert noted == [4, 4, 6]


def test_a_fit_that_fails_puts_accumulation_back() -> None:
    """An error in training, too, leaves the trainer's own number."""

    class Fails(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and self.trainer.callbacks:
                raise ValueError("the third batch is bad")

    finder = BatchFinder(16, max_batch_size=8, cache=False)
    trainer = nets.trainer(callbacks=[finder], accumulate_grad_batches=3)
    with pytest.raises(ValueError, match="the third batch is bad"):
        trainer.fit(Fails())
    assert trainer.accumulate_grad_batches == 3


def test_the_same_callback_in_another_trainer(sees: Sees) -> None:
    """What it found first is no longer set nor said there, here in a fast_dev_run."""
    finder, module = BatchFinder(64, max_batch_size=8), Net()
    with pytest.warns(UserWarning, match="An epoch has 3 micro-batches"):
        nets.trainer(callbacks=[finder]).fit(module)
    assert finder.plan is not None
    nets.trainer(callbacks=[finder, sees], fast_dev_run=True).fit(module)
    assert (finder.batch_size, finder.plan, module.batch_size, sees.sizes) == (None, None, 2, [2])


def test_the_callback_from_the_modules_own_configure_callbacks(sees: Sees) -> None:
    """It serves as one that was passed to the trainer."""

    class Configures(Net):
        def configure_callbacks(self) -> Any:
            return BatchFinder(max_batch_size=8, cache=False)

    nets.trainer(callbacks=[sees]).fit(Configures())
    assert sees.sizes == [8, 8, 8]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_is_the_one_started_with_the_size(stage: str) -> None:
    """Shuffling, dropout and random numbers are those of a run whose loader had the size."""
    seen = []
    for size, finders in ((2, [BatchFinder(max_batch_size=8, cache=False, also=[stage])]), (8, [])):
        pl.seed_everything(5, verbose=False)
        seen.append(Sees())
        getattr(nets.trainer(callbacks=[*finders, seen[-1]]), stage)(Evaluated(size))
    assert seen[0].sizes == [8, 8, 8]
    assert seen[1].sizes == [8, 8, 8]
    assert seen[0].values == seen[1].values


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_twice(stage: str, sees: Sees) -> None:
    """The second looks the answer up; without `also`, the loader's size is the user's."""
    finder = BatchFinder(max_batch_size=8, also=[stage])
    trainer, module = nets.trainer(callbacks=[finder, sees]), Evaluated()
    for source in ("measured", "cache"):
        sees.sizes.clear()
        getattr(trainer, stage)(module)
        assert finder.results[stage][None].source == source
        assert sees.sizes == [8, 8, 8]
    finder.options = replace(finder.options, also=())
    sees.sizes.clear()
    getattr(trainer, stage)(module)
    assert sees.sizes == [2] * 12


def test_a_fit_then_an_evaluation_of_the_same_stage(sees: Sees) -> None:
    """The size for validation within the fit is taken back before the evaluation finds its own."""
    finder = BatchFinder(max_batch_size=4, also=["validate"], cache=False)
    trainer, module = nets.trainer(callbacks=[finder, sees], num_sanity_val_steps=0), Evaluated()
    trainer.fit(module)
    assert sees.sizes == [4] * 12
    finder.options = replace(finder.options, max_batch_size=8)
    sees.sizes.clear()
    trainer.validate(module)
    assert sees.sizes == [8, 8, 8]


def test_many_fits_do_not_pile_up(sees: Sees) -> None:
    """Each takes back what the one before it set: the loaders' sources are as they were, with one size on top."""
    finder = BatchFinder(max_batch_size=4, also=["validate"], cache=False)
    trainer, module = nets.trainer(callbacks=[finder, sees], num_sanity_val_steps=0), Evaluated()
    before = [trainer.fit_loop._data_source, trainer.fit_loop.epoch_loop.val_loop._data_source]
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module)
    sources: list[Any] = [trainer.fit_loop._data_source, trainer.fit_loop.epoch_loop.val_loop._data_source]
    assert all(source is other for source, other in zip(sources, before, strict=True))
    assert sees.sizes == [4] * 24
    assert all("dataloader" in vars(source) for source in sources)
    for applied in finder._applied.values():
        applied.undo()
    assert not any("dataloader" in vars(source) for source in sources)


def test_an_epoch_too_short_for_the_target_is_explained() -> None:
    """With the numbers of the run, once, as training starts."""
    with pytest.warns(UserWarning, match="An epoch has") as caught:
        nets.trainer(callbacks=[BatchFinder(64, max_batch_size=8, cache=False)]).fit(Net())
    assert [str(warning.message) for warning in caught if "An epoch" in str(warning.message)] == [
        "An epoch has 3 micro-batches of 8 samples on each device, and 8 are needed for the target batch size of 64. "
        "Lightning steps at the end of each epoch, so that every optimizer step sees at most 24 samples. Their "
        "gradients are averaged correctly, but for steps of one size choose a target_batch_size of at most 24."
    ]


def test_two_finders_are_refused() -> None:
    """Each would set the size. Lightning itself refuses two of one class, since both have a state."""

    class Mine(BatchFinder):
        pass

    with pytest.raises(RuntimeError, match="more than one stateful callback of type `BatchFinder`"):
        nets.trainer(callbacks=[BatchFinder(), BatchFinder()])
    with pytest.raises(MisconfigurationException) as caught:
        nets.trainer(callbacks=[BatchFinder(cache=False), Mine(cache=False)]).fit(Net())
    assert str(caught.value) == (
        "This trainer has more than one BatchFinder, and each would set the batch size. Keep one of them."
    )


class NeverValidates(Evaluated):
    """Trains, and has no room to validate."""

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise torch.OutOfMemoryError(MESSAGE)


def test_a_search_for_validation_that_fails_does_not_lower_the_record_of_training() -> None:
    """Its out-of-memory is not training's, nothing is said of lowering, and the next start uses the record."""
    trainer = nets.trainer(callbacks=[BatchFinder(max_batch_size=8, also=["validate"])])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "BatchFinder")
        with pytest.raises(OutOfMemory, match="batch size 1 does not fit"):
            trainer.fit(NeverValidates())
    finder = BatchFinder(max_batch_size=8)
    nets.trainer(callbacks=[finder], limit_val_batches=0).fit(NeverValidates())
    assert [(o.source, o.max_batch_size) for o in finder.results["fit"].values()] == [("cache", 8)]


def test_validation_that_runs_out_of_memory_does_not_lower_the_record_of_training() -> None:
    """Neither in the sanity check nor later: it has no room at any size; sizes are tried without, which is said."""
    for options in ({}, {"num_sanity_val_steps": 0}):
        trainer = nets.trainer(callbacks=[BatchFinder(max_batch_size=8)], **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "BatchFinder: fit ran out")
            said = "tried without the fit's validation, which runs out of memory with its batches of 2 at any size"
            with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match=said):
                trainer.fit(NeverValidates())


class Experience(NamedTuple):
    """One of the many small objects that a replay buffer holds."""

    state: torch.Tensor
    action: int
    reward: float


class Replays(Net):
    """Keeps what it has seen, as Lightning's DQN example does."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.buffer = deque((Experience(torch.zeros(2), step, step / 7) for step in range(seen)), maxlen=20_000)
        self.rewards = [0.5] * seen


def test_a_key_is_made_whatever_a_module_and_a_trainer_hold() -> None:
    """10,000 small objects, then more, and gradients that are clipped at infinity, which JSON does not have."""
    sources = []
    for seen in (10_000, 10_001):
        finder = BatchFinder(max_batch_size=8)
        nets.trainer(callbacks=[finder], gradient_clip_val=float("inf")).fit(Replays(seen))
        sources += [found.source for found in finder.results["fit"].values()]
    assert sources == ["measured", "cache"]
