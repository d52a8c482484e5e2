"""A batch that runs out of memory is put back to its start and run again, in smaller micro-batches if need be."""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric
from torchmetrics.aggregation import CatMetric

from batchfinder.cache import Store
from batchfinder.errors import SampleDoesNotFit
from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.micro_batching import closure
from batchfinder.lightning.micro_batching.recovery import BatchSnapshot
from tests.lightning import nets
from tests.lightning.varied_lengths import MESSAGE, Given, Reader

STAGES = ("forward", "backward")


class Failing(TorchDispatchMode):
    """Counts a batch's operators in each stage, and raises in the one that is named for the batch, once."""

    def __init__(self, at: dict[int, tuple[str, int]] | None = None) -> None:
        super().__init__()
        self.at, self.stage = at or {}, ""
        self.counts: list[Counter[str]] = [Counter()]
        self.failed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stage:
            self.counts[-1][self.stage] += 1
            if self.at.get(len(self.counts)) == (self.stage, self.counts[-1][self.stage]):
                self.failed[self.stage] += 1
                self.stage = ""
                raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


class Noisy(Reader):
    """Dropout, and noise from every generator there is; a counter, a list and a buffer note each micro-batch."""

    def __init__(self, mode: Failing | None = None, **options: Any) -> None:
        super().__init__(**{"dropout": 0.2, "dtype": torch.float32, "ignored": False, **options})
        self.modes = [] if mode is None else [mode]
        self.own = torch.Generator().manual_seed(5)
        self.micro_batches = 0

    def stage(self, name: str) -> None:
        for mode in self.modes:
            mode.stage = name

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.stage("forward")
        self.micro_batches += 1
        noise = random.random() + float(np.random.rand()) + float(torch.rand(1, generator=self.own))
        loss = super().training_step(batch, batch_idx) * (1 + noise / 100)
        self.stage("")
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.stage("backward")

    def on_after_backward(self) -> None:
        self.stage("")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stage("")
        for mode in self.modes:
            mode.counts.append(Counter())


class Data(pl.Callback):
    """Which batches came, and what was logged after each."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
        self.seen.append((batch["input_ids"].flatten().tolist(), trainer.global_step, float(outputs["loss"]), logged))


def run(
    module: Reader, splits: pl.Callback, mode: Failing | None = None, epochs: int = 2, own: tuple[pl.Callback, ...] = ()
) -> Data:
    """Train from one seed; what came and what was logged."""
    data = Data()
    trainer = nets.trainer(callbacks=[splits, data, *own], max_epochs=epochs, log_every_n_steps=1)
    pl.seed_everything(2, verbose=False)
    with mode if mode is not None else torch.enable_grad():
        trainer.fit(module)
    return data


def bits(module: Reader) -> dict[str, bytes]:
    """All that training has made of a module."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    made = {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}
    for optimizer in module.trainer.optimizers if module._trainer is not None else []:
        for index, state in enumerate(optimizer.state.values()):
            made |= {f"{index}.{name}": value.numpy().tobytes() for name, value in state.items()}
    return made


@pytest.mark.slow
def test_100_failures_leave_every_bit_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward of any micro-batch, each retried at its own size: weights, states, logs, data."""
    # a full garbage collection for each would take most of the time
    monkeypatch.setattr(closure, "clear", lambda device: None)
    plain = Noisy(whole := Failing(), rows=96, batch_size=4)
    sizes: dict[int | None, int] = {8: 3, 16: 2}
    expected = run(plain, Given(sizes, recover=True), whole, 5)
    draw, at = random.Random(1), {}
    for batch in draw.sample(range(1, 121), 100):
        stage = STAGES[batch % 2]
        at[batch] = stage, draw.randint(1, whole.counts[batch - 1][stage])
    mode = Failing(at)
    module, splits = Noisy(mode, rows=96, batch_size=4), Given(sizes, recover=True)
    found = run(module, splits, mode, 5)
    assert sum(mode.failed.values()) == 100
    assert min(mode.failed[stage] for stage in STAGES) >= 20
    assert splits.table.sizes == sizes
    assert len(found.seen) == 120
    assert found.seen == expected.seen
    assert bits(module) == bits(plain)
    assert (module.micro_batches, module.sizes) == (plain.micro_batches, plain.sizes)


class Tight(pl.Callback):
    """From a step on fewer tokens fit. It takes no part in a search, nor in the module's record in the cache."""

    def __init__(self, tokens: int, since: int) -> None:
        self.tokens, self.since = tokens, since


