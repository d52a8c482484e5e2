"""What training costs at a stated share of the peak FLOP/s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchfinder.devices.training_cost import TrainingCost

COST = TrainingCost(mfu=0.5, usd_per_hour=36.0, gpus=2, peak_flops=1e12, sample_flops=1e9, tokens=10)
"""Each of the two does 500 samples in a second: 3.6 million samples in the hour that costs $36."""


def test_what_a_million_costs() -> None:
    """By hand: $10 for a million samples, and a tenth of that for tokens, of which a sample has ten."""
    assert COST.usd_per_million == pytest.approx(1.0)
    assert replace(COST, tokens=None).usd_per_million == pytest.approx(10.0)
    assert replace(COST, gpus=4).usd_per_million == pytest.approx(0.5)
    assert replace(COST, mfu=0.25).usd_per_million == pytest.approx(2.0)
    assert replace(COST, usd_per_hour=72.0).usd_per_million == pytest.approx(2.0)


def test_it_is_not_known_without_a_peak_or_flops() -> None:
    """Neither is taken to be nothing."""
    assert replace(COST, peak_flops=None).usd_per_million is None
    assert replace(COST, sample_flops=0).usd_per_million is None


def test_json_says_what_it_is_a_million_of() -> None:
    """With the figures that it is made of."""
    made_of = {"mfu": 0.5, "peak_flops": 1e12, "sample_flops": 1e9}
    assert COST.to_json() == {**made_of, "usd_per_million_tokens": pytest.approx(1.0)}
    assert replace(COST, tokens=None).to_json() == {**made_of, "usd_per_million_samples": pytest.approx(10.0)}
    unknown = replace(COST, peak_flops=None, sample_flops=0).to_json()
    assert unknown == {"mfu": 0.5, "peak_flops": None, "sample_flops": None, "usd_per_million_tokens": None}
