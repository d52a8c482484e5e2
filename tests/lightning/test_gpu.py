"""The callback on a CUDA device: what it promises on the CPU, with the memory limited to a share of the card's."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from batchfinder.lightning.callback import BatchFinder
from batchfinder.results import Trial
from batchfinder.units import GIB
from tests.lightning import nets
from tests.lightning.identical_runs import SIZE, assert_identical, two_runs

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():  # PyTorch reads it once, at the process's first matrix product on a card
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LIMIT_BYTES = 2 * GIB
ROWS = 4096


class Watch(pl.Callback):
    """Notes the device's memory and random numbers when it is its turn on fit start."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.synchronize()
        self.allocated_bytes = torch.cuda.memory_allocated()
        self.reserved_bytes = torch.cuda.memory_reserved()
        self.random = torch.cuda.get_rng_state().tolist()
        self.fraction = torch.cuda.get_per_process_memory_fraction()


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    """Each test starts with what the process cannot give back, and with the whole card."""
    _clear()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    _clear()


@pytest.fixture
def limited(empty_device: None) -> None:
    """The process may reserve 2 GiB, training as well as tries."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def text(batch_size: int = 2) -> nets.Transformer:
    """Takes some 5 MB for each sample, so that a few hundred fit into 2 GiB."""
    return nets.Transformer(batch_size, rows=ROWS, seq_len=128, width=256)


def fit(module: Any, callbacks: list[Any], **options: Any) -> pl.Trainer:
    """Train on the device."""
    trainer = nets.trainer(accelerator="gpu", callbacks=callbacks, **options)
    trainer.fit(module)
    return trainer


def trials(finder: BatchFinder) -> tuple[Trial, ...]:
    """What was tried."""
    (outcome,) = finder.results["fit"].values()
    return outcome.trials


@pytest.mark.parametrize(
    ("net", "precision"),
    [
        (nets.Transformer, "bf16-mixed"),
        (nets.ConvNet, "16-mixed"),
        *(
            pytest.param(net, precision, marks=pytest.mark.exhaustive)
            for net in (nets.Transformer, nets.ConvNet)
            for precision in ("32-true", "16-mixed" if net is nets.Transformer else "bf16-mixed")
        ),
    ],
)
def test_losses_and_weights_equal_those_of_a_run_started_with_the_sizes(
    monkeypatch: pytest.MonkeyPatch, net: type[nets.Module], precision: str
) -> None:
    """Bit for bit with deterministic kernels, with accumulation, a scheduler, and the scale of 16-mixed."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Lightning sets it for deterministic kernels, for good
    try:
        found, direct = two_runs(
            lambda size: net(size, scheduled=True),
            target=4 * SIZE,
            accelerator="gpu",
            precision=precision,
            deterministic=True,
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert_identical(found, direct)
    if precision == "16-mixed":
        one, other = (run.trainer.precision_plugin.scaler.state_dict() for run in (found, direct))  # type: ignore[attr-defined]
        assert one == other


@pytest.mark.usefixtures("limited")
def test_the_answer_trains_and_a_tenth_more_does_not() -> None:
    """In at most 6 tries, of which one runs out of memory; the second start tries the answer alone."""
    finder = BatchFinder()
    trainer = fit(text(), [finder], max_epochs=-1, max_steps=50)
    answer = finder.batch_size
    assert trainer.global_step == 50
    assert answer is not None
    assert 20 < answer < ROWS / 1.2
    tried = trials(finder)
    assert len(tried) <= 6
    assert sum(not trial.fits for trial in tried) <= 1
    assert answer in {trial.batch_size for trial in tried if trial.fits}
    del trainer
    _clear()

    again = BatchFinder()
    fit(text(), [again], max_epochs=-1, max_steps=1)
    assert again.batch_size == answer
    assert [trial.batch_size for trial in trials(again)] == [answer]
    _clear()

    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    try:
        fit(text(math.ceil(1.1 * answer)), [], max_epochs=-1, max_steps=5)
    except torch.OutOfMemoryError:
        return
    # It may still run by giving back all cached memory in each step, which counts as not fitting.
    assert torch.cuda.memory_stats()["num_alloc_retries"] > retries


@pytest.mark.usefixtures("limited")
def test_a_search_starts_from_a_prediction_unless_it_is_not_wanted() -> None:
    """From about the answer, in a process that has trained as well; else from one sample."""
    for _ in range(2):
        fit(text(), [finder := BatchFinder(cache=False)], max_epochs=-1, max_steps=1)
        assert finder.batch_size is not None
        assert trials(finder)[0].batch_size > finder.batch_size / 2
        _clear()
    fit(text(), [finder := BatchFinder(cache=False, predict=False)], max_epochs=-1, max_steps=1)
    assert trials(finder)[0].batch_size == 1


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_nothing_of_the_search_stays_on_the_device(precision: str) -> None:
    """As much is allocated as before, no more is reserved, and random numbers and limit are what they were."""
    before, after = Watch(), Watch()
    fit(text(), [before, BatchFinder(cache=False), after], precision=precision, max_epochs=-1, max_steps=1)
    assert after.allocated_bytes == before.allocated_bytes
    assert after.reserved_bytes <= before.reserved_bytes
    assert after.random == before.random
    assert after.fraction == before.fraction


BEGUN: list[tuple[int, int]] = []
"""The size of each batch, and what is allocated as its step begins; no attribute, which tries would restore."""


class Validated(nets.Transformer):
    """With validations, one of which is a sanity check."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        BEGUN.append((len(batch["input_ids"]), torch.cuda.memory_allocated()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_training_begins_with_what_a_try_begins_with(limited: None) -> None:
    """A sanity check leaves cuBLAS's workspace on the card, which lies elsewhere than where training makes its own."""
    BEGUN.clear()
    module = Validated(rows=ROWS, seq_len=128, width=256)
    trainer = fit(module, [BatchFinder(cache=False)], num_sanity_val_steps=2, limit_train_batches=3)
    assert trainer.global_step == 3
    tries, (size, allocated) = BEGUN[:-3], BEGUN[-3]
    assert allocated == min(bytes_before for tried, bytes_before in tries if tried == size)


class ValidatesMore(Validated):
    """Ten samples for each of a training batch's, as its hook makes them of the batch size."""

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Text(self.rows, self.seq_len), batch_size=10 * self.batch_size)


