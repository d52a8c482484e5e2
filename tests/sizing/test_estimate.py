"""`estimate` in Python, beside the command."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from batchfinder import EstimateFindings, InvalidValue, UnknownName, UserCodeFailed, estimate
from batchfinder.devices import find_gpu
from tests.cli.command import HERE, Run

pytestmark = pytest.mark.usefixtures("_folder_of_the_models", "forked_recorders")
BERT, TINY = str(HERE / "bert-tiny" / "config.json"), "mine:tiny"


@pytest.fixture(scope="module")
def found() -> EstimateFindings:
    """Eight samples of a small model on four of a cloud instance's GPUs."""
    return estimate(TINY, 8, seq_len=16, instance="p3.8xlarge", accumulation=2, optimizer="sgd")


def test_the_findings_are_those_of_the_command(run: Run, found: EstimateFindings) -> None:
    """Figure by figure, and in the same tables."""
    asked = ("estimate", "--model", TINY, "--batch-size", "8", "--seq-len", "16", "--instance", "p3.8xlarge")
    asked += ("--accumulation", "2", "--optimizer", "sgd")
    assert found.to_json() == run(*asked, "--json").json
    assert f"{found}\n" == run(*asked).out


def test_what_is_asked_of_the_findings(found: EstimateFindings) -> None:
    """The size, and bytes, which sum to the peak."""
    assert (found.model, found.batch_size, found.seq_len, found.gpu) == (TINY, 8, 16, "p3.8xlarge: 4 x V100 16GB")
    assert found.fits
    assert sum(found.bytes_by_kind.values()) == found.peak_bytes <= found.required_bytes < found.capacity_bytes
    assert found.capacity_bytes == find_gpu("V100").memory_bytes
    assert found.bytes_by_kind["gradients"] > 0
    assert found.alternatives is None
    assert list(found.strategies) == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP"]


def test_a_notebook_shows_the_tables(found: EstimateFindings) -> None:
    """Those by kind, of the largest tensors, and of several GPUs."""
    shown = found._repr_html_()
    assert shown.count("<table>") == 3
    assert "<b>The 10 largest tensors at the peak</b>" in shown
    assert '<td style="text-align: left">gradients</td>' in shown


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_does_not_fit_is_a_result() -> None:
    """It says by how much, and under which options the same trains."""
    said: list[str] = []
    found = estimate(TINY, 1 << 20, gpu="T4", seq_len=16, status=said.append)
    assert not found.fits
    assert found.required_bytes > found.capacity_bytes
    assert found.what_fits is not None
    assert found.what_fits.fits
    assert said[:2] == [f"building {TINY}", f"recording {TINY}"]


def test_advice_where_it_is_asked_for() -> None:
    """What other options would change, also where it fits."""
    found = estimate(TINY, gpu="T4", seq_len=16, mode="inference", advice=True)
    assert found.fits
    assert found.alternatives is not None
    assert [each.change for each in found.alternatives] == ["", "--precision 16-mixed"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"gpu": "RTX 9999"}, UnknownName, "^unknown GPU 'RTX 9999'"),
        ({"instance": "p99.huge"}, UnknownName, "^unknown instance 'p99.huge'"),
        ({"model": "bert-bse"}, UnknownName, "^unknown model 'bert-bse'"),
        ({"gpu": "T4", "instance": "p3.8xlarge"}, InvalidValue, "^gpu: .* either a gpu or an instance, not both"),
        ({"instance": "p3.8xlarge", "gpus": 5}, InvalidValue, "^gpus: .* at most 4, the GPUs of p3.8xlarge"),
        ({"gpus": 0}, InvalidValue, "^gpus: invalid value 0; expected a whole number of at least 1"),
        ({"batch_size": 0}, InvalidValue, "^batch_size: invalid value 0; expected a whole number of at least 1"),
        ({"seq_len": 1.5}, InvalidValue, "^seq_len: invalid value 1.5; expected a whole number"),
        ({"seq_len": 100_000}, InvalidValue, "^seq_len: invalid value 100000; expected at most 512 tokens"),
        ({"accumulation": 0}, InvalidValue, "^accumulation: invalid value 0; expected a whole number"),
        ({"strategy": "fsdp2"}, InvalidValue, "^gpus: invalid value 1; expected at least 2 with fsdp2"),
        ({"attention": "fast"}, InvalidValue, "^attention: .* one of eager, sdpa, flash"),
    ],
)
def test_mistakes(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """Each is told with the argument's own name, most before anything is built."""
    with pytest.raises(error, match=words):
        estimate(**{"model": BERT, **arguments})


def test_gpus_that_train_together() -> None:
    """All of an instance's with a strategy, or as many as are asked for; an A100 where nothing is said."""
    together: dict[str, Any] = {"seq_len": 8, "strategy": "fsdp2"}
    assert estimate(TINY, instance="p3.8xlarge", **together).request.options.gpus == 4
    assert estimate(TINY, instance="p3.8xlarge", gpus=2, **together).request.options.gpus == 2
    two = estimate(TINY, gpus=2, **together)
    assert (two.gpu, two.request.options.gpus, two.strategies) == ("A100 80GB", 2, {})


def test_a_model_that_cannot_be_recorded_raises() -> None:
    """What the model raised is in the text."""
    with pytest.raises(UserCodeFailed, match="no answer today"):
        estimate("mine:fails_in_forward", gpu="T4")


def test_public_names_are_functions_whatever_is_imported_first() -> None:
    """No module of the package takes the place of `estimate`, `sweep` or `simulate`."""
    first = ("memory_use.breakdown", "sizing.estimate", "sizing.sweep", "sizing.simulated_cells", "recording.simulate")
    imports = "; ".join(f"import batchfinder.{name}" for name in first)
    functions = "[type(each).__name__ for each in (batchfinder.estimate, batchfinder.sweep, batchfinder.simulate)]"
    done = subprocess.run([sys.executable, "-c", f"{imports}; print({functions})"], capture_output=True, text=True)
    assert done.stdout == "['function', 'function', 'function']\n", done.stderr
