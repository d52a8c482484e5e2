"""Secant without a prediction, on curves whose small sizes say nothing, where probes read what their stages take."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.find import find_max_batch_size
from batchfinder.results import Measurement, SearchResult, Shape, Verdict
from batchfinder.search import Secant
from batchfinder.units import GIB, MIB

QUICK = settings(derandomize=True, deadline=None, max_examples=300)
STATES = ((3, 5), (3, 4), (2, 4), (2, 3), (1, 2), (1, 3))
"""What stays and what the optimizer's step takes, in sizes of the weights: AdamW, fused; momentum; plain SGD."""


@dataclass
class FlatThenAffine:
    """A step whose peak is the optimizer's until the samples' outgrows it.

    Attributes:
        answer: the size at which the samples reach the limit.
        limit: bytes.
        share: of the limit that the optimizer's step takes.
        state: a row of `STATES`.
        over: what large sizes' peaks begin at, per byte that stays.
        ratio: bytes a sample adds to the peak, per byte it adds to the forward.
        segment: peaks are rounded up to it.
        tells: whether the probe says what stays and what the forward took.
    """

    answer: int
    limit: int
    share: float
    state: tuple[int, int] = (3, 5)
    over: float = 1.0
    ratio: float = 1.05
    segment: int = 1
    tells: bool = True
    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        rests = self.share * self.limit * self.state[0] / self.state[1]
        each = (self.limit - self.over * rests) / (self.answer + 0.5)
        peak = max(self.share * self.limit, self.over * rests + each * batch_size)
        reserved = -(-int(peak) // self.segment) * self.segment
        if reserved > self.limit:
            return Measurement(Verdict.OUT_OF_MEMORY)
        if not self.tells:
            return Measurement(Verdict.FITS, None, reserved)
        forward = int(0.01 * rests + each / self.ratio * batch_size)
        return Measurement(Verdict.FITS, None, reserved, resting_bytes=int(rests), forward_bytes=forward)


def truth(probe: FlatThenAffine) -> int:
    """The largest size that runs."""
    low, high = 0, 2 * probe.answer + 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if probe(middle, Shape()).fits else (low, middle)
    return low


def found(probe: FlatThenAffine, tolerance: float = 0.01) -> tuple[int, int]:
    """How many probes the search took and how many failed; the answer is right."""
    outcome: SearchResult = find_max_batch_size(probe, Shape(), search=Secant(probe.limit, tolerance))
    answer = truth(probe)
    assert answer - max(1, tolerance * answer) * (tolerance > 0) <= outcome.max_batch_size <= answer
    return len(outcome.trials), sum(not trial.fits for trial in outcome.trials)


probes = st.builds(
    FlatThenAffine,
    answer=st.one_of(st.integers(1, 4096), st.integers(1, 64)),
    limit=st.integers(2 * GIB, 80 * GIB),
    share=st.floats(0.02, 0.5),
    state=st.sampled_from(STATES),
    over=st.floats(1.0, 1.05),
    ratio=st.floats(1.0, 1.5),
)


@QUICK
@given(probes)
def test_flat_then_affine(probe):
    """Any answer up to 4096 takes at most 6 probes and 1 failure where the optimizer takes up to half of the limit."""
    count, failed = found(probe)
    assert count <= 6
    assert failed <= 1


def sweep(tells: bool) -> list[tuple[int, int]]:
    """Probes and failures on 600 curves: optimizers of up to 90 % of the limit, segments of up to 20 MiB."""
    rng = random.Random(3)
    taken = []
    for _ in range(600):
        probe = FlatThenAffine(
            answer=int(2 ** rng.uniform(0, 12)),
            limit=rng.randrange(2, 80) * GIB,
            share=rng.uniform(0.02, 0.9),
            state=rng.choice(STATES),
            over=rng.uniform(1.0, 1.17),
            ratio=rng.uniform(0.99, 1.5),
            segment=rng.choice([1, 2 * MIB, 20 * MIB]),
            tells=tells,
        )
        if truth(probe):
            taken.append(found(probe))
    return taken


def share_within(taken: list[tuple[int, int]], probes: int, failures: int) -> float:
    """The share of searches with at most so many probes and failures."""
    return sum(count <= probes and failed <= failures for count, failed in taken) / len(taken)


def test_the_whole_family():
    """Up to 90 % of the limit: 98 % in 6 probes and 1 failure, never more than 7 and 2; without readings a quarter."""
    told, untold = sweep(True), sweep(False)
    assert share_within(told, 6, 1) >= 0.975
    assert share_within(told, 7, 2) == 1
    assert share_within(untold, 6, 1) < 0.3


@pytest.mark.parametrize("answer", [1, 2, 3, 5, 17, 100, 640, 2047, 4096])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.85])
def test_exact(answer, share):
    """With a tolerance of 0 the answer is the exact maximum."""
    assert found(FlatThenAffine(answer, 12 * GIB, share), 0.0)[1] >= 1


def test_sizes():
    """As far as the forward's bytes allow, then the line to what stays, and the size that ends the search."""
    probe = FlatThenAffine(1000, 12 * GIB, 0.3)
    outcome = find_max_batch_size(probe, Shape(), search=Secant(probe.limit))
    assert [trial.batch_size for trial in outcome.trials] == [1, 64, 625, 995, 1004]
