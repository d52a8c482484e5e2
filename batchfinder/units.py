"""Bytes, shares, counts and dollars to text and back: what alone formats memory, and reads `12GiB` and `5%`."""

from __future__ import annotations

import contextlib
import math
import re
from fractions import Fraction

from batchfinder.errors import InvalidValue

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": KIB,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": MIB,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": GIB,
    "t": 1000**4,
    "tb": 1000**4,
    "tib": 1 << 40,
}
_MOST_BYTES, _MOST_DIGITS = 1 << 80, 50
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(size: int) -> str:
    """Write a number of bytes the way PyTorch's messages do: `11.17 GiB`, `46.00 MiB`, `512 B`, `-1.00 MiB`."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size} B"


def format_dollars(dollars: float | None, digits: int | None = None) -> str:
    """Write US dollars with their cents; a dash for what is not known.

    Args:
        digits: how many to write at least, from the first that is no zero on; None for the cents alone.
    """
    if dollars is None:
        return "-"
    places = 2 if digits is None or not dollars else max(2, digits - 1 - math.floor(math.log10(dollars)))
    return f"{dollars:.{places}f}"


def parse_bytes(value: int | str, option: str = "size") -> int:
    """Read `12GiB`, `11.17 GiB`, `900MB` or a plain number of bytes.

    KiB, MiB and GiB are powers of 1024; kB, MB and GB are powers of 1000.

    Raises:
        InvalidValue: the value is not a size, or not a positive one.
    """
    size = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif match := _SIZE.fullmatch(str(value)):
        factor = _FACTORS.get(match[2].lower(), 0)
        size = int(Fraction(match[1]) * factor) if len(match[1]) < _MOST_DIGITS else 0
    if not 0 < size <= _MOST_BYTES:
        raise InvalidValue(option, value, "a positive size such as 12GiB, 900MiB or 24GB")
    return size


def parse_budget(value: int | str, option: str = "budget") -> int:
    """Read the most memory that may be used, as `parse_bytes` does.

    Raises:
        InvalidValue: the value is not a size, or below 1 MiB, in which nothing trains: a unit may be missing.
    """
    size = parse_bytes(value, option)
    if size < MIB:
        number = str(value).strip()
        meant = f" (was {number}{'GiB' if size < 1024 else 'MiB'} meant?)" if number.isdigit() else ""
        raise InvalidValue(option, value, f"a size such as 12GiB{meant}; nothing trains in {format_bytes(size)}")
    return size


def parse_share(value: float | str, option: str) -> float:
    """Read a share from 0 to below 1: `0.01` or `1%`.

    Raises:
        InvalidValue: the value is not a number, or not within the range.
    """
    share = _as_share(value)
    if not 0 <= share < 1:
        raise InvalidValue(option, value, "a share from 0 to below 1, such as 0.01 or 1%")
    return share


def parse_utilisation(value: float | str, option: str) -> float:
    """Read how much of something is put to use, which is above 0 and at most all of it: `0.4` or `40%`.

    Raises:
        InvalidValue: the value is not a number, or not within the range.
    """
    share = _as_share(value)
    if isinstance(value, bool) or not 0 < share <= 1:
        raise InvalidValue(option, value, "a share above 0 and at most 1, such as 0.4 or 40%")
    return share


def _as_share(value: float | str) -> float:
    """The number, or the hundredth part of a percentage; -1 for what is neither."""
    try:
        text = value.strip() if isinstance(value, str) else value
        return float(text[:-1]) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except (TypeError, ValueError):
        return -1.0


_MAX_COUNT = 1 << 40


def parse_count(value: int | str, option: str) -> int:
    """Read a whole number of at least 1, given as one or as text.

    Raises:
        InvalidValue: it is not one, or larger than what any machine could train.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    digits = text.lstrip("0") if isinstance(text, str) and text.isdecimal() else ""
    if not digits:
        raise InvalidValue(option, value, "a whole number of at least 1")
    if len(digits) > len(str(_MAX_COUNT)) or not 0 < int(digits) <= _MAX_COUNT:
        raise InvalidValue(option, value, f"a whole number from 1 to {_MAX_COUNT}")
    return int(digits)


def parse_headroom(value: float | str, option: str = "headroom") -> float | int:
    """Read how much memory to leave free: a share of it (`0.05`, `5%`) or a size (`1GiB`, a whole number of bytes).

    A text without a unit is a share, so that `"1"` and `"2"` are refused rather than read as bytes.

    Returns:
        A float from 0 to below 1 for a share, an int for bytes.

    Raises:
        InvalidValue: the value is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    with contextlib.suppress(InvalidValue):
        return parse_share(value, option)
    if isinstance(value, str) and value.strip()[-1:].isalpha():
        with contextlib.suppress(InvalidValue):
            return parse_bytes(value, option)
    raise InvalidValue(option, value, "a share such as 0.1 or 10%, or a size such as 1GiB")
