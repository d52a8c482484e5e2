"""One measured trial: what its stages tell, whether it comes to a steady state, and that it is undone."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.optim import optimizer as optimizers

from batchfinder.measure.device_memory import HostMemory
from batchfinder.measure.trial import StageReadings, TrialSteps, further_orders, read_stages, run_trial
from batchfinder.results import Verdict
from batchfinder.simulator.steady_state import MORE_STEPS
from batchfinder.snapshot.training_state import TrainingState
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step, Workload
from tests.forks import forks


class Ledger:
    """A memory that holds what the step says it holds: the parts of it that are asked for here."""

    def __init__(self) -> None:
        self.held = self.peak = 100

    def take(self, held: int, peak: int) -> None:
        """Be told."""
        self.held, self.peak = held, max(self.peak, peak)

    def held_bytes(self) -> int:
        return self.held

    def peaks(self) -> tuple[int | None, int | None]:
        return self.peak, self.peak

    def reset_peak(self) -> None:
        self.held = self.peak = 100

    def retries(self) -> int:
        return 0

    def limited(self, reserve_bytes: int, held_bytes: int) -> nullcontext[None]:
        return nullcontext()


class Net(torch.nn.Linear):
    """Takes 50 for a forward, at most 70; holds 180 when it has stepped, and 400 at the optimizer's peak."""

    def __init__(self, memory: Ledger) -> None:
        super().__init__(4, 1)
        self.memory = memory

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.memory.take(150, 170)
        loss = super().forward(batch).mean()
        loss.register_hook(lambda gradient: self.memory.take(180, 400))
        return loss


Backward = Callable[[torch.Tensor], object]


def by_tensor(loss: torch.Tensor) -> None:
    """As loops do."""
    loss.backward()


def by_function(loss: torch.Tensor) -> None:
    """As libraries do."""
    torch.autograd.backward([loss])


@pytest.mark.parametrize("backward", [by_tensor, by_function])
def test_a_step_is_read_where_its_backward_begins_and_where_it_ends(backward: Backward) -> None:
    """The forward's bytes are the peak before the first backward; what stays is what is held after a step."""
    memory = Ledger()
    net = Net(memory)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def steps(settling: object) -> None:
        for _ in range(2):
            backward(net(torch.ones(2, 4)))
            optimizer.step()
            optimizer.zero_grad()

    state = TrainingState.capture(net, optimizer, left_alone=[memory])
    seen = run_trial(steps, memory, torch.device("cpu"), state.restore)  # type: ignore[arg-type]
    assert (seen.verdict, seen.peak_allocated_bytes) == (Verdict.FITS, 400)
    assert (seen.resting_bytes, seen.forward_bytes) == (180, 70)


def test_what_is_held_before_the_first_batch_is_no_forwards() -> None:
    """Such as DDP's buckets, which a trial's steps make before they ask for a batch."""
    memory = Ledger()
    net = Net(memory)

    def steps(taken: TrialSteps) -> None:
        memory.take(140, 145)
        for _ in range(2):
            with taken.loading():
                batch = torch.ones(2, 4)
            net(batch).backward()

    assert run_trial(steps, memory, torch.device("cpu")).forward_bytes == 170 - 140  # type: ignore[arg-type]


def test_what_has_no_backward_and_no_optimizer_is_not_read() -> None:
    """A step that only runs forward says nothing: neither figure is made up."""
    memory = Ledger()
    with read_stages(memory) as readings, torch.no_grad():  # type: ignore[arg-type]
        torch.nn.Linear(4, 1)(torch.ones(2, 4))
    assert (readings.resting_bytes, readings.forward_bytes) == (None, None)


def test_a_host_is_not_read() -> None:
    """Where the memory does not count what is allocated, PyTorch is left as it is."""
    before = torch.autograd.backward
    with read_stages(HostMemory(None)) as readings:
        assert torch.autograd.backward is before
    assert (readings.resting_bytes, readings.forward_bytes) == (None, None)


