"""FunctionProbe: a device made of a memory curve."""

from __future__ import annotations

import doctest

import batchfinder.probe
from batchfinder.probe import FunctionProbe, Probe
from batchfinder.results import Measurement, Shape, Verdict


def test_at_the_capacity():
    """A size fits when its peak is exactly the capacity, and not with one byte more."""
    probe = FunctionProbe(lambda size, shape: size, 200)
    assert probe(200, Shape()) == Measurement(Verdict.FITS, 200, 200)
    assert probe(201, Shape()) == Measurement(Verdict.OUT_OF_MEMORY, message="needs 201 bytes of 200")


def test_shape_is_passed_on():
    """The curve sees the shape as well as the size."""
    probe = FunctionProbe(lambda size, shape: size * shape.seq_len, 1000)
    assert probe(10, Shape(100)).fits
    assert not probe(10, Shape(101)).fits


def test_is_a_probe():
    """It has all that a probe has to have, and says that it is simulated."""
    probe: Probe = FunctionProbe(lambda size, shape: size, 1)
    assert (probe.source, probe.unmodelled) == ("simulated", ())


def test_example():
    """The example in the docstring runs."""
    assert doctest.testmod(batchfinder.probe, extraglobs={"Shape": Shape}).failed == 0
