"""Tests of batchfinder/training/step.py: a step is the one that a careful user would write, for real on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.models.pretrained import ATTENTION
from batchfinder.training.optimizers import OPTIMIZERS
from batchfinder.training.spec import ATTENTION_NAMES, OPTIMIZER_NAMES, PRECISION_NAMES, StepConfig
from batchfinder.training.step import PRECISIONS, Step, Workload, call, default_loss, has_one_shape

CPU = torch.device("cpu")


def batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch_size, 8, generator=generator), torch.rand(batch_size, 4, generator=generator)


class Regression(nn.Module):
    """A linear layer that is given the target too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        out: torch.Tensor = self.linear(x)
        return out


def workload(**more: Any) -> Workload:
    """A workload with its own loss."""
    torch.manual_seed(0)
    return Workload(Regression(), batch, loss=lambda out, given: (out - given[1]).pow(2).mean(), **more)


def stages(step: Step, batch_size: int = 6) -> list[tuple[int, str, int]]:
    """Run it and return what it announced."""
    seen: list[tuple[int, str, int]] = []
    step.run(batch_size, None, lambda number, stage, micro_batch: seen.append((number, stage, micro_batch)))
    return seen


def test_trains_as_by_hand() -> None:
    """Two steps leave the very weights that the plain loop leaves."""
    ours, theirs = workload(), workload()
    Step(ours, StepConfig(), CPU).run(6, None)
    optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=1e-5)
    x, target = batch(6, None)
    for _ in range(2):
        optimizer.zero_grad()
        (theirs.model(x, target) - target).pow(2).mean().backward()
        optimizer.step()
    assert torch.equal(ours.model.linear.weight, theirs.model.linear.weight)


def test_takes_more_steps_when_asked() -> None:
    """After the steps of the settings, as many as are asked for, with the same optimizer; stages go on counting."""
    ours, theirs, answers, seen = workload(), workload(), iter([True, True, False]), []
    Step(ours, StepConfig(), CPU).run(6, None, lambda *stage: seen.append(stage), lambda: next(answers))
    Step(theirs, StepConfig(steps=4), CPU).run(6, None)
    assert torch.equal(ours.model.linear.weight, theirs.model.linear.weight)
    assert [stage for stage in seen if stage[1] in ("zero_grad", "end")] == [
        *((step, "zero_grad", 0) for step in range(4)),
        (3, "end", 0),
    ]


def test_steps_of_different_lengths() -> None:
    """A step's micro-batches are of its own length, further steps of the last; without lengths all are of one."""
    asked: list[int | None] = []

    def of_length(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(seq_len)
        return batch(batch_size, seq_len)

    given = Workload(Regression(), of_length)
    Step(given, StepConfig(steps=3, micro_batches=2, lengths=(5, 7)), CPU).run(6, 9)
    Step(given, StepConfig(steps=1), CPU).run(6, 9)
    assert asked == [5, 5, 7, 7, 7, 7, 9]


def test_accumulation_divides_the_loss() -> None:
    """Two micro-batches of the same samples give the gradient of one."""
    once, twice = workload(), workload()
    Step(once, StepConfig(steps=1, optimizer="sgd"), CPU).run(6, None)
    Step(twice, StepConfig(steps=1, optimizer="sgd", micro_batches=2), CPU).run(6, None)
    torch.testing.assert_close(once.model.linear.weight.grad, twice.model.linear.weight.grad)


def test_stages_of_training() -> None:
    """zero_grad, then batch, forward, loss and backward of each micro-batch, then the optimizer."""
    each = [(stage, k) for k in (0, 1) for stage in ("batch", "forward", "loss", "backward")]
    expected = [("zero_grad", 0), *each, ("optimizer", 0)]
    found = stages(Step(workload(), StepConfig(micro_batches=2), CPU))
    assert found == [*((step, *stage) for step in (0, 1) for stage in expected), (1, "end", 0)]


@pytest.mark.parametrize(("mode", "grad"), [("forward", True), ("inference", False)])
def test_one_forward_in_eval(mode: str, grad: bool) -> None:
    """The forward modes run once, in eval mode, with or without a graph, and take no step."""
    given = workload()
    before = given.model.linear.weight.detach().clone()
    assert stages(Step(given, StepConfig(mode=mode), CPU)) == [(0, "batch", 0), (0, "forward", 0), (0, "end", 0)]
    assert given.model.modes == [(False, grad)]
    assert torch.equal(given.model.linear.weight, before)
    assert given.model.linear.weight.grad is None


def test_own_optimizer_wins() -> None:
    """A workload that brings an optimizer is stepped with it, and it is given only what is trained."""
    given: list[list[nn.Parameter]] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        given.append(list(parameters))
        return torch.optim.SGD(given[0], lr=0.1)

    own = workload(optimizer=make)
    own.model.linear.bias.requires_grad_(False)
    step = Step(own, StepConfig(optimizer="adafactor"), CPU)
    step.run(6, None)
    assert type(step.optimizer) is torch.optim.SGD
    assert [id(p) for p in given[0]] == [id(own.model.linear.weight)]


def test_only_the_loss_outlives_the_forward() -> None:
    """As in Lightning, the model's output is gone when the backward begins."""
    import weakref

    outputs: list[Any] = []

    def loss(out: torch.Tensor, given: Any) -> torch.Tensor:
        outputs.append(weakref.ref(out))
        return out.sum()

    alive: list[bool] = []

    def on_stage(number: int, stage: str, micro_batch: int) -> None:
        if stage == "backward":
            alive.append(outputs[-1]() is not None)

    torch.manual_seed(0)
    Step(Workload(Regression(), batch, loss=loss), StepConfig(), CPU).run(6, None, on_stage)
    assert alive == [False, False]


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        (type("Output", (), {"loss": torch.tensor(3.0)})(), 3.0),
        ({"loss": torch.tensor(4.0), "logits": torch.ones(2)}, 4.0),
        ((torch.tensor([1, 2]), torch.tensor([1.0, 2.0])), 1.5),
        (torch.tensor([[2.0, 4.0]]), 3.0),
        ({"logits": torch.tensor([6.0])}, 6.0),
    ],
)
def test_default_loss(output: Any, loss: float) -> None:
    """The output's own loss, else the mean of its first floating-point tensor."""
    assert default_loss(output, None).item() == loss


