"""`executable_batch_size` on generator functions: searched upwards on their first steps, run to their end once."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder import executable_batch_size
from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.results import Trial
from tests.loop.loops import MESSAGE
from tests.snapshot.state_digest import Digester, differences

Run = Generator[None, None, tuple[int, int]]
calls: list[tuple[str, int]] = []  # what functions did; module-level, so that nothing puts it back
AT_MODULE_LEVEL = nn.Linear(4, 1)


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """What is there already is not looked through in each garbage collection, as it may be in a program of a user's."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_calls_yet() -> None:
    """Each test sees its own."""
    calls.clear()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, most: int) -> None:
    """One optimizer step."""
    if batch_size > most:
        raise torch.OutOfMemoryError(MESSAGE)
    model(torch.randn(batch_size, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make(most: int = 45, steps: int = 5, **options: Any) -> Callable[[], tuple[int, int]]:
    """A function that makes its own model."""

    @executable_batch_size(**{"starting_batch_size": 16, "max_batch_size": 64, "tolerance": 0, **options})
    def train(batch_size: int) -> Run:
        calls.append(("begins", batch_size))
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            for _ in range(steps):
                step(model, optimizer, batch_size, most)
                calls.append(("steps", batch_size))
                yield
            calls.append(("ends", batch_size))
        finally:
            calls.append(("closes", batch_size))
        return batch_size, steps

    return train


def test_it_is_searched_upwards_and_runs_to_its_end_once() -> None:
    """From 16 to 45, with two steps at each size; what it returns comes back."""
    trials: list[Trial] = []
    assert make(on_trial=trials.append)() == (45, 5)
    assert {trial.batch_size for trial in trials if trial.fits} >= {45}
    assert {trial.batch_size for trial in trials if not trial.fits} >= {46}
    assert trials[0].batch_size == 13  # where a search begins that takes 16 for a guess
    assert [size for what, size in calls if what == "ends"] == [45]
    assert all(
        calls.count(("steps", trial.batch_size)) == 2 for trial in trials if trial.fits and trial.batch_size != 45
    )
    assert calls[-1] == ("closes", 45)


def test_it_is_searched_downwards_too() -> None:
    """From 16 to 3; and if nothing fits that is said."""
    assert make(3)() == (3, 5)
    with pytest.raises(OutOfMemory, match=f"^batch size 1 does not fit: {re.escape(MESSAGE)}"):
        make(0)()


def test_a_later_call_and_a_later_start_try_nothing() -> None:
    """The first knows the size, the second finds it in the cache; a function that refers to other things is tried."""
    train = make()
    train()
    calls.clear()
    train()
    assert [size for what, size in calls if what == "begins"] == [45]
    calls.clear()
    make()()
    assert [size for what, size in calls if what == "begins"] == [45]
    make(30)()
    assert calls[-1] == ("closes", 30)


def test_a_run_that_runs_out_of_memory_all_the_same_begins_again() -> None:
    """With a tenth less, as without a search."""

    @executable_batch_size(starting_batch_size=16, max_batch_size=64, tolerance=0, cache=False)
    def train(batch_size: int) -> Run:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for index in range(5):
            step(model, optimizer, batch_size, 45 if index < 2 else 42)
            yield
        return batch_size, 5

    with pytest.warns(UserWarning, match=r"^train ran out of memory at batch size 45 and is called again with 40: "):
        assert train() == (40, 5)


def test_what_it_is_given_and_what_it_encloses_come_back_after_each_try() -> None:
    """Training after a search is bit for bit the training with that size."""
    names = ("weights", "draws", "given")

    def train_at(size: int | None) -> dict[str, Any]:
        torch.manual_seed(3)
        given, enclosed, draws = nn.Linear(4, 4), nn.Linear(4, 1), []
        optimizer = torch.optim.AdamW([*given.parameters(), *enclosed.parameters()])

        def train(batch_size: int, model: nn.Module, *, optimizer: torch.optim.Optimizer) -> Run:
            for _ in range(3):
                draws.append(torch.rand(()).item())
                step(nn.Sequential(model, enclosed), optimizer, batch_size, 10)
                yield
            return batch_size, 3

        if size is None:
            decorated = executable_batch_size(max_batch_size=32, tolerance=0, cache=False)(train)
            assert decorated(given, optimizer=optimizer) == (10, 3)
        else:
            assert len(list(train(size, given, optimizer=optimizer))) == 3
        weights = [value.detach().numpy().tobytes() for value in (*given.parameters(), *enclosed.parameters())]
        return dict(zip(names, (weights, draws, torch.rand(()).item()), strict=True))

    assert train_at(None) == train_at(10)


def test_a_bug_leaves_everything_as_it_was() -> None:
    """And is raised as it came, with a note that names the size."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    @executable_batch_size(starting_batch_size=4, cache=False)
    def train(batch_size: int) -> Run:
        step(model, optimizer, batch_size, 10)
        yield
        raise ValueError("the labels are wrong")

    digest = Digester(keep=True)
    before = digest(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"^the labels are wrong") as caught:
        train()
    assert caught.value.__notes__ == ["Raised while executable_batch_size tried batch size 1."]
    assert differences(digest(model=model, optimizer=optimizer), before) == []


def test_a_model_out_of_reach_is_refused_before_it_changes() -> None:
    """A name of the module cannot be put back; one that the function makes need not be."""
    before = AT_MODULE_LEVEL.weight.detach().clone()

    @executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> Run:
        step(AT_MODULE_LEVEL, torch.optim.SGD(AT_MODULE_LEVEL.parameters()), batch_size, 10)
        yield
        return batch_size, 1

    said = (
        "what the function trains: 'Linear' will not do; expected an argument of the function, something that it makes "
        "itself, or a variable of an enclosing function, so that it can be put back after a try; names of the module "
        "cannot be reached."
    )
    with pytest.raises(InvalidValue, match=f"^{re.escape(said)}$"):
        train()
    assert torch.equal(AT_MODULE_LEVEL.weight, before)


def test_a_function_of_too_few_steps_is_refused() -> None:
    """It would have run to its end in a try."""
    said = (
        "train: 'ended after 1 yield at batch size 1' will not do; expected a yield after each optimizer step, and at "
        "least two steps at every size that is tried; max_batch_size= bounds them."
    )
    with pytest.raises(InvalidValue, match=f"^{re.escape(said)}$"):
        make(steps=1)()


def test_steps_are_counted_where_the_optimizer_steps() -> None:
    """A yield without a step, as a GradScaler's skipped ones, is followed further."""

    @executable_batch_size(starting_batch_size=4, max_batch_size=4, cache=False)
    def train(batch_size: int) -> Run:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for index in range(7):
            if index > 3:
                step(model, optimizer, batch_size, 10)
            calls.append(("yields", index))
            yield
        return batch_size, 7

    assert train() == (4, 7)
    tried = [index for what, index in calls if what == "yields"]
    assert max(tried[: tried.index(6)]) == 5


def test_arguments_are_a_part_of_the_question() -> None:
    """With another one it is searched anew."""

    @executable_batch_size(starting_batch_size=16, max_batch_size=64, tolerance=0)
    def train(batch_size: int, most: int) -> Run:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer, batch_size, most)
            yield
        return batch_size, most

    assert train(20) == (20, 20)
    again = executable_batch_size(starting_batch_size=16, max_batch_size=64, tolerance=0)(train.__wrapped__)
    assert again(30) == (30, 30)
