"""The frozen records: what they refuse and how they read."""

from __future__ import annotations

import dataclasses

import pytest

from batchfinder.errors import OutOfMemory
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict


def test_shape_text():
    """A shape reads as its length, or as one sample where there is none."""
    assert str(Shape(128)) == "seq_len 128"
    assert str(Shape(0)) == "seq_len 0"
    assert str(Shape()) == "one sample"


def test_only_fits_fits():
    """Exactly one verdict may be reported as a maximum."""
    assert [verdict for verdict in Verdict if verdict.fits] == [Verdict.FITS]
    for verdict in Verdict:
        measurement = Measurement(verdict)
        assert measurement.fits == Trial(1, Shape(), measurement).fits == verdict.fits


def test_verdict_texts():
    """Each verdict is a text for a person."""
    assert {verdict.name: verdict.value for verdict in Verdict} == {
        "FITS": "fits",
        "OUT_OF_MEMORY": "the device ran out of memory",
        "SIZE_CEILING": "a kernel cannot index a tensor this large",
        "FELL_BACK": "a kernel had no memory for its workspace, and another took its place",
        "THRASHING": "every further step would have to release the allocator's cache (thrashing)",
        "HOST_OUT_OF_MEMORY": "the host ran out of memory",
        "HEADROOM": "it fits, but leaves less than the headroom free",
    }


def test_stop_texts():
    """Each reason to stop is a text for a person."""
    assert [stop.value for stop in StopReason] == [
        "the next size up was probed and failed",
        "the cap was reached",
        "the next failing size is within the tolerance",
    ]


def test_raise_for_a_fit():
    """A size that ran raises nothing."""
    assert Measurement(Verdict.FITS).raise_for_verdict(8) is None


@pytest.mark.parametrize(
    ("measurement", "batch_size", "message"),
    [
        (Measurement(Verdict.OUT_OF_MEMORY, message="tried 2 GiB"), 8, "batch size 8 does not fit: tried 2 GiB"),
        (Measurement(Verdict.OUT_OF_MEMORY), None, "does not fit: the device ran out of memory"),
        (Measurement(Verdict.SIZE_CEILING), 0, "batch size 0 does not fit: a kernel cannot index a tensor this large"),
    ],
)
def test_raise_for_a_failure(measurement, batch_size, message):
    """A failure raises with the device's own words, or the verdict's where it has none."""
    with pytest.raises(OutOfMemory) as error:
        measurement.raise_for_verdict(batch_size)
    assert str(error.value) == message
    assert error.value.batch_size == batch_size
    assert isinstance(error.value, MemoryError)


def test_frozen():
    """No record can be changed, and equal records are equal."""
    measurement = Measurement(Verdict.FITS)
    for record, name in (
        (Shape(1), "seq_len"),
        (measurement, "seconds"),
        (Trial(1, Shape(), measurement), "batch_size"),
        (SearchResult(Shape(), 1, StopReason.CAP, measurement), "source"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)
    assert SearchResult(Shape(), 1, StopReason.CAP, measurement) == SearchResult(
        Shape(), 1, StopReason.CAP, Measurement(Verdict.FITS)
    )
