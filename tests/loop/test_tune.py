"""`tune_batch_size` on steps that fail above a size: the cache, the target, lengths, and every message in full."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchfinder
from batchfinder import AccumulationPlan, tune_batch_size
from batchfinder.cache import Store
from batchfinder.errors import InvalidValue, OutOfMemory
from tests.loop.loops import MESSAGE
from tests.measure.messages import without_figures

SIZE = r"\d+(\.\d+)? [KMG]?i?B"
calls: list[Any] = []  # what the steps were given; module-level, so that nothing puts it back


@pytest.fixture(autouse=True)
def no_calls_yet() -> None:
    """Each test sees its own."""
    calls.clear()


class Net(nn.Module):
    """One weight per feature, with a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean += batch.mean(tuple(range(batch.ndim - 1)))
        return self.layer(batch).square().mean()


class Loop:
    """A loop as a class: its step is a bound method."""

    def __init__(self, most: Callable[[int | None], int] = lambda seq_len: 20) -> None:
        self.most = most
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.steps = 0

    @property
    def state(self) -> list[Any]:
        return [self.model, self.optimizer]

    def make_batch(self, batch_size: int, seq_len: int | None) -> torch.Tensor:
        length = seq_len or os.environ.get("LENGTH")
        return torch.randn(batch_size, 4) if length is None else torch.randn(batch_size, int(length), 4)

    def forward_and_backward(self, batch: torch.Tensor, share: float = 1.0) -> None:
        if len(batch) > self.most(batch.shape[1] if batch.ndim == 3 else None):
            raise torch.OutOfMemoryError(MESSAGE)
        (self.model(batch) * share).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train_step(self, batch: torch.Tensor) -> None:
        calls.append((len(batch), self.optimizer.state == {}))
        self.forward_and_backward(batch)
        self.step()

    def on_micro_batches(self, micro_batches: Any) -> None:
        alive = []
        for batch in micro_batches:
            alive.append(self.model.layer.weight.grad is not None)
            self.forward_and_backward(batch, 1 / len(micro_batches))
        calls.append((len(batch), len(micro_batches), alive))
        self.step()


def tune(loop: Loop, **options: Any) -> Any:
    """Tune a loop exactly, up to 64. What the step refers to is part of the key: `calls` must be what it was."""
    calls.clear()
    step = loop.on_micro_batches if "target_batch_size" in options else loop.train_step
    return tune_batch_size(step, loop.make_batch, loop.state, **{"max_batch_size": 64, "tolerance": 0, **options})


def test_each_size_takes_two_optimizer_steps() -> None:
    """The second with the optimizer's state there; and all that the class holds comes back."""
    loop = Loop()
    found = tune(loop, cache=False)
    assert (found.batch_size, found.accumulation, found.plan) == (20, 1, None)
    for trial in found[None].result.trials:
        if trial.fits:
            assert [fresh for size, fresh in calls if size == trial.batch_size][-2:] == [True, False]
    assert (loop.steps, loop.optimizer.state) == (0, {})


