"""Tests of batchfinder/measure/allocator_history.py, on a card or on PyTorch's CUDA build without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.loop.tune import tune_batch_size
from batchfinder.measure.allocator_history import AllocatorHistory, can_record, most_scratch
from batchfinder.measure.device_memory import memory_of
from batchfinder.measure.trial import TrialSteps, clear, run_trial
from batchfinder.recording.prediction import predict_batch_size
from batchfinder.results import Measurement
from batchfinder.search import Bounds
from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.replay import replay
from batchfinder.simulator.trace import Trace

pytestmark = pytest.mark.gpu


class Training:
    """Two linear layers and AdamW on the card; with accumulation, two micro-batches to a step."""

    def __init__(self, accumulation: int = 1) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._accumulation = accumulation

    def step(self, batch: torch.Tensor) -> None:
        """A micro-batch."""
        self.model(batch).square().mean().backward()

    def record(self, batch_size: int) -> tuple[Measurement, Trace]:
        """Three steps, of which nothing stays but what a step leaves."""
        history = AllocatorHistory(self.device)

        def steps(taken: TrialSteps) -> None:
            batch = None
            for _ in range(3):
                for _ in range(self._accumulation):
                    with taken.loading():
                        batch = torch.ones(batch_size, 1024, device=self.device)
                    self.step(batch)
                self.optimizer.step()
                self.optimizer.zero_grad()

        seen = run_trial(steps, memory_of(self.device, None), self.device, self.restore, history=history)
        return seen, history.trace(batch_size)

    def restore(self) -> None:
        """As before the first step."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Neither a history nor memory."""
    yield
    torch.cuda.memory._record_memory_history(None)
    clear(torch.device("cuda", torch.cuda.current_device()))


def test_replayed_the_steps_take_what_was_measured() -> None:
    """Reserved to a segment, and allocated to what is left of a block where what was there before lay otherwise."""
    training = Training(accumulation=2)
    for batch_size in (7, 300):
        seen, trace = training.record(batch_size)
        timeline = replay(trace.structure, trace.sizes, CachingAllocator(UNLIMITED))
        assert seen.peak_allocated_bytes is not None
        assert seen.peak_reserved_bytes is not None
        assert abs(timeline.max_allocated_bytes - seen.peak_allocated_bytes) < 1 << 20
        assert abs(timeline.max_reserved_bytes - seen.peak_reserved_bytes) <= 2 << 20
        steps = [(mark.step, mark.stage, mark.micro_batch) for mark in trace.structure.marks]
        each = [[(n, "batch", 0), (n, "batch", 1), (n, "optimizer", 1)] for n in range(3)]
        assert steps == [*itertools.chain(*each), (2, "end", 1)]


def test_blocks_that_another_stream_uses_wait_for_it() -> None:
    """They are released where the host has seen that stream come so far."""
    training = Training()
    side = torch.cuda.Stream()

    def step(batch: torch.Tensor) -> None:
        copied = batch * 2
        with torch.cuda.stream(side):
            made = copied + 1
        copied.record_stream(side)
        del copied, made
        torch.cuda.synchronize()
        torch.empty(8, device="cuda")
        Training.step(training, batch)

    training.step = step  # type: ignore[method-assign]
    _, trace = training.record(100)
    assert set(trace.structure.streams) == {0, 1}
    assert len(trace.structure.free_completed) == 3
    replay(trace.structure, trace.sizes, CachingAllocator(UNLIMITED))


def test_the_largest_size_is_predicted_from_small_ones() -> None:
    """It fits, and a fiftieth more does not."""
    training = Training()
    limit = 2 << 30
    predicted = predict_batch_size(training.record, Bounds(), limit, 0, most_scratch(training.device))
    assert predicted is not None
    for size, fits in ((predicted.batch_size, True), (int(1.02 * predicted.batch_size), False)):
        assert (training.record(size)[0].peak_reserved_bytes <= limit) is fits  # type: ignore[operator]


def search(training: Training, **options: Any) -> int:
    """Of a loop."""

    def train_step(batch: torch.Tensor) -> None:
        training.step(batch)
        training.optimizer.step()
        training.optimizer.zero_grad()

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.ones(batch_size, 1024, device=training.device)

    state = [training.model, training.optimizer]
    found = tune_batch_size(train_step, make_batch, state, budget="1GiB", cache=False, **options)
    return len(found.smallest.result.trials)


def test_no_history_is_left() -> None:
    """What is allocated later is recorded no more."""
    training = Training()
    assert can_record(training.device)
    search(training)
    assert can_record(training.device)
    assert torch.cuda.memory._snapshot()["device_traces"][training.device.index] == []


def test_a_history_of_the_users_goes_on() -> None:
    """It is theirs: a search does without, and takes more tries."""
    training = Training()
    with_prediction = search(training)
    torch.cuda.memory._record_memory_history("all", context=None)
    mine = torch.empty(12345, dtype=torch.uint8, device="cuda")
    assert not can_record(training.device)
    without = search(training)
    assert not can_record(training.device)
    events = torch.cuda.memory._snapshot()["device_traces"][training.device.index]
    assert (events[0]["action"], events[0]["size"]) == ("alloc", mine.nbytes)
    assert without > with_prediction
