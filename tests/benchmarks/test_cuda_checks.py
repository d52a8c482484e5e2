"""The search for the true maximum against brute force, the gpu tests, and what a run does before its checks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchfinder.errors import InvalidValue
from benchmarks.cuda import checks
from benchmarks.cuda.checks import REACH, ROOT, default_path, gpu_test_files, read_test_results, true_maximum


@example(true=40, predicted=41)
@example(true=40, predicted=37)
@given(true=st.integers(0, 300), predicted=st.integers(0, 600))
def test_the_largest_is_found_from_any_prediction(true: int, predicted: int) -> None:
    """And every size within reach of it was tried, none twice."""
    tried: list[int] = []

    def trains(size: int) -> bool:
        tried.append(size)
        return size <= true

    assert true_maximum(trains, predicted) == true
    assert len(tried) == len(set(tried))
    assert set(range(max(1, true - REACH), true + REACH + 1)) <= set(tried)
    assert min(tried) >= 1


@given(true=st.integers(1, 100), away=st.integers(-2, 2), holes=st.sets(st.integers(1, 100)), beyond=st.integers(1, 3))
def test_sizes_that_train_beyond_ones_that_do_not(true: int, away: int, holes: set[int], beyond: int) -> None:
    """Near a fair prediction no order is relied on: a size that trains within reach above a failure is the answer."""
    last = true + beyond
    assert true_maximum(lambda size: size in (true, last) or (size < true and size not in holes), true + away) == last


def test_an_exact_prediction_takes_seven_tries() -> None:
    """The three on either side, and itself."""
    tried: list[int] = []
    assert true_maximum(lambda size: tried.append(size) or size <= 40, 40) == 40  # type: ignore[func-returns-value]
    assert tried == [*range(37, 44)]


def test_files_with_gpu_tests(tmp_path: Path) -> None:
    """Those that have the mark, and no others; this repository has some."""
    for name, text in (("a/test_b.py", "@pytest.mark.gpu\n"), ("test_c.py", "gpu\n"), ("a/d.py", "pytest.mark.gpu\n")):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert gpu_test_files(tmp_path) == ["tests/a/test_b.py"]
    assert gpu_test_files(ROOT)


def test_pytests_words_are_read() -> None:
    """Each test's result by name; the output's end is kept where something did not pass, or nothing ran."""
    text = (
        "tests/a/test_b.py::test_c[x-1] PASSED [ 33%]\n"
        "tests/a/test_b.py::test_d FAILED [ 66%]\n"
        "tests/a/test_b.py::test_e SKIPPED (needs a CUDA device) [100%]\n"
        "FAILED tests/a/test_b.py::test_d - assert 1 == 2\n"
    )
    assert read_test_results(text) == {
        "counts": {"failed": 1, "passed": 1, "skipped": 1},
        "not_passed": {"tests/a/test_b.py::test_d": "failed"},
        "end_of_output": text,
    }
    assert read_test_results("tests/a.py::b PASSED\n") == {
        "counts": {"passed": 1},
        "not_passed": {},
        "end_of_output": "",
    }
    assert read_test_results("ImportError")["end_of_output"] == "ImportError"


def test_no_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what is there, what to do, and writes nothing."""

    error = InvalidValue("device", "cuda:0", "a card that PyTorch can use here")

    def look(device: str) -> None:
        raise error

    monkeypatch.setattr(checks, "query_gpu", look)
    arguments = argparse.Namespace(minutes=None, parts=("cells",), dry_run=False, device="cuda:0")
    assert checks.run(arguments) == 1
    assert capsys.readouterr().err == f"cuda_check: {error} With --dry-run all that needs no card is run.\n"


def test_where_a_file_goes() -> None:
    """A card's among the results, by its name; a dry run's never."""
    assert default_path("NVIDIA H200", False) == ROOT / "benchmarks" / "results" / "cuda_check-nvidia-h200.json"
    assert "results" not in default_path("NVIDIA H200", True).parts
