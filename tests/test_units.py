"""Bytes and shares to text and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.errors import InvalidValue
from batchfinder.units import (
    GIB,
    KIB,
    MIB,
    format_bytes,
    format_dollars,
    parse_budget,
    parse_bytes,
    parse_count,
    parse_headroom,
    parse_share,
    parse_utilisation,
)

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
        ("1" * 24, int("1" * 24)),
    ],
)
def test_parse(text, size):
    """Units of 1024 and of 1000 are told apart, with or without a space, in any case, to the byte."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "0GiB", "0.5", "-1GiB", "GiB", "12GiBs", "12 Gi B", "1e9", "1.GiB", "nan", "12,5GB", "9" * 60]
)
def test_bad_text(text):
    """What is no positive size is refused, with the option's name and examples."""
    with pytest.raises(InvalidValue) as error:
        parse_bytes(text, option="--budget")
    expected = "expected a positive size such as 12GiB, 900MiB or 24GB."
    assert str(error.value) == f"--budget: invalid value {text!r}; {expected}"
    assert (error.value.option, error.value.value) == ("--budget", text)


@pytest.mark.parametrize(
    "value",
    ["9" * 5000, "0." + "9" * 5000, f"{'9' * 5000}GiB", 10**5000, 1 << 81],
    ids=["digits", "places", "unit", "number", "1 << 81"],
)
def test_more_than_any_device_has(value):
    """It is refused, also where Python itself reads and writes no such number; the message does not repeat it all."""
    with pytest.raises(InvalidValue) as error:
        parse_bytes(value, "--budget")
    assert len(str(error.value)) < 600


def test_number_of_bytes():
    """A whole number is a number of bytes; a truth value is not."""
    assert parse_bytes(5 << 20, "budget") == 5 << 20
    with pytest.raises(InvalidValue, match=r"^budget: "):
        parse_bytes(True, "budget")


@pytest.mark.parametrize(
    ("value", "share"), [("5%", 0.05), (" 12.5 % ", 0.125), ("0.01", 0.01), (0.05, 0.05), (0, 0.0), ("0%", 0.0)]
)
def test_share(value, share):
    """A share is a number or a percentage."""
    assert parse_share(value, "--tolerance") == share


@pytest.mark.parametrize(
    "value", [1, 1.0, -0.1, "1", "-1", "100%", "nan", "%", "", "exact", None, float("nan"), "1GiB"]
)
def test_bad_share(value):
    """What is not a share from 0 to below 1 is refused, with the option's name and examples."""
    with pytest.raises(InvalidValue) as error:
        parse_share(value, "--tolerance")
    assert str(error.value).startswith("--tolerance: ")
    assert str(error.value).endswith("expected a share from 0 to below 1, such as 0.01 or 1%.")


@pytest.mark.parametrize(
    ("value", "share"), [("40%", 0.4), (" 40 % ", 0.4), ("0.4", 0.4), (0.4, 0.4), (1, 1.0), ("100%", 1.0)]
)
def test_utilisation(value, share):
    """A share that may be all, as a number or a percentage."""
    assert parse_utilisation(value, "--mfu") == share


@pytest.mark.parametrize("value", [0, "0", "0%", -0.1, 1.01, "101%", 40, "nan", "much", "", None, True])
def test_bad_utilisation(value):
    """Nothing, more than all and what is no number are refused, with the option's name and examples."""
    with pytest.raises(InvalidValue) as error:
        parse_utilisation(value, "--mfu")
    assert str(error.value).startswith("--mfu: ")
    assert str(error.value).endswith("expected a share above 0 and at most 1, such as 0.4 or 40%.")


@pytest.mark.parametrize(
    ("dollars", "digits", "text"),
    [
        (None, 3, "-"),
        (0.526, None, "0.53"),
        (0.0026, None, "0.00"),
        (0.0, 3, "0.00"),
        (0.0094573, 3, "0.00946"),
        (0.526, 3, "0.526"),
        (1.0, 3, "1.00"),
        (31.212, 3, "31.21"),
    ],
)
def test_dollars(dollars, digits, text):
    """With cents, and with as many digits as are asked for where cents would be too coarse."""
    assert format_dollars(dollars, digits) == text


@pytest.mark.parametrize(
    ("value", "headroom"),
    [
        ("0", 0.0),
        ("0.25", 0.25),
        ("5%", 0.05),
        (" 12.5 % ", 0.125),
        (0.05, 0.05),
        (0, 0),
        (1 << 20, 1 << 20),
        ("1GiB", 1 << 30),
        (" 1GB ", 10**9),
        ("7 B", 7),
    ],
)
def test_headroom(value, headroom):
    """A float, a percentage and a text without a unit are shares; a whole number and a size are bytes."""
    assert parse_headroom(value) == headroom
    assert type(parse_headroom(value)) is type(headroom)


@pytest.mark.parametrize(
    "value",
    [1.0, -0.1, -1, True, None, float("nan"), "1", "2", "100%", "-5%", "x%", "%", "", "inf", "nan", "1e999", "much"],
)
def test_bad_headroom(value):
    """All of the memory, less than none of it, and what is neither a share nor a size are refused."""
    with pytest.raises(InvalidValue) as error:
        parse_headroom(value, "--headroom")
    assert str(error.value).startswith("--headroom: ")
    assert str(error.value).endswith("expected a share such as 0.1 or 10%, or a size such as 1GiB.")


def test_default_option():
    """Without an option's name the message says `size`."""
    with pytest.raises(InvalidValue, match=r"^size: invalid value 'x'"):
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12, "(was 12GiB meant?); nothing trains in 12 B."),
        ("12", "(was 12GiB meant?); nothing trains in 12 B."),
        (6000, "(was 6000MiB meant?); nothing trains in 5.86 KiB."),
        ("900kB", "expected a size such as 12GiB; nothing trains in 878.91 KiB."),
    ],
)
def test_a_budget_without_its_unit(value: int | str, text: str) -> None:
    """It asks which was meant."""
    with pytest.raises(InvalidValue) as caught:
        parse_budget(value, "--budget")
    assert str(caught.value).startswith(f"--budget: invalid value {value!r}; expected a size such as 12GiB")
    assert str(caught.value).endswith(text)
    assert parse_budget(str(MIB)) == parse_budget(MIB) == MIB


@pytest.mark.parametrize(("value", "count"), [(1, 1), ("007", 7), ("8", 8), (1 << 40, 1 << 40)])
def test_count(value: int | str, count: int) -> None:
    """A whole number is read as one and as text."""
    assert parse_count(value, "lora") == count


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, "a whole number of at least 1") for value in ("0", 0, -1, "-1", True, 1.0, "1.0", "", None, "²")),
        *((value, f"a whole number from 1 to {1 << 40}") for value in ((1 << 40) + 1, "9" * 5000)),
    ],
)
def test_bad_count(value: Any, expected: str) -> None:
    """Anything else is told with what would do."""
    with pytest.raises(InvalidValue) as caught:
        parse_count(value, "lora")
    assert (caught.value.option, caught.value.expected) == ("lora", expected)
