from __future__ import annotations

import pytest

from batchfinder.devices import Budget
from batchfinder.devices.device import memory_fraction
from batchfinder.errors import InvalidValue
from batchfinder.units import GIB


def test_parse() -> None:
    """`12GiB` is 12 x 1024^3 bytes, and the budget prints as GiB."""
    assert Budget.parse("12GiB") == Budget(12 * GIB)
    assert str(Budget(12 * GIB)) == "12.00 GiB budget"


@pytest.mark.parametrize("text", ["0", "-1GiB", "lots", ""])
def test_parse_refuses(text: str) -> None:
    """What is not a positive size is refused in the option's name."""
    with pytest.raises(InvalidValue, match="--budget"):
        Budget.parse(text)


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_must_be_positive(limit_bytes: int) -> None:
    """A budget of nothing cannot be meant."""
    with pytest.raises(InvalidValue):
        Budget(limit_bytes)


def test_caps_and_never_adds() -> None:
    """A budget takes away from a card, and gives it nothing it does not have."""
    assert Budget(12 * GIB).of(80 * GIB) == 12 * GIB
    assert Budget(12 * GIB).of(8 * GIB) == 8 * GIB


def test_fraction() -> None:
    """The fraction is of the device's total, and at most all of it."""
    assert memory_fraction(12 * GIB, 48 * GIB) == 0.25
    assert memory_fraction(12 * GIB, 8 * GIB) == 1.0
