"""What a person is told when the cache fails, when memory runs out in training, and when a search ends in nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.lightning.callback import BatchFinder
from batchfinder.measure import device_memory
from batchfinder.results import Verdict
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE, Bounded
from tests.measure.messages import without_figures


def warned(caught: pytest.WarningsRecorder) -> list[str]:
    """What BatchFinder warned of."""
    return [str(warning.message) for warning in caught if "BatchFinder" in str(warning.message)]


class RunsOut(Bounded):
    """Runs out of memory at the second batch of training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.callbacks:
            raise torch.OutOfMemoryError(MESSAGE)


def test_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    """The search goes on without it, and that is said once, not at reading and at writing."""
    place = tmp_path / "a file"
    place.write_text("")
    finder = BatchFinder(max_batch_size=8, cache=place)
    with pytest.warns(UserWarning, match="BatchFinder") as caught:
        nets.trainer(callbacks=[finder]).fit(Bounded())
    assert finder.batch_size == 8
    assert warned(caught) == [
        f"BatchFinder cannot use the cache at {place}: it is a file, not a directory. Results of this run are not "
        "cached. Pass BatchFinder(cache=...) a place that can be written, or cache=False."
    ]


def test_an_answer_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that can be read and not written is told of as well: the next start would search again unexplained."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="BatchFinder") as caught:
        nets.trainer(callbacks=[BatchFinder(max_batch_size=8, cache=tmp_path / "full")]).fit(Bounded())
    assert warned(caught) == [
        f"BatchFinder cannot use the cache at {tmp_path / 'full'}: No space left on device. Results of this run are "
        "not cached. Pass BatchFinder(cache=...) a place that can be written, or cache=False."
    ]


def test_out_of_memory_in_training_without_a_cache() -> None:
    """Nothing can be lowered; headroom is the advice."""
    trainer = nets.trainer(callbacks=[BatchFinder(max_batch_size=8, cache=False)])
    with pytest.warns(UserWarning, match="BatchFinder") as caught, pytest.raises(torch.OutOfMemoryError):
        trainer.fit(RunsOut())
    assert warned(caught) == [
        "BatchFinder: fit ran out of memory at batch size 8, which ran when it was tried. Leave more free with "
        "BatchFinder(headroom=0.05)."
    ]


def test_out_of_memory_in_training_with_a_cache_that_has_filled_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record cannot be lowered, so the next start would use it: that is said, with the same advice."""

    class FillsUp(RunsOut):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and self.trainer.callbacks:
                monkeypatch.setattr(os, "replace", full)
            super().on_train_batch_start(batch, batch_idx)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = nets.trainer(callbacks=[BatchFinder(max_batch_size=8, cache=tmp_path / "full")])
    with pytest.warns(UserWarning, match="BatchFinder") as caught, pytest.raises(torch.OutOfMemoryError):
        trainer.fit(FillsUp())
    assert warned(caught) == [
        "BatchFinder: fit ran out of memory at batch size 8, which ran when it was tried. Leave more free with "
        f"BatchFinder(headroom=0.05). The cache at {tmp_path / 'full'} still says 8, since it cannot be written: No "
        "space left on device."
    ]


def test_another_error_in_training_is_not_commented_on(recwarn: pytest.WarningsRecorder) -> None:
    """Though it speaks of memory."""

    class Buggy(Bounded):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and self.trainer.callbacks:
                raise RuntimeError("the memory of an elephant")

    with pytest.raises(RuntimeError, match="elephant"):
        nets.trainer(callbacks=[BatchFinder(max_batch_size=8)]).fit(Buggy())
    assert warned(recwarn) == []


class Thrashing(Bounded):
    """Makes the allocator try again above a number of samples. Only CUDA's does, so it is told of here."""

    fits_well = 5
    retries = 0

    def loss(self, batch: Any) -> torch.Tensor:
        Thrashing.retries += len(batch[0]) > self.fits_well
        return super().loss(batch)


@pytest.fixture
def allocator_that_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory says how often `Thrashing` did."""
    monkeypatch.setattr(Thrashing, "retries", 0)
    monkeypatch.setattr(device_memory.HostMemory, "retries", lambda self: Thrashing.retries)


@pytest.mark.usefixtures("allocator_that_retries")
def test_thrashing_counts_as_not_fitting() -> None:
    """The largest size that runs without is the answer, and each size above says why it is not."""
    nets.trainer(callbacks=[finder := BatchFinder(max_batch_size=8, tolerance=0, cache=False)]).fit(Thrashing())
    assert finder.batch_size == 5
    failed = {t.measurement.verdict: t.measurement.message for t in finder.results["fit"][None].trials if not t.fits}
    assert failed == {Verdict.THRASHING: "it ran, but only by giving back all cached memory once"}


@pytest.mark.usefixtures("allocator_that_retries")
def test_thrashing_with_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends with what happened and what to do."""
    monkeypatch.setattr(Thrashing, "fits_well", 0)
    with pytest.raises(OutOfMemory) as caught:
        nets.trainer(callbacks=[BatchFinder(max_batch_size=8, cache=False)]).fit(Thrashing())
    assert without_figures(str(caught.value)) == (
        "batch size 1 does not fit: it ran, but only by giving back all cached memory once. Try a smaller model, a "
        "lower precision, activation checkpointing or an optimizer with less state."
    )


