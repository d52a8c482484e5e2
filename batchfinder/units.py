"""Bytes to text and back: the only place that formats memory."""

from __future__ import annotations

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
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(size: int) -> str:
    """Write a number of bytes the way PyTorch's messages do: `11.17 GiB`, `46.00 MiB`, `512 B`.

    Args:
        size: bytes; negative for a difference.
    """
    sign, size = ("-", -size) if size < 0 else ("", size)
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size} B"


def parse_bytes(text: str, *, option: str = "size") -> int:
    """Read `12GiB`, `11.17 GiB`, `900MB` or a plain number of bytes.

    Args:
        text: a number with an optional unit; KiB, MiB, GiB are powers of 1024, kB, MB, GB powers of 1000.
        option: the name the message calls the value by.

    Raises:
        InvalidValue: the text is not a size, or not a positive one.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    size = int(Fraction(match.group(1)) * factor) if match and factor else 0
    if size <= 0:
        raise InvalidValue(option, text, "a positive size such as 12GiB, 900MiB or 24GB")
    return size
