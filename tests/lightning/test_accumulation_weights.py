"""Every step's gradient is that of the mean over its window's samples, and where it was already nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from batchfinder.accumulation import plan_accumulation
from batchfinder.lightning.accumulation import Accumulating
from batchfinder.lightning.ddp import ranks_of
from tests.forks import Forks, forks
from tests.lightning.tiny import Rows, Stream, trainer


class Weighing(Accumulating):
    """With a plan, while the trainer says how many micro-batches are accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan_accumulation(1, 1)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._ranks = ranks_of(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._ranks.close()


class Net(pl.LightningModule):
    """Writes down each step's gradients, the weights they were taken at, and the samples they are of."""

    def __init__(self, dtype: torch.dtype = torch.float64, fused: bool = False, skip: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 4, dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(4, 1, dtype=dtype)
        )
        self.fused, self.skip = fused, skip
        self.steps: list[tuple[list[Any], list[Any], Any]] = []
        self.window: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        """The mean over the samples."""
        rows = (batch if isinstance(batch, torch.Tensor) else batch[0]) / 10
        return ((self.net(rows.to(self.net[0].weight.dtype)) - rows.sum(1, keepdim=True)) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.skip:
            return None
        self.window.append(batch)
        return self.loss(batch)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, *args, **kwargs)
        gradients = [parameter.grad.clone() for parameter in self.parameters()]
        self.steps.append((gradients, self.window, copy.deepcopy(self.net.state_dict())))
        self.window = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=self.fused)


def fit(module: Net, loader: Any, accumulation: int, weighing: bool = True, **options: Any) -> Net:
    """One seeded run."""
    pl.seed_everything(1, verbose=False)
    callbacks = [Weighing()] if weighing else []
    trainer(callbacks=callbacks, accumulate_grad_batches=accumulation, **options).fit(module, loader)
    return module


def expected(module: Net, step: int, clip: float | None = None) -> list[torch.Tensor]:
    """The gradient of the mean over a step's samples, at the step's weights."""
    _, window, weights = module.steps[step]
    again = Net()
    again.net.load_state_dict(weights)
    rows = torch.cat([batch if isinstance(batch, torch.Tensor) else batch[0] for batch in window])
    again.loss(rows).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(again.parameters(), clip)
    return [parameter.grad for parameter in again.parameters()]


def far(module: Net, **options: Any) -> float:
    """The largest relative difference between any step's gradient and the expected one."""
    return max(
        float((have - want).norm() / want.norm())
        for step, (gradients, _, _) in enumerate(module.steps)
        for have, want in zip(gradients, expected(module, step, **options), strict=True)
    )


def equal_steps(ours: Net, theirs: Net) -> list[bool]:
    """For each step whether two runs' gradients are bit for bit the same."""
    return [
        all(torch.equal(one, other) for one, other in zip(mine[0], yours[0], strict=True))
        for mine, yours in zip(ours.steps, theirs.steps, strict=True)
    ]


class Batches:
    """An iterable of batches that is no DataLoader."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_every_window(rows, batch_size, accumulation, stream):
    """For any dataset, micro-batch and accumulation, mapped or streamed, each gradient is the window's mean's."""
    data = Stream(rows) if stream else Rows(rows)
    module = fit(Net(), DataLoader(data, batch_size=batch_size), accumulation, max_epochs=2)
    batches = -(-rows // batch_size)
    assert len(module.steps) == 2 * -(-batches // accumulation)
    assert far(module) < 1e-12


def test_lightning_alone_is_wrong():
    """Without the weighing the last window's gradient is off by a large factor, so these tests can fail."""
    module = fit(Net(), DataLoader(Rows(22), batch_size=4), 4, weighing=False)
    assert far(module) > 0.2


@pytest.mark.parametrize(("rows", "batch_size", "accumulation"), [(24, 4, 3), (24, 4, 6), (22, 4, 1), (24, 24, 1)])
def test_nothing_changes_when_it_divides(rows, batch_size, accumulation):
    """Where an epoch is whole windows of whole micro-batches, or nothing accumulates, not a bit changes."""
    with_it, without = (
        fit(Net(), DataLoader(Rows(rows), batch_size=batch_size, shuffle=True), accumulation, weighing, max_epochs=3)
        for weighing in (True, False)
    )
    assert equal_steps(with_it, without) == [True] * len(without.steps)


def test_full_windows_before_the_last():
    """In an epoch that does not divide, the windows before the last are bit for bit Lightning's."""
    ours, theirs = (fit(Net(), DataLoader(Rows(22), batch_size=4), 2, weighing) for weighing in (True, False))
    assert equal_steps(ours, theirs) == [True, True, False]


def test_clipping_comes_after():
    """Gradients are clipped by the norm that the weighed gradient has."""
    module = fit(Net(), DataLoader(Rows(22), batch_size=4), 4, gradient_clip_val=0.05)
    assert far(module, clip=0.05) < 1e-12


def test_shuffled_with_drop_last():
    """drop_last leaves whole micro-batches and a shorter window."""
    module = fit(Net(), DataLoader(Rows(22), batch_size=4, shuffle=True, drop_last=True), 3, max_epochs=2)
    assert [len(window) for _, window, _ in module.steps] == [3, 2, 3, 2]
    assert far(module) < 1e-12


