"""Real training in real children under a real RLIMIT_AS.

How much a process takes differs by some MiB from one kind of processor to the next, and a little from one process to
the next. So what is asserted of real steps leaves some room; tests/search proves the figures on curves that stay put.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.measure.child_probe import CpuProbe
from batchfinder.results import Shape, StopReason, Verdict
from batchfinder.search import Secant
from batchfinder.training.spec import StepConfig, WorkloadSpec

MODULE = "tests.measure.workloads"
FREE = 2**33
NEAR = 0.15
"""The share by which sizes may differ that take the same memory."""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Children import the workloads from the checkout."""
    monkeypatch.chdir(Path(__file__).parents[2])


def _spec(name, **arguments):
    return WorkloadSpec(f"{MODULE}:{name}", arguments)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        pytest.param("encoder", Shape(16), 60, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("convolutions", Shape(), 40, marks=[pytest.mark.slow]),
    ],
)
def test_a_limit_means_the_same_at_each_try(name, shape, size):
    """Under a limit that is the peak of a size, searches answer with about that size, and it stays so.

    They stop at a failure, and take few probes, with a prediction or without. Then a size a little smaller runs each
    time, within the limit, and one that is larger fails each time; where the batch alone is larger than the limit, or
    the first tensor made of it, with the allocator's own text.
    """
    with CpuProbe(_spec(name), StepConfig(), FREE, threads=1) as free:
        limit = free(size, shape).peak_reserved_bytes
    lower, upper = int((1 - NEAR) * size), int((1 + NEAR) * size) + 1
    with CpuProbe(_spec(name), StepConfig(), limit, threads=1) as probe:
        for predicted in (None, size):
            outcome = find_max_batch_size(probe, shape, search=Secant(limit, 0.02, predicted=predicted))
            assert lower <= outcome.max_batch_size <= upper
            assert outcome.stop in (StopReason.EXACT, StopReason.TOLERANCE)
            assert outcome.source == "measured"
            assert len(outcome.trials) <= 10
            assert 1 <= sum(not trial.fits for trial in outcome.trials) <= 4
        runs = [probe(lower, shape) for _ in range(3)]
        fails = [probe(larger, shape) for larger in (upper, upper, 200 * size)]
    assert all(run.fits and run.peak_reserved_bytes <= limit for run in runs)
    assert {fail.verdict for fail in fails} == {Verdict.OUT_OF_MEMORY}
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in fails[-1].message


@pytest.mark.usefixtures("forked_workers")
def test_every_probe_starts_from_the_same_slate():
    """A probe's peak does not depend on what was probed before it, failures included."""
    limit = 200_000_000
    with CpuProbe(_spec("encoder"), StepConfig(), limit, threads=1) as probe:
        first = probe(40, Shape(16))
        assert not probe(4096, Shape(16)).fits
        assert probe(80, Shape(16)).fits
        again = probe(40, Shape(16))
    assert first.fits
    assert again.fits
    assert abs(first.peak_reserved_bytes - again.peak_reserved_bytes) <= NEAR * first.peak_reserved_bytes


@pytest.mark.usefixtures("forked_workers")
def test_accumulation_takes_what_it_takes():
    """With two micro-batches the gradients of the first are alive in the second."""
    peaks = {}
    for micro_batches in (1, 8):
        config = StepConfig(optimizer="sgd", micro_batches=micro_batches)
        with CpuProbe(_spec("encoder", width=256), config, FREE, threads=1) as probe:
            peaks[micro_batches] = probe(32, Shape(32)).peak_reserved_bytes
    weights = 4 * (2 * 12 + 4) * 256**2  # bytes: two layers of 12 width**2, and two tables of 500 rows
    assert peaks[8] >= peaks[1] + weights // 2


def test_a_model_larger_than_the_limit_fits_no_batch():
    """0 is an answer, and the message gives both sizes."""
    with CpuProbe(_spec("encoder"), StepConfig(), 1_000_000, threads=1) as probe:
        seen = probe(1, Shape(8))
        outcome = find_max_batch_size(probe, Shape(8), search=Secant(1_000_000))
    assert (seen.verdict, seen.message) == (Verdict.OUT_OF_MEMORY, "the model alone takes 2.00 MiB of 976.56 KiB")
    assert outcome.max_batch_size == 0


def test_a_limit_must_be_positive():
    """A limit of nothing is refused with the number."""
    with pytest.raises(InvalidValue) as caught:
        CpuProbe(_spec("encoder"), StepConfig(), 0)
    assert str(caught.value) == "limit_bytes: invalid value 0; expected a positive number of bytes."


def test_it_says_what_it_leaves_out():
    """The malloc settings that make it sharp are not those of every training run, and the outcome says so."""
    assert CpuProbe.unmodelled == (
        "fragmentation of glibc's heap: measured with malloc set to return freed memory at once",
    )
