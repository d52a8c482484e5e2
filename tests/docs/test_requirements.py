"""The table of what trains on which card."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docs/make_requirements.py"


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """The script that makes it."""
    spec = importlib.util.spec_from_file_location("make_requirements", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """docs/requirements.json."""
    found: dict[str, Any] = json.loads(SCRIPT.with_name("requirements.json").read_text(encoding="utf-8"))
    return found


def test_the_page_is_of_the_results(made: ModuleType) -> None:
    """docs/requirements.md is what `python docs/make_requirements.py --page` writes."""
    assert SCRIPT.with_name("requirements.md").read_text(encoding="utf-8") == made.page()


def test_every_model_method_and_card_has_a_cell(made: ModuleType, results: dict[str, Any]) -> None:
    """With the options that the script has now."""
    wanted = [(model, method) for model in made.MODELS for method in made.methods_of(model)]
    assert [(row["model"], row["method"]) for row in results["rows"]] == wanted
    assert all(list(row["batch_sizes"]) == list(made.GPUS) for row in results["rows"])
    assert all(row["seq_len"] == made.MODELS[row["model"]] for row in results["rows"])
    assert results["options"] == {method: made.options(method, without_bf16=False) for method in made.METHODS}


def test_more_memory_takes_no_smaller_batch(results: dict[str, Any]) -> None:
    """Of cards with the same kernels; and where not one sample fits, it takes more than the card has."""
    for row in results["rows"]:
        sizes = row["batch_sizes"]
        assert sizes["A100 40GB"] <= sizes["A100 80GB"]
        assert sizes["RTX 3060"] <= sizes["RTX 3090"]
        assert sizes["RTX 4090"] <= sizes["L40S"]
        assert (sizes["RTX 4090"] == 0) == (row["one_sample_reserved_bytes"] > 23.1 * (1 << 30))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "gpus"),
    [
        pytest.param("gpt2", "full", ["RTX 3060", "H100 80GB"], marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "QLoRA", ["T4"], marks=pytest.mark.exhaustive),
    ],
)
def test_some_cells_are_found_again(
    made: ModuleType, results: dict[str, Any], model: str, method: str, gpus: list[str]
) -> None:
    """The same batch sizes and the same least memory as in the file."""
    (row,) = (row for row in results["rows"] if (row["model"], row["method"]) == (model, method))
    sizes, left_out = made.batch_sizes(model, method, gpus)
    assert sizes == {gpu: row["batch_sizes"][gpu] for gpu in gpus}
    assert set(left_out) <= set(row["unmodelled"])
    assert made.least_bytes(model, method) == row["one_sample_reserved_bytes"]