def test_nothing_is_left_of_it_after_an_error() -> None:
    """However the steps end, the backward is PyTorch's own again and no hook is left on optimizers."""
    before, hooks = torch.autograd.backward, dict(optimizers._global_optimizer_post_hooks)

    def steps() -> None:
        with read_stages(Ledger()):  # type: ignore[arg-type]
            assert torch.autograd.backward is not before
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        steps()
    assert torch.autograd.backward is before
    assert dict(optimizers._global_optimizer_post_hooks) == hooks


class MadeUpMemory:
    """Counts up by ten with each reading; the peak is five above what is held."""

    def __init__(self):
        self.now = 100

    def held(self):
        self.now += 10
        return self.now

    def peak(self):
        return self.now + 5


def readings_of(**settings):
    """The readings of real steps of a small net, on memory that is made up."""
    memory = MadeUpMemory()
    readings = StageReadings(memory.held, memory.peak)
    workload = Workload(torch.nn.Linear(4, 4), lambda batch_size, seq_len: torch.ones(batch_size, 4))
    Step(workload, StepConfig(**settings), torch.device("cpu")).run(2, None, readings)
    return readings


def test_two_steps():
    """What stays is read as the second step begins; the first forward's peak counts from the first batch's base."""
    readings = readings_of()
    assert (readings.resting_bytes, readings.forward_bytes) == (120, 5)


def test_accumulation():
    """What stays is read as the last micro-batch begins, when gradients are alive."""
    assert readings_of(micro_batches=2).resting_bytes == 130


def test_one_step_tells_nothing_of_the_next():
    """A single step has no later one; a forward alone has no backward that would end it."""
    assert readings_of(steps=1).resting_bytes is None
    alone = readings_of(mode="forward")
    assert (alone.resting_bytes, alone.forward_bytes) == (None, None)


def test_every_time_that_the_cache_is_given_back_counts() -> None:
    """Whether in the first step or later, and whether anybody asks for another step."""
    given_back = 5
    steps = TrialSteps(lambda: given_back)
    assert steps.times_cache_given_back() == 0
    given_back += 1
    assert not steps.goes_on()
    given_back += 2
    assert steps.times_cache_given_back() == 3


def taken(retries_in_steps: list[int]) -> tuple[int, int]:
    """Steps beyond the first two that a try takes, and the retries that count; the cache is given back as listed."""
    given_back = 0
    settling = TrialSteps(lambda: given_back, settling_steps=MORE_STEPS)
    given_back += sum(retries_in_steps[:2])
    steps = 0
    while settling.goes_on():
        given_back += retries_in_steps[2 + steps]
        steps += 1
    return steps, settling.times_cache_given_back()


@pytest.mark.parametrize(
    ("retries", "steps"),
    [([0, 0], 0), ([1, 0, 0], 1), ([1, 1, 2, 0], 2), ([2, 3, 2, 2, 2, 1, 0], 5), ([1, 1, *[1] * 7, 0], 8)],
)
def test_a_size_that_settles_fits(retries: list[int], steps: int) -> None:
    """Where training is one step over and over, steps are taken until one goes by without, and then no more."""
    assert taken(retries) == (steps, 0)


def test_a_size_that_never_settles_does_not() -> None:
    """After so many steps that each gave the cache back no other is taken."""
    assert taken([1, 1, *[2] * MORE_STEPS]) == (MORE_STEPS, 2 + 2 * MORE_STEPS)


def test_what_comes_after_it_settled_counts() -> None:
    """As does what nobody asked about."""
    given_back = 0
    settling = TrialSteps(lambda: given_back, settling_steps=MORE_STEPS)
    given_back += 1
    assert settling.times_cache_given_back() == 1
    while settling.goes_on():
        pass
    assert settling.times_cache_given_back() == 0
    given_back += 1
    assert settling.times_cache_given_back() == 2


class Clock:
    """Stands for the clock that a try reads."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of tries."""
    made = Clock()
    monkeypatch.setattr("batchfinder.measure.trial.time", made)
    return made