class Limited(Reader):
    """Runs out of memory where a callback says so."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for callback in self.trainer.callbacks:
            tight = isinstance(callback, Tight) and self.trainer.global_step >= callback.since
            if tight and batch["input_ids"].numel() > callback.tokens:
                raise torch.OutOfMemoryError(MESSAGE)
        return loss


def warned(caught: Any) -> list[str]:
    """What BatchFinder warned of."""
    return [str(warning.message) for warning in caught if "BatchFinder" in str(warning.message)]


def test_smaller_micro_batches_change_rounding_alone(recwarn: pytest.WarningsRecorder) -> None:
    """From the third step on less fits: steps and data are the same, weights within rounding, the table lowered."""
    plain = Reader("tokens", rows=32)
    expected = run(plain, Given({8: 8, 16: 8}))
    module, splits = Limited(rows=32), Given({8: 8, 16: 8}, recover=True)
    found = run(module, splits, own=(Tight(70, 2),))
    assert [seen[:2] for seen in found.seen] == [seen[:2] for seen in expected.seen]
    assert [seen[2] for seen in found.seen] == pytest.approx([seen[2] for seen in expected.seen], rel=1e-6)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9)
    assert splits.table.sizes == {8: 8, 16: 3}
    assert warned(recwarn) == [
        "BatchFinder: batch 2 ran out of memory in micro-batches of 8, 8 and 6 samples of length 16. Each time it "
        "was run again from its start with memory released, at last in micro-batches of at most 3, and nothing was "
        f"lost. Batches of this length and longer are split so from now on. The device said: {MESSAGE}"
    ]


def test_a_retry_at_the_same_size_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A warning the first time, the log each time."""
    plain = Noisy(whole := Failing())
    run(plain, Given({16: 3}, recover=True), whole)
    module = Noisy(mode := Failing({2: ("forward", 1), 4: ("backward", whole.counts[3]["backward"] // 2)}))
    words = (
        "BatchFinder: batch {} ran out of memory in a micro-batch of {} samples of length {}. It was run again from "
        f"its start with memory released, and nothing was lost. The device said: {MESSAGE}"
    )
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="BatchFinder") as caught:
        run(module, Given({16: 3}, recover=True), mode)
    said = [text for text in caplog.messages if "ran out" in text]
    assert len(said) == 2
    assert said[0] == words.format(1, 3, 16)
    assert warned(caught) == [
        f"{said[0]} More of these are logged at level INFO; if there are many, leave more memory free with "
        "BatchFinder(headroom=0.05)."
    ]
    assert bits(module) == bits(plain)


def test_a_sample_that_does_not_fit_is_named() -> None:
    """There is no smaller micro-batch: the error says which sample, how long, in which batch, and what to do."""

    class Last(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.batch = batch

    module, last = Limited(), Last()
    trainer = nets.trainer(callbacks=[Given({8: 8, 16: 8}, recover=True), last, Tight(15, 1)])
    pl.seed_everything(2, verbose=False)
    with pytest.raises(SampleDoesNotFit) as raised:
        trainer.fit(module)
    error = raised.value
    assert (error.batch_idx, error.seq_len) == (1, 16)
    assert int(last.batch["attention_mask"][error.index].sum()) == 16
    assert str(error) == (
        f"sample {error.index} of batch 1, 16 tokens long, ran out of memory on its own, and again with memory "
        f"released: {MESSAGE.rstrip('.')}. Leave out or cut samples as long as this one, or try a smaller model, a "
        "lower precision, activation checkpointing or an optimizer with less state."
    )


def test_another_error_is_raised_as_it_is() -> None:
    """A bug in the step is not tried again, and the loop is put back."""

    class Buggy(Reader):
        tries = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                Buggy.tries += 1
                raise KeyError("labels_2")
            return super().training_step(batch, batch_idx)

    module = Buggy()
    with pytest.raises(KeyError, match="labels_2"):
        run(module, BatchFinder(split_batches=True, weight="tokens", max_batch_size=3, cache=False))
    assert Buggy.tries == 1
    assert "_make_closure" not in vars(module.trainer.fit_loop.epoch_loop.automatic_optimization)


def cached_finder(store: Store, recover: bool = True) -> BatchFinder:
    """With a budget, since what is free differs from start to start, and where it is more the search is made anew."""
    return BatchFinder(
        split_batches=True, weight="tokens", seq_lens=[16, 8], cache=store, recover=recover, budget="4GiB"
    )


def test_the_record_in_the_cache_is_lowered(tmp_path: Path) -> None:
    """To the size that the run went on with, for the length that failed and longer ones; a next start certifies it."""
    store = Store(tmp_path)

    def finder() -> BatchFinder:
        return cached_finder(store)

    first = finder()
    with pytest.warns(UserWarning, match="BatchFinder: batch 2 ran out of memory") as caught:
        run(Limited(), first, own=(Tight(70, 2),))
    (words,) = warned(caught)
    assert words.endswith(
        "Batches of this length and longer are split so from now on. The cache's record is lowered as well; the next "
        f"start tries it before it uses it. The device said: {MESSAGE}"
    )
    assert first.micro_batch_sizes == {8: 8, 16: 3}
    again = finder()
    run(Limited(), again)
    assert again.micro_batch_sizes == first.micro_batch_sizes
    assert [trial.batch_size for trial in again.results["fit"][16].trials] == [3]


def test_the_record_of_a_length_that_did_not_fail_stays(tmp_path: Path) -> None:
    """The next start has its size again."""

    def start(*own: pl.Callback) -> BatchFinder:
        module, finder = Limited(), cached_finder(Store(tmp_path))
        module.most = 120
        run(module, finder, own=own)
        return finder

    with pytest.warns(UserWarning, match="The cache's record is lowered as well"):
        assert start(Tight(70, 2)).micro_batch_sizes == {8: 8, 16: 2}  # of 7 at first, then of 5
    assert start().micro_batch_sizes == {8: 8, 16: 2}


def test_a_record_that_cannot_be_lowered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on all the same, and the warning says what the cache still holds."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    class FillsUp(Tight):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            monkeypatch.setattr(os, "replace", full)

    finder = BatchFinder(split_batches=True, weight="tokens", seq_lens=[16], cache=tmp_path)
    with pytest.warns(UserWarning, match="BatchFinder") as caught:
        run(Limited(), finder, own=(FillsUp(70, 2),))
    assert finder.micro_batch_sizes == {16: 3}
    assert (
        f"The cache at {tmp_path} still says more, since it cannot be written: No space left on device. The device said"
        in warned(caught)[0]
    )


def test_without_recovery_the_run_ends_and_the_record_is_lowered(tmp_path: Path) -> None:
    """With the error itself; the record of the length that failed is lowered, and no other."""
    store = Store(tmp_path)

    def finder() -> BatchFinder:
        return cached_finder(store, recover=False)

    with pytest.warns(UserWarning, match="BatchFinder") as caught, pytest.raises(torch.OutOfMemoryError):
        run(Limited(), finder(), own=(Tight(70, 2),))
    assert warned(caught) == [
        "BatchFinder: fit ran out of memory at batch size 8, which ran when it was tried. The cache now says 7, "
        "which the next start tries before it uses it."
    ]
    again = finder()
    run(Limited(), again)
    assert again.micro_batch_sizes == {8: 8, 16: 7}


def test_the_optimizers_step_is_not_run_again(tmp_path: Path) -> None:
    """Memory that runs out there ends the run, with the error itself and a warning that says where it happened."""

    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            if any(isinstance(callback, BatchFinder) for callback in module.trainer.callbacks):
                raise torch.OutOfMemoryError(MESSAGE)
            return loss

    module = Reader(optimizer=Full)
    finder = BatchFinder(split_batches=True, weight="tokens", seq_lens=[16], max_batch_size=4, cache=tmp_path)
    with pytest.warns(UserWarning, match="BatchFinder") as caught, pytest.raises(torch.OutOfMemoryError):
        run(module, finder)
    assert warned(caught) == [
        "BatchFinder: fit ran out of memory at batch size 4, which ran when it was tried. It did so outside forward "
        "and backward, which alone are run again; perhaps in optimizer.step(). The cache now says 3, which the next "
        "start tries before it uses it."
    ]


class Restless(nn.Module):
    """Changes all that it can in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)
        self.mean, self.all = MeanMetric(), CatMetric()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("maybe", None)
        self.seen: list[int] = [7]
        self.steps, self.last = 0, None
        self.torch_own = torch.Generator().manual_seed(1)
        self.numpy_own, self.numpy_old = np.random.default_rng(1), np.random.RandomState(1)
        self.python_own = random.Random(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layer(x))
        self.mean.update(y.detach())
        self.all.update(y.detach())
        self.count += 1
        self.maybe = torch.ones(1)
        self.seen.append(1)
        self.steps += 1
        self.last = y
        self.new = "an attribute"
        return y

    def drawn(self) -> list[float]:
        """A number of each generator."""
        return [
            random.random(),
            float(np.random.rand()),
            float(torch.rand(1)),
            float(torch.rand(1, generator=self.torch_own)),
            float(self.numpy_own.random()),
            float(self.numpy_old.rand()),
            self.python_own.random(),
        ]


def seen(module: Restless) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "buffers": {name: buffer.tolist() for name, buffer in module.named_buffers()},
        "none": module.maybe is None,
        "metrics": (module.mean.mean_value.tolist(), module.mean.weight.tolist(), len(module.all.value)),
        "counts": (module.mean._update_count, module.all._update_count),
        "plain": (module.steps, list(module.seen), module.last, hasattr(module, "new"), module.training),
        "gradients": [None if p.grad is None else p.grad.tolist() for p in module.parameters()],
    }


def test_all_comes_back_as_often_as_needed() -> None:
    """In the objects that held it, which others may hold as well."""
    module, x = Restless(), torch.randn(3, 2)
    with torch.no_grad():
        module(x)  # the metrics and the lists have contents
    buffer, items, weight = module.norm.running_mean, module.seen, module.mean.weight
    before = seen(module)
    start = BatchSnapshot(module)
    drawn = module.drawn()
    for _ in range(2):
        module(x).sum().backward()
        module.eval()
        module.drawn()
        for parameter in module.parameters():
            parameter.grad = None  # nothing is noted of gradients until they are zeroed
        start.restore()
        assert seen(module) == before
        assert module.norm.running_mean is buffer
        assert module.seen is items
        assert module.mean.weight is weight
    assert module.drawn() == drawn


def test_gradients_are_those_that_zero_grad_left() -> None:
    """None, zeros, or what a zero_grad of the user's own keeps."""
    module, x = Restless(), torch.randn(3, 2)
    kept, zero, *others = module.parameters()
    kept.grad, zero.grad = torch.ones_like(kept), torch.zeros_like(zero)
    start = BatchSnapshot(module)
    start.gradients_zeroed()
    for _ in range(2):
        module(x).sum().backward()
        start.restore()
        assert torch.equal(kept.grad, torch.ones_like(kept))
        assert torch.equal(zero.grad, torch.zeros_like(zero))
        assert all(parameter.grad is None for parameter in others)


def test_what_a_failed_step_left_in_an_attribute_is_let_go() -> None:
    """A tensor that the module kept would hold the failed step's memory."""
    module = Restless()
    start = BatchSnapshot(module)
    module(torch.randn(3, 2))
    assert module.last is not None
    start.restore()
    assert module.last is None
