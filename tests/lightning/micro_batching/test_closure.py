"""A batch in micro-batches: one optimizer step, the whole batch's gradient, and its values logged once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torch.utils.data import DataLoader

from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.micro_batching.closure import LogAggregation
from batchfinder.lightning.micro_batching.micro_batch import MicroBatch
from tests.lightning import nets
from tests.lightning.varied_lengths import Given, Reader, Varied, collate


class Watch(pl.Callback):
    """Writes down what a run's callbacks see."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.hooks: Counter[str] = Counter()
        self.losses: list[float] = []
        self.steps: list[tuple[int, int]] = []
        self.metrics: list[dict[str, float]] = []
        self.samples: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, dict):
            self.samples.append(batch["input_ids"].flatten().tolist())

    def on_before_zero_grad(self, *args: Any) -> None:
        self.hooks["zero_grad"] += 1

    def on_before_backward(self, *args: Any) -> None:
        self.hooks["before_backward"] += 1

    def on_after_backward(self, *args: Any) -> None:
        self.hooks["after_backward"] += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.gradients.append(
            torch.cat([gradient.flatten() for gradient in gradients]) if gradients else torch.zeros(1)
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.steps.append((batch_idx, trainer.global_step))
        self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def fit(module: Any, finder: pl.Callback | None = None, own: tuple[Any, ...] = (), **options: Any) -> Watch:
    """Train two epochs from one seed; what the run's callbacks saw."""
    watch = Watch()
    callbacks = [watch, *own] if finder is None else [finder, watch, *own]
    trainer = nets.trainer(callbacks=callbacks, **{"max_epochs": 2, "log_every_n_steps": 1, **options})
    pl.seed_everything(2, verbose=False)
    trainer.fit(module)
    watch.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return watch


def finder(largest: int, **options: Any) -> BatchFinder:
    """One whose micro-batches have at most `largest` samples."""
    return BatchFinder(**{"split_batches": True, "max_batch_size": largest, "cache": False, **options})


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two gradients are within 1e-6 of the larger one."""
    return bool((one - other).norm() <= 1e-6 * other.norm())


@pytest.mark.parametrize("reduction", ["samples", "tokens", "sum"])
def test_the_gradient_is_that_of_the_whole_batch(reduction: Any) -> None:
    """For 1 to 7 micro-batches, sorted by length or in order: gradients, weights, losses, logs, steps and data."""
    whole_module = Reader(reduction, batch_size=7, rows=18)
    whole = fit(whole_module)
    for in_order in (True, False):
        for largest in (7, 4, 3, 2, 1):
            module = Reader(reduction, batch_size=7, rows=18)
            split = fit(module, Given({16: largest}, reduction, in_order))
            assert max(module.sizes) == largest
            assert all(close(one, other) for one, other in zip(split.gradients, whole.gradients, strict=True))
            assert split.steps == whole.steps
            assert split.samples == whole.samples
            assert split.hooks["zero_grad"] == whole.hooks["zero_grad"] == 6
            assert split.hooks["before_backward"] == split.hooks["after_backward"] == len(module.sizes)
            for one, other in zip(module.parameters(), whole_module.parameters(), strict=True):
                assert close(one, other)
            if reduction == "sum":  # a sum is logged as the micro-batches' mean, see docs/variable.md
                continue
            assert split.losses == pytest.approx(whole.losses, rel=1e-6)
            for ours, theirs in zip(split.metrics, whole.metrics, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_target_that_nothing_divides() -> None:
    """254 samples with 64 fitting are four micro-batches, and make one gradient of all of them."""
    whole = fit(Reader(batch_size=254, rows=254), max_epochs=1)
    module = Reader(rows=254)
    split = fit(
        module,
        BatchFinder(254, split_batches="in_order", weight="tokens", seq_lens=[16], max_batch_size=64, cache=False),
        max_epochs=1,
    )
    assert module.sizes == [64, 64, 63, 63]
    assert close(split.gradients[0], whole.gradients[0])


def test_sorted_micro_batches_are_fewer_and_shorter() -> None:
    """Each micro-batch has the size of its own longest sample, and is padded no further."""

    class Shapes(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            shapes.append(tuple(batch["input_ids"].shape))
            return super().training_step(batch, batch_idx)

    shapes: list[tuple[int, ...]] = []
    sizes: dict[int | None, int] = {4: 16, 8: 8, 16: 4}
    fit(Shapes(batch_size=16, rows=16), Given(sizes), max_epochs=1)
    assert sum(samples for samples, _ in shapes) == 16
    assert [length for _, length in shapes] == sorted((length for _, length in shapes), reverse=True)
    assert all(samples <= sizes[next(size for size in sizes if size >= length)] for samples, length in shapes)
    by_length, shapes = shapes, []
    fit(Shapes(batch_size=16, rows=16), Given(sizes, in_order=True), max_epochs=1)
    assert [samples for samples, _ in shapes] == [4, 4, 4, 4]
    assert len(by_length) < 4
    assert sum(samples * length for samples, length in by_length) < 16 * 16 * 0.75


class Silent(Reader):
    """Returns None, a dict or a tensor by turns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            return None
        return {"loss": loss, "size": len(batch["input_ids"])} if batch_idx == 1 else loss


class Outputs(pl.Callback):
    """Writes down what a batch's end is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: float(value) for name, value in outputs.items()})


def test_what_a_training_step_may_return() -> None:
    """None leaves the batch out, as without splitting; of a dict the loss is the batch's, the rest the last one's."""
    runs = []
    for ours in (None, Given({16: 3}, in_order=True)):
        outputs, module = Outputs(), Silent()
        trainer = nets.trainer(callbacks=[outputs] if ours is None else [ours, outputs])
        pl.seed_everything(2, verbose=False)
        trainer.fit(module)
        runs.append((outputs.seen, module))
    (whole, one), (split, other) = runs
    assert whole[0] == split[0] == {}
    assert split[1]["loss"] == pytest.approx(whole[1]["loss"])
    assert (whole[1]["size"], split[1]["size"]) == (8, 2)
    assert all(close(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"max_steps": 4, "max_epochs": -1},
        {"limit_train_batches": 2},
    ],
    ids=["clip by norm", "clip by value", "max_steps", "limited"],
)
def test_settings_of_the_trainer_mean_what_they_meant(options: dict[str, Any]) -> None:
    """Clipping sees the whole gradient; max_steps and limits count batches."""
    runs = []
    for ours in (None, Given({16: 3})):
        module = Reader(optimizer=torch.optim.AdamW)
        runs.append((fit(module, ours, **options), module))
    (whole, one), (split, other) = runs
    assert split.steps == whole.steps
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)


class Scheduled(Reader):
    """One cycle of the learning rate over the run, as long as the trainer says that it is."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_target_is_what_the_loader_gives() -> None:
    """The loader gets target_batch_size, one optimizer step each; schedulers are as long as that makes the run."""
    whole_module = Scheduled(batch_size=12)
    whole = fit(whole_module)
    module, ours = Scheduled(batch_size=4), finder(5, weight="tokens", target_batch_size=12)
    split = fit(module, ours)
    assert (ours.batch_size, ours.plan, ours.micro_batch_sizes) == (12, None, {16: 5})
    assert split.steps == whole.steps
    assert split.samples == whole.samples
    assert all(close(one, other) for one, other in zip(split.gradients, whole.gradients, strict=True))
    schedulers = [m.lr_schedulers() for m in (module, whole_module)]
    assert [scheduler.total_steps for scheduler in schedulers] == [4, 4]
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


class Half(Reader):
    """With a GradScaler, on a CPU."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)


def test_a_gradient_scaler_scales_each_micro_batch() -> None:
    """Scaled losses, unscaled once: the same weights but for rounding, and the same scale."""
    runs = []
    for ours in (None, Given({16: 3})):
        module = Half()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        plugin.autocast_context_manager = lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)
        fit(module, ours, plugins=[plugin])
        runs.append((module, scaler.get_scale()))
    (one, scale), (other, same) = runs
    assert scale == same == 2.0**13
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_what_is_logged_is_the_batchs() -> None:
    """A mean, a maximum, a minimum and a sum; on each step and over the epoch, whatever the micro-batches."""

    class Logs(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            lengths = batch["attention_mask"].sum(1).double()
            for name, reduce in (("mean", torch.mean), ("max", torch.max), ("min", torch.min), ("sum", torch.sum)):
                value = {"mean": lengths.mean, "max": lengths.amax, "min": lengths.amin, "sum": lengths.sum}[name]()
                self.log(name, value, on_step=True, on_epoch=True, reduce_fx=reduce)
            self.log("count", float(len(lengths)), on_step=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            self.log("one", 1.0, on_epoch=True)

    whole, split = fit(Logs("samples")), fit(Logs("samples"), Given({16: 3}, "samples"))
    for ours, theirs in zip(split.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert {"mean_step", "max_step", "min_step", "sum_step", "count", "mean_epoch"} <= whole.metrics[-1].keys()


def test_nothing_is_left_after_the_fit() -> None:
    """The loop makes its own closures, the optimizer takes its own steps, the loader has its own size."""
    module, ours = Reader(), finder(3, weight="tokens", target_batch_size=6)
    trainer = nets.trainer(callbacks=[ours])
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    trainer.fit(module)
    assert "_make_closure" not in vars(loop)
    assert "step" not in vars(trainer.optimizers[0])
    assert "update_metrics" not in vars(trainer.fit_loop.epoch_loop._results)
    ours.options = replace(ours.options, split_batches=False, target_batch_size=None, max_batch_size=4)
    module.sizes.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert set(module.sizes[-6:]) == {4}


class Pairs(Reader):
    """Each sample against the others of its batch, with a batch norm."""

    def __init__(self) -> None:
        super().__init__("samples")
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)

    def loss(self, batch: Any) -> Tensor:
        x = torch.nn.functional.normalize(self.norm(self.embed(batch["input_ids"]).transpose(1, 2)).mean(2), dim=1)
        return torch.nn.functional.cross_entropy(5 * x @ x.T, torch.arange(len(x)))


def warned(caught: Any) -> list[str]:
    """What BatchFinder warned of."""
    return [str(warning.message) for warning in caught if "BatchFinder" in str(warning.message)]


def test_a_loss_over_pairs_and_a_batch_norm_are_told_of_before_training() -> None:
    """In one warning; what the look at them changed is put back."""
    module = Pairs()
    before = [tensor.clone() for tensor in (*module.parameters(), *module.buffers())]

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            now = (*module.parameters(), *module.buffers())
            assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
            assert module.training
            assert "log" not in vars(module)
            assert trainer.callback_metrics == {}

    with pytest.warns(UserWarning, match="BatchFinder") as caught:
        fit(module, finder(3), (Look(),), max_epochs=1)
    (words,) = warned(caught)
    assert words.startswith(
        "BatchFinder splits batches, which changes what is trained: norm (BatchNorm1d) look at all samples of a "
        "micro-batch together, which are fewer than the batch's; a GroupNorm or LayerNorm would not. Also: the loss of "
    )
    assert "in-batch negatives" in words


def test_a_wrong_weight_is_told_of() -> None:
    """A mean over tokens that is weighed by samples: the warning names the weight that would be right."""
    with pytest.warns(UserWarning, match="BatchFinder") as caught:
        fit(Reader("tokens"), finder(3), max_epochs=1)
    (words,) = warned(caught)
    assert words.endswith("With weight='tokens' it would be the same: pass that.")


def test_what_cannot_be_split_is_refused() -> None:
    """Manual optimization, accumulation and its scheduler: each with what to do instead."""

    class Manual(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 2})
    cases: list[tuple[Callable[[], Any], dict[str, Any], tuple[Any, ...], str]] = [
        (
            Manual,
            {},
            (),
            "BatchFinder(split_batches=True) cannot split batches for Manual, which optimizes manually: its "
            "training_step decides what runs backward and when to step. Leave split_batches out, or call "
            "batchfinder.split_batch in "
            "training_step.",
        ),
        (
            Reader,
            {"accumulate_grad_batches": 4},
            (),
            "BatchFinder(split_batches=True) takes one optimizer step for each batch, and this trainer accumulates 4 "
            "batches. Leave Trainer(accumulate_grad_batches=) at 1, and pass BatchFinder target_batch_size=, the "
            "samples of an optimizer step.",
        ),
        (
            Reader,
            {},
            (scheduler,),
            "BatchFinder(split_batches=True) takes one optimizer step for each batch, and "
            "GradientAccumulationScheduler one for several. Remove the scheduler, and pass target_batch_size=, the "
            "samples of an optimizer step.",
        ),
    ]
    for make, options, own, words in cases:
        with pytest.raises(MisconfigurationException) as raised:
            fit(make(), finder(3), own, **options)
        assert str(raised.value) == words


def test_a_batch_sampler_of_the_users_is_left_alone() -> None:
    """Batches of whatever size it gives are split; nobody asks the loader for another size."""

    class Sampled(Reader):
        def train_dataloader(self) -> Any:
            batches = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12]]
            return DataLoader(Varied(24), batch_sampler=batches, collate_fn=collate)

    module, ours = Sampled("samples"), finder(3, split_batches="in_order")
    whole = fit(Sampled("samples"))
    split = fit(module, ours)
    assert ours.batch_size is None
    assert split.samples == whole.samples
    assert module.sizes[-7:] == [3, 2, 2, 2, 2, 2][-7:] or module.sizes[-6:] == [3, 2, 2, 2, 2, 2]
    assert all(close(one, other) for one, other in zip(split.gradients, whole.gradients, strict=True))


def test_the_sizes_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """One line with the size of each length."""
    with caplog.at_level(logging.INFO, logger="lightning_utilities.core.rank_zero"):
        fit(Reader("samples"), finder(6, seq_lens=[16, 8]), max_epochs=1)
    assert (
        "BatchFinder: batches are split into micro-batches of at most 6 samples up to seq_len 16, 6 samples up to "
        "seq_len 8." in caplog.messages
    )


def logged(values: list[float], samples: list[int], shares: list[float], skipped: int = 0, **options: Any) -> Any:
    """What Lightning has after micro-batches logged values."""
    results = _ResultCollection(training=True)
    results.batch = torch.zeros(sum(samples) + skipped)
    aggregation = LogAggregation(results)
    with aggregation.collecting():
        aggregation.skipped += skipped
        for value, count, share in zip(values, samples, shares, strict=True):
            aggregation.start_micro_batch(MicroBatch(torch.zeros(count), 1.0, share, None, range(count)))
            results.log("training_step", "a", torch.tensor(value), on_step=True, on_epoch=True, **options)
        assert not results["training_step.a"].update_called
    aggregation.log()
    metric = results["training_step.a"]
    assert len(results.batch) == sum(samples) + skipped
    return metric


def test_a_mean_is_by_shares_and_counts_samples() -> None:
    """The step's value is that of the batch; over an epoch the batch counts as many samples as it has."""
    metric = logged([1.0, 4.0], [3, 1], [0.25, 0.75])
    assert float(metric._forward_cache) == 3.25
    assert (float(metric.value), int(metric.cumulated_batch_size)) == (13.0, 4)


def test_samples_that_were_skipped_are_the_batchs() -> None:
    """Those of micro-batches in which nothing counts; not where the user says how many there are."""
    assert int(logged([1.0], [3], [1.0], skipped=2).cumulated_batch_size) == 5
    assert int(logged([1.0], [3], [1.0], skipped=2, batch_size=8).cumulated_batch_size) == 8


def test_other_reductions() -> None:
    """Maximum, minimum and sum of all."""
    values, samples, shares = [1.0, 4.0, 2.0], [1, 1, 1], [1 / 3] * 3
    for reduce, value in ((torch.max, 4.0), (torch.min, 1.0), (torch.sum, 7.0)):
        metric = logged(values, samples, shares, reduce_fx=reduce)
        assert float(metric._forward_cache) == value


def test_shares_of_nothing_are_equal() -> None:
    """Where no micro-batch that logged has a share, each counts the same."""
    assert float(logged([1.0, 3.0], [1, 1], [0.0, 0.0])._forward_cache) == 2.0