def test_as_text_it_is_one_line_for_each_length() -> None:
    """Size, peak, headroom, accumulation, tries, and where the answer comes from; a longer length has its own size."""
    loop = Loop(lambda seq_len: 60 // (seq_len or 1))
    found = tune(loop, seq_lens=[2, 5], target_batch_size=48, headroom="5%")
    assert list(found) == [5, 2]
    assert [found[length].batch_size for length in (2, 5)] == [24, 12]
    assert found.plan == AccumulationPlan(48, 12, 4)
    tail = rf"peak {SIZE} of {SIZE}; headroom {SIZE}; accumulation"
    lines = str(found).splitlines()
    assert re.fullmatch(rf"batch size 12 at seq_len 5; {tail} 12 x 4 = 48; \d+ probes in \d+\.\d\d s\.", lines[0])
    assert re.fullmatch(rf"batch size 30 at seq_len 2; {tail} 24 x 2 = 48; \d+ probes in \d+\.\d\d s\.", lines[1])
    again = str(tune(loop, seq_lens=[5, 2], target_batch_size=48, headroom="5%")).splitlines()
    assert re.fullmatch(
        rf"batch size 12 at seq_len 5; {tail} 12 x 4 = 48; from the cache, certified with 1 probe in \d+\.\d\d s\.",
        again[0],
    )
    with pytest.raises(KeyError):
        found[3]


def test_with_a_target_steps_get_two_micro_batches_below_it_and_one_at_it() -> None:
    """The second micro-batch finds the gradients of the first."""
    found = tune(Loop(), target_batch_size=18, cache=False)
    assert (found.batch_size, found.accumulation) == (18, 1)
    assert (18, 1, [False]) in calls
    assert all(alive == [False, True] and count == 2 for size, count, alive in calls if size < 18)
    assert any(size < 18 for size, _, _ in calls)


def test_the_second_call_certifies_and_another_question_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is tried once; another optimizer, size of data or granularity is another question."""
    loop = Loop()
    first = tune(loop)
    assert (first.smallest.result.source, first.batch_size) == ("measured", 20)
    second = tune(loop)
    assert (second.smallest.result.source, second.batch_size) == ("cache", 20)
    assert [trial.batch_size for trial in second.smallest.result.trials] == [20]
    assert {size for size, _ in calls} == {20}
    assert tune(loop, multiple_of=8).batch_size == 16
    other = Loop()
    other.optimizer = torch.optim.SGD(other.model.parameters())
    assert tune(other).smallest.result.source == "measured"
    monkeypatch.setenv("LENGTH", "3")  # the same code makes other data
    assert tune(Loop()).smallest.result.source == "measured"


def test_without_certifying_the_second_call_tries_nothing() -> None:
    """Not even a copy of the training state is made."""
    tune(Loop())
    second = tune(Loop(), certify=False)
    assert (second.smallest.result.source, second.batch_size, calls) == ("cache", 20, [])
    assert second.smallest.result.trials == ()


def test_a_cached_size_that_fails_is_searched_below(own_cache: Path) -> None:
    """The text says that it was lowered."""
    loop = Loop()
    tune(loop)
    store = Store(own_cache)
    (record,) = store.records()
    store.put(record.key, replace(record.result, max_batch_size=33, trials=()))
    lower = tune(loop)
    assert lower.smallest.result.trials[0].batch_size == 33
    assert (lower.smallest.result.source, lower.batch_size) == ("measured", 20)
    assert "; lowered from 33, which ran before; " in str(lower)


def test_a_budget_is_what_training_may_use(own_cache: Path) -> None:
    """No more counts as usable, however much there is."""
    tune(Loop(), budget="3GiB")
    (record,) = Store(own_cache).records()
    assert record.key.usable_bytes <= 3 << 30


def test_an_out_of_memory_in_training_lowers_the_record(own_cache: Path) -> None:
    """`watch` says so, raises the error unchanged, and the next call tries the lower size before it uses it."""
    loop = Loop()
    found = tune(loop)
    error = torch.OutOfMemoryError(MESSAGE)
    said = (
        "training ran out of memory at batch size 20, which ran when it was tried. The cache now says 19, which the "
        "next start tries before it uses it."
    )
    with (
        pytest.warns(UserWarning, match=f"^{re.escape(said)}$") as warned,
        pytest.raises(torch.OutOfMemoryError) as caught,
        found.watch(),
    ):
        raise error
    assert caught.value is error
    assert [warning.filename for warning in warned] == [__file__]
    again = tune(loop)
    assert [trial.batch_size for trial in again.smallest.result.trials] == [19]
    assert again.batch_size == 19


def test_without_a_cache_an_out_of_memory_in_training_is_answered_with_advice() -> None:
    """And what is no out-of-memory is nobody's business."""
    found = tune(Loop(), cache=False)
    said = (
        "training ran out of memory at batch size 20, which ran when it was tried. Leave more memory free with "
        "tune_batch_size(headroom=0.05)."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$"), pytest.raises(torch.OutOfMemoryError), found.watch():
        raise torch.OutOfMemoryError(MESSAGE)
    with pytest.raises(RuntimeError, match=r"^no memory of it$"), found.watch():
        raise RuntimeError("no memory of it")


def test_not_even_the_smallest_size() -> None:
    """OutOfMemory says which size, the device's words, and what to try; a cached 0 is tried again."""
    advice = "Try a smaller model, a lower precision, activation checkpointing or an optimizer with less state."
    for _ in range(2):
        with pytest.raises(OutOfMemory) as caught:
            tune(Loop(lambda seq_len: 0))
        assert len(calls) == 2
        assert without_figures(str(caught.value)) == f"batch size 1 does not fit: {MESSAGE} {advice}"
    with pytest.raises(OutOfMemory) as caught:
        tune(Loop(lambda seq_len: 15), multiple_of=8, min_batch_size=9, seq_lens=[3])
    shorter = advice.replace("model,", "model or sequences shorter than 3,")
    assert without_figures(str(caught.value)) == f"batch size 16 does not fit: {MESSAGE} {shorter}"


def test_sizes_are_multiples_from_a_floor_to_a_cap() -> None:
    """No other size is tried, and the micro-batch of a plan is one of them."""
    seen: list[int] = []
    found = tune(
        Loop(),
        cache=False,
        multiple_of=3,
        min_batch_size=4,
        max_batch_size=40,
        on_trial=lambda t: seen.append(t.batch_size),
    )
    assert (found.batch_size, min(seen) >= 6, {size % 3 for size in seen}) == (18, True, {0})
    assert tune(Loop(), cache=False, multiple_of=3, target_batch_size=48).plan == AccumulationPlan(48, 12, 4)


def test_steps_that_a_scaler_skips_do_not_count() -> None:
    """An optimizer that steps in every fourth call only is called until it has stepped twice."""
    loop = Loop()
    count = [0]

    def train_step(batch: torch.Tensor) -> None:
        calls.append(len(batch))
        loop.forward_and_backward(batch)
        count[0] += 1
        if count[0] % 4 == 0:
            loop.step()

    found = tune_batch_size(train_step, loop.make_batch, loop.state, max_batch_size=3, cache=False)
    assert found.batch_size == 3
    assert [calls.count(size) for size in (2, 3)] in ([8, 8], [0, 8])


def test_an_optimizer_that_never_steps_is_named_in_a_warning() -> None:
    """After 64 calls at the first try; later tries do not wait for it."""
    loop = Loop()

    def train_step(batch: torch.Tensor) -> None:
        calls.append(len(batch))
        loop.forward_and_backward(batch)

    said = (
        "Adam did not step in 64 calls of train_step, so sizes are tried without the memory its steps take. train_step "
        "should take a whole optimizer step; leave the optimizer out of state= if it is not meant to step."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$") as warned:
        tune_batch_size(train_step, loop.make_batch, loop.state, max_batch_size=3, cache=False)
    assert (len(warned), calls.count(1) >= 64, calls.count(3)) == (1, True, 2)


outside = Net()
outside_optimizer = torch.optim.SGD(outside.parameters(), lr=1.0)


@pytest.mark.parametrize("unnamed", ["runs", "steps"])
def test_what_a_step_changes_beyond_reach_is_refused(unnamed: str) -> None:
    """A module-level model or optimizer that is not in `state` would keep the changes: it is named before it does."""
    before = [tensor.clone() for tensor in (*outside.parameters(), *outside.buffers())]

    def train_step(batch: torch.Tensor) -> None:
        if unnamed == "runs":
            outside(batch).backward()
        else:
            outside_optimizer.step()

    state = Loop().state[:1]
    with pytest.raises(InvalidValue) as caught:
        tune_batch_size(train_step, Loop().make_batch, state, cache=False)
    kind = {"runs": "Net", "steps": "SGD"}[unnamed]
    assert str(caught.value) == (
        f"state: invalid value ['Net']; expected the {kind} that train_step {unnamed} among them, so that it can be "
        "put "
        "back."
    )
    after = [*outside.parameters(), *outside.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_frozen_teacher_and_a_loss_of_the_step_need_no_name() -> None:
    """They are not changed by being run."""
    loop = Loop()
    teacher = outside.eval().requires_grad_(False)
    try:

        def train_step(batch: torch.Tensor) -> None:
            nn.MSELoss()(loop.model(batch), outside(batch)).backward()
            loop.step()

        del teacher
        found = tune_batch_size(train_step, loop.make_batch, loop.state, max_batch_size=2, cache=False)
    finally:
        outside.train().requires_grad_(True)
    assert found.batch_size == 2


def test_micro_batches_left_out_are_refused() -> None:
    """A step that takes the first alone would be measured without the gradients that are alive in training."""
    loop = Loop()

    def train_step(micro_batches: Any) -> None:
        loop.forward_and_backward(next(iter(micro_batches)))
        loop.step()

    with pytest.raises(InvalidValue) as caught:
        tune_batch_size(train_step, loop.make_batch, loop.state, target_batch_size=8, cache=False)
    name = "test_micro_batches_left_out_are_refused.<locals>.train_step"
    assert str(caught.value) == (
        f"train_step: invalid value '{name}'; expected a function that goes through all 2 micro-batches it is given, "
        "not "
        "1."
    )


def test_a_bug_says_at_which_size_and_what_the_step_was_given() -> None:
    """In notes: the error itself is unchanged."""
    loop = Loop()
    with pytest.raises(AttributeError, match=r"^'MicroBatches' object has no attribute 'shape'") as caught:
        tune_batch_size(lambda batch: batch.shape, loop.make_batch, loop.state, target_batch_size=8, cache=False)
    assert str(caught.value) == "'MicroBatches' object has no attribute 'shape'"
    assert caught.value.__notes__ == [
        "Raised while tune_batch_size tried batch size 1.",
        "With target_batch_size, train_step is given an iterable of the micro-batches of one optimizer step, whose "
        "length is how many there are.",
    ]


def test_a_target_that_no_size_divides_is_refused() -> None:
    """Where the floor forbids the micro-batch of 1 that a prime would need."""
    with pytest.raises(InvalidValue) as caught:
        tune(Loop(), target_batch_size=23, min_batch_size=2, exact=True, cache=False)
    assert (
        str(caught.value)
        == "target_batch_size: invalid value 23; expected a multiple of any size from 2 to 20, which fit."
    )
    nearly = tune(Loop(), target_batch_size=23, min_batch_size=2, cache=False)
    assert (nearly[None].batch_size, nearly[None].accumulation) == (12, 2)


def test_a_cache_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    """It names the place, and the search is made."""
    place = tmp_path / "file"
    place.write_text("")
    with pytest.warns(UserWarning, match=f"^the cache at {re.escape(str(place))} cannot be used: .* are not cached"):
        assert tune(Loop(), cache=str(place)).batch_size == 20


@pytest.mark.gpu
def test_a_real_card() -> None:
    """Under a budget of 2 GiB the answer runs for 20 steps and 10 % more does not; weights and generators come back."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 4096)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: torch.Tensor) -> None:
        model(batch.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.randn(batch_size, 4096)

    before = [parameter.clone() for parameter in model.parameters()]
    drawn = torch.cuda.get_rng_state(device)
    found = tune_batch_size(train_step, make_batch, [model, optimizer], budget="2GiB", cache=False)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert torch.equal(drawn, torch.cuda.get_rng_state(device))
    assert optimizer.state == {}
    torch.cuda.empty_cache()  # of what the comparisons leave, into which training's blocks would be put otherwise
    fraction = (2 << 30) / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        for _ in range(20):
            train_step(make_batch(found.batch_size, None))
        # Or it runs by giving back all cached memory, which counts as not fitting.
        retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
        with suppress(torch.OutOfMemoryError):
            train_step(make_batch(int(1.1 * found.batch_size) + 1, None))
        assert torch.cuda.memory_stats(device)["num_alloc_retries"] > retries
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
def test_training_leaves_no_segment_that_cannot_be_given_back() -> None:
    """cuBLAS has its workspaces when the search returns, and not in the midst of what a first step takes."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.ones(batch_size, 512, device=device)

    found = tune_batch_size(train_step, make_batch, [model, optimizer], budget="1GiB", cache=False)
    reserved = [torch.cuda.memory_reserved(device)]
    for _ in range(2):
        train_step(make_batch(found.batch_size, None))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved(device))
    assert len(set(reserved)) == 1, reserved


def test_the_names_are_public() -> None:
    """They are where users look for them."""
    assert {"tune_batch_size", "TunedBatchSize", "TunedBatchSizes"} <= set(batchfinder.__all__)


@pytest.mark.slow
def test_the_size_at_full_speed_repeats_within_a_step_or_cannot_be_told() -> None:
    """Of a real training on this CPU, three times; what was found stands in the summary either way."""
    loop, threads = Loop(lambda seq_len: 64), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [
            tune_batch_size(
                loop.train_step,
                loop.make_batch,
                loop.state,
                goal="throughput",
                min_batch_size=4,
                max_batch_size=64,
                cache=False,
            ).tuning
            for _ in range(3)
        ]
    finally:
        torch.set_num_threads(threads)
    sizes = [4, 6, 8, 11, 16, 23, 32, 45, 64]
    speeds = [each.throughput for each in found if each.throughput is not None]
    assert [[rate.batch_size for rate in speed.rates] for speed in speeds] == [sizes] * 3
    told = [sizes.index(speed.batch_size) for speed in speeds if speed.certain]
    assert max(told, default=0) - min(told, default=0) <= 1
    assert all(str(speed) in str(each) for speed, each in zip(speeds, found, strict=True))
