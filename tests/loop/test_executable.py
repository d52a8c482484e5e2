"""`executable_batch_size` on functions: what is called with what, and every message in full."""

from __future__ import annotations

import gc
import inspect
import re
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder import executable_batch_size
from batchfinder.cache import Store
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


def test_it_goes_down_by_halves_until_it_runs_and_begins_there_next_time() -> None:
    """Each time a warning has the numbers, and points at the caller."""
    train, sizes = make(50)
    said = f"train ran out of memory at batch size 128 and is called again with 64: {MESSAGE}"
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$") as warned:
        assert train("data") == (32, "data", 1)
    assert sizes == [128, 64, 32]
    assert {warning.filename for warning in warned} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train("more")[0] == 32
    assert sizes == [128, 64, 32, 32]


@pytest.mark.slow
def test_the_next_start_begins_with_the_size_that_ran(own_cache: Path) -> None:
    """From the cache; and goes down from there. Other arguments or starting sizes are other questions."""
    assert make(50)[0]("data")[0] == 32
    train, sizes = make(50)
    assert train("data")[0] == 32
    assert sizes == [32]
    store = Store(own_cache)
    (record,) = store.records()
    store.put(record.key, replace(record.result, max_batch_size=64, trials=()))
    train, sizes = make(50)
    assert train("data")[0] == 32
    assert sizes == [64, 32]
    for call, changed in ((("data", 2), {}), (("other",), {}), (("data",), {"starting_batch_size": 64})):
        train, sizes = make(50, **changed)
        train(*call)
        assert sizes[0] == changed.get("starting_batch_size", 128)
    train, sizes = make(50, cache=False)
    train("data")
    assert sizes == [128, 64, 32]


def test_a_size_found_with_less_memory_is_not_begun_with(own_cache: Path) -> None:
    """A neighbour may have gone."""
    make(50)[0]("data")
    store = Store(own_cache)
    (record,) = store.records()
    make(50)[0]("data")  # at 32, which leaves the record as it is
    store.put(record.key, replace(record.result, free_bytes=1 << 20))
    train, sizes = make(1000)
    assert train("data")[0] == 128
    assert sizes == [128]


def test_a_cache_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    """The function runs."""
    (tmp_path / "file").write_text("")
    train, _ = make(1000, cache=str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be used: .* are not cached"):
        assert train("data")[0] == 128


def test_sizes_may_be_reduced_by_a_function_as_in_accelerate() -> None:
    """It takes no argument, and returns the next size, which must be smaller."""
    following = iter([100, 40])
    train, sizes = make(50, reduce_batch_size_fn=lambda: next(following), cache=False)
    assert train("data")[0] == 40
    assert sizes == [128, 100, 40]
    train, _ = make(50, reduce_batch_size_fn=lambda: 128, cache=False)
    with pytest.raises(InvalidValue, match=r"reduce_batch_size_fn: .*128.*a function that returns a size below 128"):
        train("data")


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
    assert sizes == [4, 2, 1]


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
        if batch_size > 2:
            raise RuntimeError(MESSAGE)
        return batch_size

    gc.disable()
    try:
        assert train() == 2
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


def test_a_wrong_size_is_refused_where_it_is_written() -> None:
    """When the function is decorated, not when it is called."""
    with pytest.raises(InvalidValue, match=r"starting_batch_size: .*0.*a size of at least 1"):
        make(1000, starting_batch_size=0)


class Method:
    """A class of the user's."""

    def train(self, batch_size: int) -> None:
        """Its first argument is not the batch size."""


def _generates(batch_size: int) -> Iterator[int]:
    yield batch_size


def _takes_keywords_alone(*, batch_size: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (Method.train, "a function; within the method, define one that takes the batch size first and uses self"),
        (_takes_keywords_alone, "a function whose first argument, given by position, is the batch size"),
        (lambda: None, "a function whose first argument, given by position, is the batch size"),
        (_generates, "a function that returns when it has trained; to search for the largest size, use tune_batch_siz"),
    ],
    ids=["method", "keyword", "nothing", "generator"],
)
def test_what_cannot_be_given_a_batch_size_first_is_refused(function: Any, said: str) -> None:
    """When it is decorated, with what to do instead."""
    with pytest.raises(InvalidValue, match=re.escape(said)):
        executable_batch_size(function)


def test_a_bound_method_has_its_object_already() -> None:
    """Its first argument is the batch size."""
    assert executable_batch_size(Method().train)() is None


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would train with another size."""
    train, sizes = make(1000)
    monkeypatch.setattr(options.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(options.torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(InvalidValue, match=r"^processes that train together: invalid value 4; "):
        train("data")
    assert sizes == []


def test_a_size_that_fails_in_a_later_call_is_cached_too(own_cache: Path) -> None:
    """The next start begins below it."""
    most = [50]

    @executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        if batch_size > most[0]:
            raise torch.OutOfMemoryError(MESSAGE)
        return batch_size

    assert train() == 32
    most[0] = 20
    assert train() == 16
    (record,) = Store(own_cache).records()
    assert record.result.max_batch_size == 16
    assert [trial.batch_size for trial in record.result.trials] == [32, 16]
