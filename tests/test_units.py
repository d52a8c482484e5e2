"""Bytes to text and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.errors import InvalidValue
from batchfinder.units import GIB, KIB, MIB, format_bytes, parse_bytes

QUICK = settings(derandomize=True, deadline=None, max_examples=300)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (46 * MIB, "46.00 MiB"),
        (MIB, "1.00 MiB"),
        (GIB, "1.00 GiB"),
        (11996954624, "11.17 GiB"),
        (2048 * GIB, "2048.00 GiB"),
        (-MIB, "-1.00 MiB"),
        (-5, "-5 B"),
    ],
)
def test_format(size, text):
    """Sizes read as they do in PyTorch's messages."""
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * GIB),
        (" 11.5 gib ", 11 * GIB + 512 * MIB),
        ("900MiB", 900 * MIB),
        ("24GB", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("1.5kB", 1500),
        ("2k", 2000),
        ("2KiB", 2048),
        ("3M", 3 * 10**6),
        ("3mb", 3 * 10**6),
        ("1TiB", 1024 * GIB),
        ("1TB", 10**12),
        ("1t", 10**12),
        ("12884901888", 12 * GIB),
        ("7 B", 7),
        ("9007199254740993", 9007199254740993),
        ("1" * 400, int("1" * 400)),
    ],
)
def test_parse(text, size):
    """Units of 1024 and of 1000 are told apart, with or without a space, in any case, to the byte."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "0GiB", "0.5", "-1GiB", "GiB", "12GiBs", "12 Gi B", "1e9", "1.GiB", "nan", "12,5GB"]
)
def test_bad_text(text):
    """What is no positive size is refused, with the option's name and examples."""
    with pytest.raises(InvalidValue) as error:
        parse_bytes(text, option="--budget")
    expected = "expected a positive size such as 12GiB, 900MiB or 24GB."
    assert str(error.value) == f"--budget: {text!r} will not do; {expected}"
    assert (error.value.option, error.value.value) == ("--budget", text)


def test_default_option():
    """Without an option's name the message says `size`."""
    with pytest.raises(InvalidValue, match=r"^size: 'x' will not do"):
        parse_bytes("x")


@QUICK
@given(st.integers(1, 1 << 50))
def test_round_trip(size):
    """What is printed reads back to within the last digit printed."""
    unit = next((unit for unit in (GIB, MIB, KIB) if size >= unit), 0)
    assert abs(parse_bytes(format_bytes(size)) - size) <= unit * 0.005 + 1


@QUICK
@given(st.integers(1, 1 << 80))
def test_plain_numbers(size):
    """A plain number of bytes reads back exactly."""
    assert parse_bytes(str(size)) == parse_bytes(f"{size}B") == size
