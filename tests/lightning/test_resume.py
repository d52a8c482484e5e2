"""A run that goes on from a checkpoint goes on as it would have without the callback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from batchfinder.cache import Store
from batchfinder.cache.validity import lower
from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.identical_runs import assert_identical, two_runs


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("in_the_middle", [False, True], ids=["after an epoch", "within an epoch"])
def test_a_resumed_run_is_bit_identical(scheduled: bool, in_the_middle: bool, tmp_path: Path) -> None:
    """Weights, optimizer, scheduler and loops are the checkpoint's, accumulation and mixed precision included."""

    def make(size: int) -> nets.ConvNet:
        return nets.ConvNet(size, rows=64, side=6, width=4, scheduled=scheduled)

    pl.seed_everything(3, verbose=False)
    nets.trainer(
        callbacks=[ModelCheckpoint(tmp_path, filename="it", every_n_train_steps=3 if in_the_middle else 4)],
        enable_checkpointing=True,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        max_epochs=3,
        max_steps=5 if scheduled else 4,
    ).fit(make(8))
    found, direct = two_runs(
        make,
        target=16,
        feed=lambda size: {"ckpt_path": tmp_path / "it.ckpt"},
        precision="bf16-mixed",
        max_epochs=3,
        max_steps=5 if scheduled else -1,
    )
    assert_identical(found, direct)
    already = 3 if in_the_middle else 4
    assert len(found.module.losses) == 2 * (found.trainer.global_step - already) > 0


def interrupted(folder: Path, finder: BatchFinder, **options: Any) -> tuple[Path, list[int]]:
    """Train for an epoch; the checkpoint, and the sizes that were tried."""
    nets.trainer(callbacks=[finder, ModelCheckpoint(folder, filename="it")], enable_checkpointing=True, **options).fit(
        nets.ConvNet(2, rows=64, side=6, width=4)
    )
    return folder / "it.ckpt", [trial.batch_size for trial in finder.results["fit"][None].trials]


def resume(checkpoint: Path, finder: BatchFinder, **options: Any) -> nets.ConvNet:
    """Go on with a second epoch."""
    module = nets.ConvNet(2, rows=64, side=6, width=4)
    nets.trainer(callbacks=[finder], max_epochs=2, **options).fit(module, ckpt_path=checkpoint)
    return module


def test_a_resumed_run_keeps_the_checkpoints_size_without_a_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once, and no other size is; the plan is the same. The state is JSON texts and numbers."""
    first, second = BatchFinder(16, max_batch_size=8, cache=False), BatchFinder(16, max_batch_size=8, cache=False)
    checkpoint, tried = interrupted(tmp_path, first)
    assert len(tried) > 1
    with caplog.at_level("INFO"):
        module = resume(checkpoint, second)
    (found,) = second.results["fit"].values()
    assert [trial.batch_size for trial in found.trials] == [8]
    assert (found.source, second.batch_size, str(second.plan)) == ("checkpoint", 8, str(first.plan))
    assert len(module.losses) == 8
    assert any("from the checkpoint, certified with 1 probe" in line for line in caplog.messages)
    state = torch.load(checkpoint, weights_only=True)["callbacks"]["BatchFinder"]
    assert (state["batch_size"], [type(text) for text in state["records"]]) == (8, [str])


def test_a_size_does_not_grow_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """The cache has a larger one by now, found with more memory; the run goes on with its own."""
    finder = BatchFinder(max_batch_size=64, tolerance=0)
    checkpoint, _ = interrupted(tmp_path, finder)
    (record,) = Store().records()
    Store().put(record.key, replace(record.result, max_batch_size=2 * record.result.max_batch_size))
    again = BatchFinder(max_batch_size=64, tolerance=0)
    resume(checkpoint, again)
    assert again.batch_size == finder.batch_size


def test_a_size_that_ran_out_of_memory_since_is_not_used_again(tmp_path: Path) -> None:
    """The lowered record is smaller than the checkpoint's, and is believed."""
    finder = BatchFinder(max_batch_size=32)
    checkpoint, _ = interrupted(tmp_path, finder)
    (record,) = Store().records()
    lower(Store().entry(record.key), 32, "CUDA out of memory.", to=16)
    again = BatchFinder(max_batch_size=32)
    resume(checkpoint, again)
    assert again.batch_size == 16


def test_another_question_is_searched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint's size for another cap says nothing; a line says that it is not used."""
    checkpoint, _ = interrupted(tmp_path, BatchFinder(max_batch_size=8, cache=False))
    again = BatchFinder(max_batch_size=16, cache=False)
    with caplog.at_level("INFO"):
        resume(checkpoint, again)
    assert (again.batch_size, again.results["fit"][None].source) == (16, "measured")
    assert any("was found for another device, model, data, option or version" in line for line in caplog.messages)


def test_a_state_that_is_damaged_is_searched(tmp_path: Path) -> None:
    """With a warning that says what is wrong with it."""
    checkpoint, _ = interrupted(tmp_path, BatchFinder(max_batch_size=8, cache=False))
    saved = torch.load(checkpoint, weights_only=False)
    saved["callbacks"]["BatchFinder"]["records"] = ["{}"]
    torch.save(saved, checkpoint)
    again = BatchFinder(max_batch_size=8, cache=False)
    with pytest.warns(UserWarning, match="cannot read the checkpoint's batch size: it is JSON, but not a cache record"):
        resume(checkpoint, again)
    assert again.results["fit"][None].source == "measured"
