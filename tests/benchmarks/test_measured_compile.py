"""Tests of benchmarks/measured/torchtitan and torchtune: what `torch.compile` changes, as published."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.measured.case import record

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.usefixtures("forked_recorders")]


@pytest.mark.parametrize(("source", "within"), [("torchtitan", 0.002), ("torchtune", 0.01)])
def test_the_published_change_is_predicted(source: str, within: float) -> None:
    """Less memory, by the published figure to within a quarter of it; and both rows are near their figures."""
    cases = importlib.import_module(f"benchmarks.measured.{source}.cases").cases()[:2]
    predicted = []
    for case, trace in record(cases):
        assert not isinstance(trace, Exception), trace
        predicted.append(case.predicted_bytes(trace))
        assert predicted[-1] == pytest.approx(case.published_bytes, rel=within)
    published = cases[1].published_bytes - cases[0].published_bytes
    assert predicted[1] - predicted[0] == pytest.approx(published, rel=0.25)