def test_one_sample_that_did_not_fit_before() -> None:
    """The second start knows it from the cache; with a length, shorter sequences are advised."""

    class Never(nets.Transformer):
        def loss(self, batch: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError(MESSAGE)

    advice = (
        "Try a smaller model or sequences shorter than 16, a lower precision, activation checkpointing or an optimizer "
        "with less state."
    )
    for _ in range(2):
        with pytest.raises(OutOfMemory) as caught:
            nets.trainer(callbacks=[BatchFinder(seq_lens=[16])]).fit(Never())
        assert without_figures(str(caught.value)) == f"batch size 1 does not fit: {MESSAGE} {advice}"


def test_a_system_that_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is asked for."""
    monkeypatch.setattr(device_memory, "available_bytes", lambda: None)
    with pytest.raises(InvalidValue) as caught:
        nets.trainer(callbacks=[BatchFinder(cache=False)]).fit(Bounded())
    assert str(caught.value) == (
        "budget: missing; expected a number of bytes, since this system does not say what is free."
    )


class Scaling(Bounded):
    """Scales its learning rate with the batch size."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001 * self.batch_size)


class ScalingBySteps(Scaling):
    """Asks for the length of a fit as well, so that its optimizer is made again."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class ScalingByProperty(Bounded):
    """Reads the size in a property that `setup` and `configure_optimizers` use, of the hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"batch_size": 2})

    def setup(self, stage: str) -> None:
        self.warm_up_steps = 100 // self.samples

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr) for lr in (0.001 * self.samples for _ in range(1))]

    @property
    def samples(self) -> int:
        return int(self.hparams["batch_size"])


def line_of(code: Any, offset: int) -> str:
    """A line of a function as a warning names it."""
    return f"{__file__}:{code.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Scaling, f"Scaling.configure_optimizers ({line_of(Scaling.configure_optimizers, 1)}) reads"),
        (
            ScalingByProperty,
            " and ".join(
                f"ScalingByProperty.{hook} ({line_of(ScalingByProperty.samples.fget, 2)})"
                for hook in ("setup", "configure_optimizers")
            )
            + " read",
        ),
        (ScalingBySteps, ""),
        (Bounded, ""),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_was_computed_from_the_old_size(
    module: type[Bounded], said: str, recwarn: pytest.WarningsRecorder
) -> None:
    """The line that reads it is named, unless the optimizers were made again; not where the size stays as it was."""
    trainer = nets.trainer(callbacks=[BatchFinder(max_batch_size=8, cache=False)])
    trainer.fit(net := module())
    assert warned(recwarn) == (
        [
            f"BatchFinder: {said} batch_size, which was 2 then and is 8 now: what was computed from it, such as a "
            "learning rate, is that of 2. Start with batch_size 8, or compute it in on_train_start, which comes after "
            "the search."
        ]
        if said
        else []
    )
    if isinstance(net, Scaling):
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.001 * (2 if said else 8)
    recwarn.clear()
    nets.trainer(callbacks=[BatchFinder(max_batch_size=2, cache=False)]).fit(module())
    assert warned(recwarn) == []


class Dropping(Bounded):
    """Drops an epoch's smaller last batch."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(super().train_dataloader().dataset, batch_size=self.batch_size, drop_last=True)


@pytest.mark.parametrize(("size", "said"), [(5, False), (7, True)])
def test_samples_that_drop_last_leaves_out(size: int, said: bool, recwarn: pytest.WarningsRecorder) -> None:
    """Where they are more than a tenth of an epoch, with a size that leaves out fewer."""
    nets.trainer(callbacks=[BatchFinder(max_batch_size=size, cache=False)]).fit(Dropping(rows=16))
    sentence = (
        "BatchFinder: with drop_last, batch size 7 leaves 2 of 16 samples out of each epoch. Pass max_batch_size=5 to "
        "leave out 1, or drop_last=False to the loader."
    )
    assert warned(recwarn) == ([sentence] if said else [])