def test_a_validation_that_grows_with_the_batch_size_limits_it(limited: None) -> None:
    """Sizes were tried with the validation's batch of before the search, and the fit's own ran out of memory."""
    finder = BatchFinder(cache=False)
    module = ValidatesMore(rows=ROWS, seq_len=128, width=256)
    trainer = fit(module, [finder], num_sanity_val_steps=1, max_steps=2, limit_val_batches=1)
    assert trainer.global_step == 2
    refused = [trial for trial in trials(finder) if not trial.fits]
    assert refused, "nothing limits it"


class KeepsOutputs(Validated):
    """Keeps what each of 6,800 samples that it validates comes to, some 128 KiB, and puts all of it together."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(batch_size, rows=ROWS, seq_len=128, width=256)
        self.outputs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append({"hidden": self.encoder(self.embed(batch["input_ids"]))})

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.cat([each["hidden"] for each in self.outputs]).mean())
        self.outputs.clear()

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Text(6800, self.seq_len), batch_size=self.batch_size)


def test_a_validation_that_keeps_its_outputs_is_tried_as_a_whole(
    limited: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Two batches of it say nothing of what is there in the end."""
    finder = BatchFinder(cache=False, min_batch_size=16)
    trainer = fit(KeepsOutputs(), [finder], num_sanity_val_steps=0, limit_train_batches=2, max_epochs=1)
    assert trainer.global_step == 2
    assert "KeepsOutputs.outputs; sizes were tried with a whole one" in caplog.text
    assert "gave its cache back" not in caplog.text
    assert any(not trial.fits for trial in trials(finder))


EPOCHS: list[int] = []
"""Of each step of a try; no attribute, which tries would restore."""


