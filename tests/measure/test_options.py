"""The options that the callback, `tune_trainer` and `tune_batch_size` share."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from batchfinder import BatchFinder, InvalidValue, tune_batch_size, tune_trainer
from batchfinder.cache import Store
from batchfinder.measure.options import SearchOptions

SHARED = {field.name: field.default for field in fields(SearchOptions)}


@pytest.mark.parametrize("function", [BatchFinder.__init__, tune_trainer, tune_batch_size])
def test_each_of_the_three_takes_all_of_them(function: Callable[..., Any]) -> None:
    """By the same names and with the same defaults."""
    taken = {name: one.default for name, one in inspect.signature(function).parameters.items() if name in SHARED}
    assert taken == SHARED


def test_sizes_and_shares_are_had_in_one_form() -> None:
    """Whatever a user has typed; a trainer's own bounds go before those that were asked for."""
    options = SearchOptions(headroom="5%", budget="2GiB", max_batch_size=64)
    limits = options.limits(max_batch_size=32, num_devices=4)
    assert (limits.headroom, options.budget_bytes) == (0.05, 2 << 30)
    assert (limits.max_batch_size, limits.num_devices, limits.tolerance) == (32, 4, 0.01)
    assert SearchOptions(headroom="1GiB").limits().headroom == 1 << 30
    assert SearchOptions().budget_bytes is None


def test_the_cache_is_a_place_a_store_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None and True are the default place."""
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "default"))
    store = Store(tmp_path / "own")
    assert SearchOptions(cache=False).store is None
    assert SearchOptions(cache=store).store is store
    stores = [SearchOptions(cache=cache).store for cache in (None, True, str(tmp_path / "own"))]
    assert [each and each.url for each in stores] == [str(tmp_path / "default"), str(tmp_path / "default"), store.url]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("exact", "yes"),
        ("certify", 1),
        ("headroom", "12"),
        ("budget", "12"),
        ("min_batch_size", 0),
        ("goal", "speed"),
        ("tolerance", 1.5),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(option: str, value: object) -> None:
    """When the options are made, not when a search begins."""
    with pytest.raises(InvalidValue) as refused:
        SearchOptions(**{option: value})  # type: ignore[arg-type]
    assert refused.value.option == option


def test_bounds_without_a_size_between_them_are_refused() -> None:
    """A largest size below the smallest."""
    with pytest.raises(InvalidValue, match="max_batch_size"):
        SearchOptions(min_batch_size=8, max_batch_size=4)
