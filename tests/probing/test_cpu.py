"""Real training in real children under a real RLIMIT_AS."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.outcome import Shape, Stop, Verdict
from batchfinder.probing.cpu import CpuProbe
from batchfinder.search import Secant
from batchfinder.step.spec import WorkloadSpec

pytestmark = pytest.mark.slow

MODULE = "tests.probing.workloads"
FREE = 2**33


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Children import the workloads from the checkout."""
    monkeypatch.chdir(Path(__file__).parents[2])


def _spec(name, **arguments):
    return WorkloadSpec(f"{MODULE}:{name}", arguments)


def _limit_between(name, shape, size):
    """Halfway between the peaks of a size and the next, which are a sample's memory apart and repeat to 50 KiB."""
    with CpuProbe(_spec(name), {}, FREE, threads=1) as free:
        low, high = (free(each, shape).peak_reserved_bytes for each in (size, size + 1))
    assert low + (1 << 18) < high
    return (low + high) // 2


@pytest.mark.parametrize(("name", "shape", "expected"), [("encoder", Shape(16), 47), ("convolutions", Shape(), 33)])
def test_the_answer_is_sharp(name, shape, expected):
    """Under a limit between the peaks of two sizes the search answers with the smaller.

    It takes at most 6 probes, of which 1 fails, where nothing is predicted; with a prediction within 3 %, 4 and 1. The
    answer then runs 5 times in a row and the next size fails 5 times in a row, with the allocator's own text.
    """
    limit = _limit_between(name, shape, expected)
    with CpuProbe(_spec(name), {}, limit, threads=1) as probe:
        for tolerance in (0.01, 0.0):
            search = Secant(limit, tolerance)
            outcome = find_max_batch_size(probe, shape, search=search)
            assert (outcome.max_batch_size, outcome.stop, outcome.source) == (expected, Stop.EXACT, "measured")
            assert len(outcome.trials) <= 6
            assert sum(not trial.fits for trial in outcome.trials) == 1
        for predicted in (expected - 1, expected, expected + 1):
            guided = find_max_batch_size(probe, shape, search=Secant(limit, predicted=predicted))
            assert guided.max_batch_size == expected
            assert len(guided.trials) <= 4
            assert sum(not trial.fits for trial in guided.trials) == 1
        runs = [probe(expected, shape) for _ in range(5)]
        fails = [probe(expected + 1, shape) for _ in range(5)]
    assert all(run.fits and run.peak_reserved_bytes <= limit for run in runs)
    assert {fail.verdict for fail in fails} == {Verdict.OUT_OF_MEMORY}
    for fail in fails:
        assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in fail.message


def test_every_probe_starts_from_the_same_slate():
    """A probe's peak does not depend on what was probed before it, failures included."""
    with CpuProbe(_spec("encoder"), {}, 40_000_000, threads=1) as probe:
        first = probe(8, Shape(16))
        assert not probe(4096, Shape(16)).fits
        assert probe(1, Shape(16)).fits
        again = probe(8, Shape(16))
    assert first.fits
    assert again.fits
    assert abs(first.peak_reserved_bytes - again.peak_reserved_bytes) <= 1 << 17


def test_accumulation_takes_what_it_takes():
    """With two micro-batches the gradients of the first are alive in the second: the peak is no smaller."""
    with CpuProbe(_spec("encoder"), {"optimizer": "sgd"}, FREE, threads=1) as one:
        alone = one(32, Shape(32))
    with CpuProbe(_spec("encoder"), {"optimizer": "sgd", "micro_batches": 8}, FREE, threads=1) as eight:
        many = eight(32, Shape(32))
    assert many.peak_reserved_bytes >= alone.peak_reserved_bytes


def test_a_model_larger_than_the_limit_fits_no_batch():
    """0 is an answer, and the message gives both sizes."""
    with CpuProbe(_spec("encoder"), {}, 1_000_000, threads=1) as probe:
        seen = probe(1, Shape(8))
        outcome = find_max_batch_size(probe, Shape(8), search=Secant(1_000_000))
    assert (seen.verdict, seen.message) == (Verdict.OUT_OF_MEMORY, "the model alone takes 2.00 MiB of 976.56 KiB")
    assert outcome.max_batch_size == 0


def test_a_limit_must_be_positive():
    """A limit of nothing is refused with the number."""
    with pytest.raises(InvalidValue) as caught:
        CpuProbe(_spec("encoder"), {}, 0)
    assert str(caught.value) == "limit_bytes: 0 will not do; expected a positive number of bytes."


def test_it_says_what_it_leaves_out():
    """The malloc settings that make it sharp are not those of every training run, and the outcome says so."""
    assert CpuProbe.unmodelled == (
        "fragmentation of glibc's heap: measured with malloc set to return freed memory at once",
    )