class Numbered(nets.Transformer):
    """Notes the epoch of each step until training starts."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if EPOCHS[-1:] != [-1]:
            EPOCHS.append(self.trainer.current_epoch)
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        if self.trainer.callbacks:  # a try has none
            EPOCHS.append(-1)


@pytest.mark.parametrize(("rows", "epochs"), [(130, [0, 1, 2]), (128, [0, 1])])
def test_a_try_has_the_epochs_that_begin_otherwise(rows: int, epochs: list[int]) -> None:
    """The second, and where the first leaves a smaller batch's blocks in the cache, the third, which has both."""
    EPOCHS.clear()
    finder = BatchFinder(cache=False, predict=False, min_batch_size=16, max_batch_size=16, budget=LIMIT_BYTES)
    fit(Numbered(rows=rows, seq_len=16), [finder], max_epochs=3, limit_val_batches=0)
    assert len(trials(finder)) == 1
    assert sorted(set(EPOCHS)) == [-1, *epochs]


RESERVED: list[int] = []
"""As each step of a fit begins, its tries among them."""


class Reserved(Validated):
    """Notes what the cache holds."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        RESERVED.append(torch.cuda.memory_reserved())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("rows", "emptied"), [(4096, False), (128, True)])
def test_a_try_empties_the_cache_as_often_as_short_epochs_do(rows: int, emptied: bool) -> None:
    """Further steps leave the cache in pieces that an epoch of two never meets."""
    RESERVED.clear()
    finder = BatchFinder(cache=False, predict=False, min_batch_size=64, max_batch_size=64, budget=LIMIT_BYTES)
    fit(Reserved(rows=rows, seq_len=128, width=256), [finder], num_sanity_val_steps=0, max_steps=4, max_epochs=-1)
    assert len(trials(finder)) == 1
    _, second, third, fourth, *_ = RESERVED
    assert (third < second) == emptied
    assert fourth >= second


class Plain(nets.Transformer):
    """Its optimizer keeps no state, so that nothing of a step stays on the card but gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Emptied(pl.Callback):
    """What is reserved as training starts and after each step, with no gradients and no cache."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.empty_cache()
        self.reserved = [torch.cuda.memory_reserved()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.zero_grad()
        torch.cuda.empty_cache()
        self.reserved.append(torch.cuda.memory_reserved())


@pytest.mark.usefixtures("limited")
def test_a_step_leaves_no_segment_that_cannot_be_given_back() -> None:
    """One of cuBLAS's workspaces would lie in the midst of it; they have segments of their own before."""
    module, emptied = Plain(rows=ROWS, seq_len=128, width=256), Emptied()
    fit(module, [BatchFinder(cache=False), emptied], num_sanity_val_steps=0, max_epochs=-1, max_steps=2)
    assert len(emptied.reserved) == 3
    assert len(set(emptied.reserved)) == 1, emptied.reserved


def test_a_budget_limits_the_tries_and_is_gone_afterwards() -> None:
    """A large card answers for a small one: no try reserves more, and training has the whole card again."""
    watch = Watch()
    finder = BatchFinder(budget=LIMIT_BYTES, cache=False)
    fit(text(), [finder, watch], max_epochs=-1, max_steps=1)
    peaks = [trial.measurement.peak_reserved_bytes or 0 for trial in trials(finder) if trial.fits]
    assert 0.8 * LIMIT_BYTES < max(peaks) <= LIMIT_BYTES
    assert watch.fraction == 1.0


@pytest.mark.usefixtures("limited")
def test_running_out_of_memory_in_training_lowers_the_record() -> None:
    """What training takes beside the step was not there in the tries; the next start uses 5 % less, and tries it."""

    class Hoards(nets.Transformer):
        hoards = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.hoards and self.trainer.callbacks and batch_idx == 2:
                torch.empty(LIMIT_BYTES, dtype=torch.uint8, device=self.device)

    def make() -> Hoards:
        return Hoards(2, rows=ROWS, seq_len=128, width=256)

    first = BatchFinder()
    trainer = nets.trainer(accelerator="gpu", callbacks=[first], max_epochs=1)
    with pytest.warns(UserWarning, match="which the next start tries"), pytest.raises(torch.OutOfMemoryError):
        trainer.fit(make())
    del trainer
    _clear()
    Hoards.hoards = False
    fit(make(), [second := BatchFinder()], max_epochs=-1, max_steps=1)
    assert first.batch_size is not None
    assert second.batch_size == int(0.95 * first.batch_size)
    assert [trial.batch_size for trial in trials(second)] == [second.batch_size]
