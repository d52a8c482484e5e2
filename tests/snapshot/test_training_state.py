"""What training changes comes back: any sequence of changes to a module that holds a bit of everything."""

from __future__ import annotations

import contextlib
import enum
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from batchfinder.snapshot.training_state import TrainingState
from tests.snapshot.state_digest import Digester, differences

THOROUGH = settings(derandomize=True, deadline=None, max_examples=50, database=None)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are computed faster by one thread, on a busy machine by far."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Double(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


class Colour(enum.Enum):
    RED = 1


class Slotted:
    __slots__ = ("items", "later", "number")

    def __init__(self) -> None:
        self.items: list[int] = [1]
        self.number = 1


@dataclass
class Record:
    name: str = "first"
    history: list[float] = field(default_factory=list)
    colour: Colour = Colour.RED


class Names(list):  # type: ignore[type-arg]
    """A list with an attribute."""


class Zoo(nn.Module):
    """A bit of everything that modules are known to hold."""

    running: torch.Tensor
    scratch: torch.Tensor
    window: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.normal = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.spectral = spectral_norm(nn.Linear(4, 4))
        self.weighted = weight_norm(nn.Linear(4, 4))
        self.lazy = nn.LazyLinear(4)
        self.extra = nn.ParameterList([torch.ones(4), torch.zeros(4)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("running", torch.zeros(4), persistent=False)
        self.register_buffer("scratch", torch.zeros(2, 4))
        self.register_buffer("window", self.scratch[1:])
        self.ema = [deepcopy(self.normal)]
        self.accuracy, self.mean = MulticlassAccuracy(7), MeanMetric()
        self.steps, self.last = 0, None
        self.seen: list[Any] = [(0, [1])]
        self.cache: dict[str, Any] = {"self": self}
        self.others = {"deque": deque([1, 2], maxlen=3), "set": {1, 2}, "ordered": OrderedDict(a=1, b=2)}
        self.table: defaultdict[str, list[int]] = defaultdict(list, a=[1])
        self.array, self.things = np.arange(4.0), np.array([[1], {}], dtype=object)
        self.bytes = bytearray(b"abc")
        self.generators = (torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1))
        self.slotted, self.record, self.names = Slotted(), Record(), Names("ab")
        self.names.suffix = "c"
        self.seen.append(self.seen)
        self.normal.register_forward_hook(_counting())
        self.callback = partial(self.names.append, "called")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.dropout(self.normal(self.embedding(tokens)))
        x = Double.apply(self.weighted(self.spectral(x))) + self.extra[0] * self.extra[1]
        x = self.lazy(x) + torch.rand(4, generator=self.generators[0])
        self.running = self.running + x.detach().mean(0)
        self.window.add_(1)
        self.seen.append(x.detach())
        self.table[str(self.steps)].append(self.steps)
        self.last = x.detach()
        self.array += self.generators[2].random() + np.random.random() + random.random()
        with torch.no_grad():
            for mine, theirs in zip(self.ema[0].parameters(), self.normal.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        logits: torch.Tensor = self.head(x)
        self.accuracy.update(logits, tokens)
        self.mean.update(logits.detach().mean())
        return logits


def _counting() -> Callable[..., None]:
    calls: list[int] = []
    total = 0

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal total
        total += len(output)
        calls.append(total)

    return hook


class Training:
    """A zoo with its optimizer, scheduler and scaler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Zoo()
        groups = [{"params": [self.model.extra[0]], "lr": torch.tensor(0.1)}, {"params": list(self.trained())}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def trained(self) -> Any:
        return (p for p in self.model.parameters() if p is not self.model.extra[0])

    def step(self) -> None:
        loss = self.model(torch.randint(7, (5,))).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def roots(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}


def _set(name: str, value: Any) -> Callable[[Training], None]:
    return lambda training: setattr(training.model, name, value)


@torch.no_grad()
def _write_everywhere(training: Training) -> None:
    for tensor in (*training.model.parameters(), *training.model.buffers()):
        tensor.add_(1)


def _swap_data(training: Training) -> None:
    training.model.embedding.weight.data = torch.ones(3, 2, dtype=torch.float64)


def _half(training: Training) -> None:
    training.model.half()


def _write_grads(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)


def _replace_grad(training: Training) -> None:
    training.model.extra[1].grad = torch.ones(4)


def _give_the_buffer_a_graph(training: Training) -> None:
    training.model.running.mul_(training.model.extra[0])


def _resize_storage(training: Training) -> None:
    training.model.extra[0].untyped_storage().resize_(64)


def _break_the_view(training: Training) -> None:
    training.model.window = torch.zeros(1, 4)
    training.model._non_persistent_buffers_set.add("window")


def _hooks(training: Training) -> None:
    training.model.register_forward_hook(print)
    training.model.head.weight.register_hook(lambda grad: grad * 2)
    training.model.extra[1].register_post_accumulate_grad_hook(print)
    training.optimizer.register_step_post_hook(print)
    nn.modules.module.register_module_forward_hook(lambda *args: None)


def _containers(training: Training) -> None:
    model = training.model
    model.others["deque"].append(3)  # type: ignore[attr-defined]
    model.others["set"].add(3)  # type: ignore[attr-defined]
    model.others["ordered"].move_to_end("a")  # type: ignore[attr-defined]
    model.table["new"].append(1)
    model.table["a"].append(2)
    model.cache["another"] = model.cache
    model.seen[0][1].append(2)
    model.seen.insert(0, "front")
    model.bytes += b"d"
    model.array[:] = 7
    model.things[0].append(2)
    model.things[1] = None


def _objects(training: Training) -> None:
    model = training.model
    model.slotted.number, model.slotted.later = 2, 3  # type: ignore[attr-defined]
    model.slotted.items.append(2)
    model.record.history.append(0.5)
    model.record.name = "second"
    model.record.__dict__ = {"name": "third"}
    model.names.suffix = "d"
    model.callback()
    del model.steps


def _random_numbers(training: Training) -> None:
    random.random()
    np.random.random()
    torch.rand(1)
    training.model.generators[0].seed()
    training.model.generators[1].random()
    training.model.generators[2].random()


def _process_settings(training: Training) -> None:
    torch.set_default_dtype(torch.float64)
    torch._C._set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_enabled("cpu", True)
    torch.autograd.set_detect_anomaly(True)
    np.seterr(all="ignore")


def _optimizer(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"].mul_(2)
    training.optimizer.param_groups[1]["lr"] = 7.0
    training.optimizer.defaults["lr"] = 7.0
    training.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    training.optimizer.state.clear()


def _reload(training: Training) -> None:
    training.optimizer.load_state_dict(deepcopy(training.optimizer.state_dict()))
    training.model.load_state_dict(deepcopy(training.model.state_dict()), assign=True)


CHANGES: dict[str, Callable[[Training], None]] = {
    "step": Training.step,
    "write everywhere": _write_everywhere,
    "swap data": _swap_data,
    "half": _half,
    "write grads": _write_grads,
    "replace a grad": _replace_grad,
    "zero grads": lambda training: training.optimizer.zero_grad(),
    "zero grads in place": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "graph": _give_the_buffer_a_graph,
    "resize": _resize_storage,
    "view": _break_the_view,
    "hooks": _hooks,
    "containers": _containers,
    "objects": _objects,
    "random": _random_numbers,
    "settings": _process_settings,
    "optimizer": _optimizer,
    "reload": _reload,
    "evaluate": lambda training: training.model.eval() and None,
    "freeze": lambda training: training.model.requires_grad_(False) and None,
    "new attribute": _set("new", torch.ones(2)),
    "new module": _set("another", nn.Linear(2, 2)),
    "new parameter": _set("alone", nn.Parameter(torch.ones(1))),
    "untie": lambda training: setattr(training.model.head, "weight", nn.Parameter(torch.ones(7, 4))),
    "buffer to none": _set("running", None),
    "remove module": lambda training: delattr(training.model, "dropout"),
    "metric": lambda training: training.model.mean.reset(),
    "ema": lambda training: training.model.ema.clear(),
}


@given(
    steps_before=st.integers(0, 2),
    names=st.lists(st.just("step") | st.sampled_from(sorted(CHANGES)), max_size=6),
    keep=st.booleans(),
    times=st.integers(1, 2),
)
@THOROUGH
def test_anything_comes_back(steps_before: int, names: list[str], keep: bool, times: int) -> None:
    """After any changes in any order the state is bit for bit what it was and each object itself, time and again."""
    training = Training()
    for _ in range(steps_before):
        training.step()
    digest = Digester(keep)
    then = digest(**training.roots())
    state = TrainingState.capture(*training.roots().values())
    assert differences(digest(**training.roots()), then) == []
    for _ in range(times):
        for name in names:
            with contextlib.suppress(Exception):
                CHANGES[name](training)
        state.restore()
        assert differences(digest(**training.roots()), then) == []


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_change_shows_and_comes_back(name: str, steps_before: int) -> None:
    """Each change, to new and to used modules, shows in the digest (nothing is compared in vain) and is undone."""
    training = Training()
    for _ in range(steps_before):
        training.step()
    digest = Digester(keep=True)
    then = digest(**training.roots())
    state = TrainingState.capture(*training.roots().values())
    with contextlib.suppress(*[] if steps_before else [Exception]):  # a lazy layer refuses much before its first step
        CHANGES[name](training)
    changed = differences(digest(**training.roots()), then)
    state.restore()
    assert changed != [] or steps_before == 0
    assert differences(digest(**training.roots()), then) == []