@pytest.mark.parametrize(
    ("given", "seen"),
    [({"x": 1}, ((), {"x": 1})), ((1, 2), ((1, 2), {})), ([1, 2], ((1, 2), {})), (5, ((5,), {}))],
)
def test_call(given: Any, seen: Any) -> None:
    """A mapping is keywords, a tuple or list positional arguments, anything else the argument."""
    model: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
    assert call(model, given) == seen


def test_names_are_those_of_the_spec() -> None:
    """What can be asked for without torch is what there is."""
    assert tuple(PRECISIONS) == PRECISION_NAMES
    assert tuple(OPTIMIZERS) == OPTIMIZER_NAMES
    assert tuple(ATTENTION) == ATTENTION_NAMES


def test_precisions() -> None:
    """Only bf16-true changes inputs, only floating-point ones, and only 16-mixed scales."""
    floats, ints = torch.ones(1), torch.ones(1, dtype=torch.long)
    for name, precision in PRECISIONS.items():
        assert precision.input_type(ints) is torch.long
        assert precision.input_type(floats) is (torch.bfloat16 if name == "bf16-true" else torch.float32)
        assert precision.scaled == (name == "16-mixed")
        with precision.context(CPU):
            assert torch.is_autocast_enabled("cpu") == name.endswith("-mixed")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.endswith("fused")])
def test_optimizers_step(name: str) -> None:
    """Every optimizer by name takes a real step; those of other libraries where these are installed."""
    if OPTIMIZERS[name].on_fake_gpu is not None:
        if name == "adamw-4bit":
            pytest.skip("it compiles its update, which needs a compiler")
        try:
            OPTIMIZERS[name].make([nn.Parameter(torch.zeros(1))])
        except (MissingExtra, InvalidValue) as error:  # that which offloads is for a GPU alone
            pytest.skip(str(error))
    given = workload()
    before = given.model.linear.weight.detach().clone()
    Step(given, StepConfig(optimizer=name), CPU).run(6, None)
    assert not torch.equal(given.model.linear.weight, before)


def test_old_gradients_can_wait_for_the_loss() -> None:
    """In Lightning's order the gradients of the last step are cleared once, after the first micro-batch's loss."""
    late = [
        stage
        for number, stage, _ in stages(Step(workload(zero_grad_after_loss=True), StepConfig(micro_batches=2), CPU))
        if number == 1
    ]
    assert late[:5] == ["batch", "forward", "loss", "zero_grad", "backward"]
    assert late.count("zero_grad") == 1


@pytest.mark.parametrize(
    ("make_batch", "alike"),
    [
        (lambda size, seq_len: {"x": torch.zeros(size, 8), "name": "x", "scale": 2.0, "none": None}, True),
        (lambda size, seq_len: (torch.zeros(size, seq_len or 512),), False),
        (lambda size, seq_len: (torch.zeros(size, 64 * -(-(seq_len or 64) // 64)),), False),
        (lambda size, seq_len: [torch.zeros(size)] * (seq_len or 1), False),
        (lambda size, seq_len: torch.zeros(size, dtype=torch.long if seq_len is None else torch.float), False),
        (lambda size, seq_len: (torch.zeros(size, 8), seq_len), False),
        (lambda size, seq_len: (torch.zeros(size, 8), object), False),
    ],
)
def test_batches_of_one_shape(make_batch: Callable[[int, int | None], Any], alike: bool) -> None:
    """They are alike at any length and without one; padding, and what cannot be compared, is not taken for that."""
    assert has_one_shape(Workload(nn.Identity(), make_batch)) == alike


def test_only_lengths_that_are_allowed_are_compared() -> None:
    """None beyond the model's positions is asked for; a batch that needs a length raises without one."""
    asked: list[int | None] = []

    def make_batch(size: int, seq_len: int | None) -> torch.Tensor:
        asked.append(seq_len)
        return torch.zeros(size, 8)

    assert has_one_shape(Workload(nn.Identity(), make_batch, max_seq_len=4))
    assert asked == [None, 1, 4]
    with pytest.raises(TypeError):
        has_one_shape(Workload(nn.Identity(), lambda size, seq_len: torch.zeros(size, 0 * seq_len)))  # type: ignore[operator]
