"""Training goes on as if it had never been probed, wherever the probe's step failed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.snapshot.training_state import TrainingState, restore_on_exit
from tests.snapshot.state_digest import Digester, differences

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}
STEPS_AFTER = 5


class Net(nn.Module):
    """Dropout, batch normalisation, power iteration, a counter and a buffer that is replaced in every forward."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Conv1d(3, 4, 3))
        self.normal = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4), persistent=False)
        self.forwards = 0
        self.history: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.dropout(self.normal(self.first(x))).relu().mean(-1)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.history.append(float(self.average.sum()))
        logits: torch.Tensor = self.last(x + self.average)
        return logits


class Training:
    """One run: a net, its optimizer, a scheduler, perhaps a scaler, and batches made of three kinds of randomness."""

    def __init__(self, optimizer: str, scaled: bool) -> None:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(3)
        self.net = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.1, total_steps=50, cycle_momentum=optimizer != "adafactor"
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if scaled else None
        self.stage = ""

    def step(self) -> float:
        x = torch.randn(6, 3, 8) * np.random.random() + random.random()
        self.stage = "forward"
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.scaler is not None):
            loss = self.net(x).square().mean()
        self.stage = "backward"
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.stage = "optimizer"
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.stage = "scaler"
            self.scaler.update()
        self.stage = "scheduler"
        self.scheduler.step()
        return loss.item()

    def roots(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}

    def state(self) -> TrainingState:
        return TrainingState.capture(*self.roots().values())


class FailAt(TorchDispatchMode):
    """Runs out of memory before the operator of some number; counts those that ran."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.ran == self.number:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.ran += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are computed faster by one thread, on a busy machine by far."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


RUNS = [
    pytest.param(name, scaled, marks=pytest.mark.slow if scaled else ())
    for name in OPTIMIZERS
    for scaled in (False, True)
]


@pytest.mark.parametrize(("optimizer", "scaled"), RUNS)
def test_a_failed_step_leaves_no_trace(optimizer: str, scaled: bool) -> None:
    """25 failures in each of 8 runs, at any operator of any stage: the state and the next steps are bit-identical."""
    numbers = random.Random(f"{optimizer} {scaled}")
    expected, ends, operators = {}, {}, {}
    for before in (0, 2):
        training = Training(optimizer, scaled)
        for _ in range(before):
            training.step()
        expected[before] = [training.step() for _ in range(STEPS_AFTER)]
        ends[before] = Digester(keep=False)(**training.roots())
        with restore_on_exit(*training.roots().values()), FailAt(-1) as counting:
            training.step()
        operators[before] = counting.ran
    failed: Counter[str] = Counter()
    for injection in range(25):
        before = 2 * (injection % 2)
        training = Training(optimizer, scaled)
        for _ in range(before):
            training.step()
        digest = Digester(keep=injection % 3 == 0)
        then = digest(**training.roots())
        state = training.state()
        spare = range(2, operators[before])
        number = spare[int(len(spare) * (injection + numbers.random()) / 25)]
        try:
            for _ in range(2):
                with FailAt(number):
                    training.step()
        except torch.OutOfMemoryError:
            failed[training.stage] += 1
        state.restore()
        assert differences(digest(**training.roots()), then) == [], (number, training.stage)
        assert [training.step() for _ in range(STEPS_AFTER)] == expected[before]
        assert differences(Digester(keep=False)(**training.roots()), ends[before]) == []
    assert {"forward", "backward", "optimizer"} <= failed.keys()
    assert failed.total() == 25


def test_probing_before_every_step() -> None:
    """A run that takes two real steps before each of its steps and undoes them is the run that never did."""
    plain = Training("adamw", True)
    expected = [plain.step() for _ in range(6)]
    end = Digester(keep=False)(**plain.roots())
    probed = Training("adamw", True)
    losses = []
    for _ in range(6):
        with restore_on_exit(*probed.roots().values()) as state:
            probed.step()
            state.restore()
            probed.step()
            probed.step()
        losses.append(probed.step())
    assert losses == expected
    assert differences(Digester(keep=False)(**probed.roots()), end) == []


def test_a_run_differs_when_it_is_probed_without_a_capture() -> None:
    """The comparison above can fail: a step that is not undone shows at once."""
    plain, probed = Training("sgd", False), Training("sgd", False)
    plain.state()
    probed.step()
    assert plain.step() != probed.step()