def step_in(check: TrialSteps, clock: Clock, *micro_batches: float, loading: float = 5.0) -> None:
    """One step that takes so many seconds for each micro-batch, and `loading` for the making of each."""
    for seconds in micro_batches:
        with check.loading():
            clock.now += loading
        clock.now += seconds


def test_steps_after_the_warm_up_are_timed_without_their_loading(clock: Clock) -> None:
    """Three at least, of which the median counts; how long the first two took does not matter."""
    check = TrialSteps(lambda: 0, timed_steps=3)
    for seconds in (60.0, 30.0):
        step_in(check, clock, seconds)
    taken = []
    while check.goes_on():
        taken.append([1.0, 9.0, 2.0][len(taken)])
        step_in(check, clock, taken[-1])
    assert taken == [1.0, 9.0, 2.0]
    assert check.seconds() == (2.0, None)


def test_short_steps_are_timed_more_often(clock: Clock) -> None:
    """Until they have taken 50 ms in all, or there are twenty of them."""
    for seconds, steps in ((0.009, 6), (0.001, 20)):
        check = TrialSteps(lambda: 0, timed_steps=3)
        count = 0
        while check.goes_on():
            step_in(check, clock, seconds)
            count += 1
        assert count == steps


@pytest.mark.parametrize("fetched_first", [False, True])
def test_a_micro_batch_is_timed_apart_from_the_last(clock: Clock, fetched_first: bool) -> None:
    """The last one has the optimizer step; where all are fetched first, the step says when one has ended."""
    check = TrialSteps(lambda: 0, timed_steps=3)
    while check.goes_on():
        if fetched_first:
            step_in(check, clock, 0.0, 0.0)
            clock.now += 4.0
            check.micro_batch_ended()
            clock.now += 6.0
        else:
            step_in(check, clock, 4.0, 6.0)
    assert check.seconds() == (6.0, 4.0)


def test_without_a_word_between_them_micro_batches_take_equal_parts(clock: Clock) -> None:
    """Of the whole step, as in a loop that makes a list of them first."""
    check = TrialSteps(lambda: 0, timed_steps=3)
    while check.goes_on():
        step_in(check, clock, 0.0, 10.0)
    assert check.seconds() == (5.0, 5.0)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN compiles with another library there")
def test_a_thread_in_which_onednn_compiles_no_more_goes_on_without_it() -> None:
    """Wherever in a step the memory ends, other sizes run afterwards; oneDNN is off only where it could not compile."""
    with forks("tests.measure.onednn_fails") as trials:
        takes = trials.run(room_bytes=None)["room_bytes"]
        seen = [trials.run(room_bytes=takes - less * (32 << 10)) for less in range(0, 64, 2)]
    assert all(each["then"]["fits"] for each in seen), f"{seen}"
    assert not any(each["limited"]["fits"] for each in seen)
    switched_off = [each for each in seen if not each["onednn"]]
    assert switched_off, f"{[each['limited']['message'] for each in seen]}"
    for each in switched_off:
        assert "could not create a primitive" in each["limited"]["message"]
        assert ["ulimit -v" in text for text in each["limited"]["warned"]] == [True]
    assert not any(each["limited"]["warned"] for each in seen if each["onednn"])


class Filled(HostMemory):
    """Of which a share is reserved."""

    share = 0.0

    def free_bytes(self) -> int:
        return 1000

    def peaks(self) -> tuple[int | None, int | None]:
        return None, int(1000 * self.share)


def test_a_nearly_full_card_is_tried_with_more_orders() -> None:
    """Each has all the batches, in another order; one more where there is room."""
    batches, memory = list(range(9)), Filled(None)
    assert list(further_orders(batches, memory)) == [[0, 2, 4, 6, 8, 1, 3, 5, 7]]
    memory.share = 0.95
    orders = list(further_orders(batches, memory))
    assert len(orders) == 3
    assert all(sorted(order) == batches for order in orders)
    assert len({tuple(order) for order in [batches, *orders]}) == 4
