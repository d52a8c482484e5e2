"""`executable_batch_size` on functions: what is called with what, and every message in full."""

from __future__ import annotations

import gc
import inspect
import re
import warnings
import weakref
from typing import Any

import pytest
import torch

from batchfinder import executable_batch_size
from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.loop import options
from tests.loop.loops import MESSAGE

pytestmark = pytest.mark.filterwarnings("ignore:.* ran out of memory at batch size")


def make(most: int, **options: Any) -> tuple[Any, list[int]]:
    """A function that runs up to a size, and the sizes it is called with."""
    sizes: list[int] = []

    @executable_batch_size(**options)
    def train(batch_size: int, data: str, epochs: int = 1) -> tuple[int, str, int]:
        """Train."""
        sizes.append(batch_size)
        if batch_size > most:
            raise torch.OutOfMemoryError(MESSAGE)
        return batch_size, data, epochs

    return train, sizes


def test_a_function_that_runs_is_called_once() -> None:
    """Nothing larger is tried: nobody knows what it does outside."""
    train, sizes = make(1000, starting_batch_size=16)
    assert train("data", epochs=2) == (16, "data", 2)
    assert sizes == [16]


def test_it_does_not_begin_above_the_largest_size_of_use() -> None:
    """Nor with the size that it would begin with otherwise."""
    train, sizes = make(1000, max_batch_size=20)
    assert train("data") == (20, "data", 1)
    assert sizes == [20]


def test_it_goes_down_by_a_tenth_until_it_runs_and_begins_there_next_time() -> None:
    """As accelerate does; each time a warning has the numbers, and points at the caller."""
    train, sizes = make(100)
    said = f"train ran out of memory at batch size 128 and is called again with 115: {MESSAGE}"
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$") as warned:
        assert train("data") == (92, "data", 1)
    assert sizes == [128, 115, 103, 92]
    assert {warning.filename for warning in warned} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train("more")[0] == 92
    assert sizes == [128, 115, 103, 92, 92]


def test_it_may_be_used_without_parentheses_and_keeps_its_name() -> None:
    """It begins with 128, as accelerate's does."""

    @executable_batch_size
    def train(batch_size: int) -> int:
        """Train."""
        return batch_size

    assert (train(), train.__name__, train.__doc__) == (128, "train", "Train.")
    assert list(inspect.signature(train).parameters) == ["batch_size"]


def test_the_smallest_size_may_be_too_large() -> None:
    """It goes down to 1, and the error has the device's words."""
    train, sizes = make(0, starting_batch_size=4)
    said = f"batch size 1 does not fit: {MESSAGE} train ran at no batch size; try a smaller model or a lower precision."
    with pytest.raises(OutOfMemory, match=f"^{re.escape(said)}$"):
        train("data")
    assert sizes == [4, 3, 2, 1]


def test_nothing_of_a_failed_call_is_in_memory_when_the_next_begins() -> None:
    """The traceback of an error keeps its tensors alive; they are gone."""
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    @executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        alive.append(sum(reference() is not None for reference in references))
        activations = torch.ones(batch_size)
        references.append(weakref.ref(activations))
        circle: list[Any] = [activations]
        circle.append(circle)
        if batch_size > 6:
            raise RuntimeError(MESSAGE)
        return batch_size

    gc.disable()
    try:
        assert train() == 6
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("error", [ValueError("the labels are wrong"), RuntimeError("a memory of an elephant")])
def test_what_is_not_about_the_size_is_raised_unchanged(error: Exception) -> None:
    """At once, and the very exception."""
    sizes = []

    @executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        raise error

    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error
    assert sizes == [8]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda train: train(16, "data", 2),
            "train was called with a batch size, which the decorator passes itself. Call it without: train('data', 2)",
        ),
        (
            lambda train: train(16, "data", epochs=2),
            "train was called with a batch size, which the decorator passes itself. Call it without: "
            "train('data', epochs=2)",
        ),
        (lambda train: train(), "missing a required argument: 'data'"),
        (lambda train: train("data", steps=2), "got an unexpected keyword argument 'steps'"),
        (lambda train: train("data", batch_size=2), "multiple values for argument 'batch_size'"),
    ],
)
def test_a_wrong_call_is_a_type_error(call: Any, said: str) -> None:
    """One that passes the batch size is told what to write instead."""
    train, sizes = make(1000)
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        call(train)
    assert sizes == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"starting_batch_size": 0}, "starting_batch_size: 0 will not do; expected a size of at least 1."),
        ({"max_batch_size": 0}, "max_batch_size: 0 will not do; expected a size of at least 1."),
        ({"tolerance": 2.0}, "tolerance: 2.0 will not do; expected a share from 0 (exact) to below 1, such as 0.01."),
        (
            {"headroom": "much%"},
            "headroom: 'much%' will not do; expected a share from 0.0 to below 1.0 or such as '5%', or a number of "
            "bytes or such as '1GiB'.",
        ),
        ({"budget": "much"}, "budget: 'much' will not do; expected a positive size such as 12GiB, 900MiB or 24GB."),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(options: dict[str, Any], said: str) -> None:
    """When the function is decorated, not when it is called."""
    with pytest.raises(InvalidValue, match=f"^{re.escape(said)}$"):
        make(1000, **options)


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would train with another size."""
    train, sizes = make(1000)
    monkeypatch.setattr(options.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(options.torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(InvalidValue, match=r"^processes that train together: 4 will not do; "):
        train("data")
    assert sizes == []