def test_limited_batches():
    """An epoch cut short by limit_train_batches ends in a shorter window as well."""
    module = fit(Net(), DataLoader(Rows(40), batch_size=4), 4, limit_train_batches=6)
    assert [len(window) for _, window, _ in module.steps] == [4, 2]
    assert far(module) < 1e-12


class Tokens(Rows):
    """Samples whose lengths differ, packed: no tensor's first dimension counts samples."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), torch.zeros(index % 5 + 1)


def packed(samples: Any) -> Any:
    """Rows stacked, and lengths joined end to end."""
    return torch.stack([row for row, _ in samples]), torch.cat([tokens for _, tokens in samples])


@pytest.mark.parametrize("length_known", [True, False])
def test_packed_batches(length_known):
    """Packed batches are counted by the loader; where it cannot, and tensors disagree, micro-batches count the same."""
    rows = Tokens(16)
    loader = DataLoader(rows, batch_size=4, collate_fn=packed)
    data: Any = loader if length_known else Batches(loader)
    ours, theirs = (fit(Net(), data, 2, weighing) for weighing in (True, False))
    assert equal_steps(ours, theirs) == [True] * len(theirs.steps)
    assert far(fit(Net(), DataLoader(Tokens(22), batch_size=4, collate_fn=packed), 4)) < 1e-12


def test_batches_of_any_size():
    """Micro-batches of any sizes, from an iterable that is no loader, count by their samples."""
    rows = torch.stack([Rows(30)[index] for index in range(30)])
    module = fit(Net(), Batches(rows.split([3, 7, 1, 5, 2, 8, 4])), 3)
    assert [len(window) for _, window, _ in module.steps] == [3, 3, 1]
    assert far(module) < 1e-12


def test_skipped_micro_batch():
    """A training_step that returns None counts as before: full windows stay bit for bit Lightning's."""
    ours, theirs = (fit(Net(skip=1), DataLoader(Rows(24), batch_size=4), 3, weighing) for weighing in (True, False))
    assert equal_steps(ours, theirs) == [True] * len(theirs.steps)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    """With a GradScaler, unscaled before the hook or (a fused optimizer) after it, the factor is the same."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    module = fit(Net(torch.float32, fused), DataLoader(Rows(22), batch_size=4), 4, plugins=[plugin])
    scale = 2.0**8 if fused else 1.0
    for step, (gradients, _, _) in enumerate(module.steps):
        for have, want in zip(gradients, expected(module, step), strict=True):
            assert float((have.double() / scale - want).norm() / want.norm()) < 0.02
    assert len(module.steps) == 2


@pytest.fixture(scope="module")
def several_ranks() -> Iterator[Forks]:
    """Runs a fit on some ranks."""
    with forks("tests.lightning.ddp_accumulation") as started:
        yield started


def test_two_processes(several_ranks: Forks) -> None:
    """With DDP each gradient is that of the mean over both processes' samples of the window, and both have it."""
    ranks = several_ranks.run(rows=44)
    # the sampler deals rows out in the order of a permutation; both halves together are what the mean is over
    order = torch.randperm(44, generator=torch.Generator().manual_seed(0)).tolist()
    rows = torch.stack([Rows(44)[index] for index in order])
    halves = [rows[0::2], rows[1::2]]
    for steps, half in zip(ranks, halves, strict=True):
        assert len(steps) == 2
        for (gradients, window, weights, _), (start, stop) in zip(steps, [(0, 16), (16, 22)], strict=True):
            assert torch.equal(_exact(window), half[start:stop])
            again = Net()
            again.net.load_state_dict({name: _exact(weight) for name, weight in weights.items()})
            again.loss(torch.cat([half[start:stop] for half in halves])).backward()
            for have, parameter in zip(gradients, again.parameters(), strict=True):
                assert float((_exact(have) - parameter.grad).norm() / parameter.grad.norm()) < 1e-12


@pytest.mark.parametrize(
    "rows",
    [
        [123, 122],
        pytest.param([253, 230], marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param([123, 122, 97, 128], marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
    ids=str,
)
def test_streams_of_other_lengths_on_each_rank(several_ranks: Forks, rows: list[int]) -> None:
    """Each step's gradient is that of the mean over all ranks' samples, and after each their weights are the same."""
    ranks = several_ranks.run(rows=rows)
    assert [len(steps) for steps in ranks] == [2 * -(-rows[0] // 128)] * len(rows)
    for step in zip(*ranks, strict=True):
        gradients, _, weights, after = step[0]
        assert all((other[0], other[2], other[3]) == (gradients, weights, after) for other in step)
        assert after != weights
        again = Net()
        again.net.load_state_dict({name: _exact(weight) for name, weight in weights.items()})
        again.loss(torch.cat([_exact(window) for _, window, _, _ in step])).backward()
        for have, parameter in zip(gradients, again.parameters(), strict=True):
            assert float((_exact(have) - parameter.grad).norm() / parameter.grad.norm()) < 1e-12


def _exact(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
