"""Tests of batchfinder/measure/trial.py: what is read while a step of somebody else's runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import optimizer as optimizers

from batchfinder.measure.device_memory import HostMemory
from batchfinder.measure.trial import listening, tried
from batchfinder.results import Verdict
from batchfinder.snapshot.training_state import TrainingState


class Ledger:
    """A memory that holds what the step says it holds: the parts of it that are asked for here."""

    has_hard_limit = False

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

    def record_leak(self, left_bytes: int) -> None:
        pass


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
    seen = tried(steps, state, memory, torch.device("cpu"))  # type: ignore[arg-type]
    assert (seen.verdict, seen.peak_allocated_bytes) == (Verdict.FITS, 400)
    assert (seen.resting_bytes, seen.forward_bytes) == (180, 70)


def test_what_has_no_backward_and_no_optimizer_is_not_read() -> None:
    """A step that only runs forward says nothing: neither figure is made up."""
    memory = Ledger()
    with listening(memory) as readings, torch.no_grad():  # type: ignore[arg-type]
        torch.nn.Linear(4, 1)(torch.ones(2, 4))
    assert (readings.resting_bytes, readings.forward_bytes) == (None, None)


def test_a_host_is_not_listened_to() -> None:
    """Where the memory does not count what is allocated, PyTorch is left as it is."""
    before = torch.autograd.backward
    with listening(HostMemory(None)) as readings:
        assert torch.autograd.backward is before
    assert (readings.resting_bytes, readings.forward_bytes) == (None, None)


def test_nothing_is_left_of_it_after_an_error() -> None:
    """However the steps end, the backward is PyTorch's own again and no hook is left on optimizers."""
    before, hooks = torch.autograd.backward, dict(optimizers._global_optimizer_post_hooks)

    def steps() -> None:
        with listening(Ledger()):  # type: ignore[arg-type]
            assert torch.autograd.backward is not before
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        steps()
    assert torch.autograd.backward is before
    assert dict(optimizers._global_optimizer_post_hooks) == hooks
