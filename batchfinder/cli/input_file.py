"""Files that verbs read."""

from __future__ import annotations

import sys
from pathlib import Path

from batchfinder.errors import InvalidValue


def read_file(option: str, path: str) -> str:
    """Read it whole.

    Args:
        option: what the path was given for.
        path: as it was given; `-` for stdin.

    Raises:
        InvalidValue: it cannot be read, or is not text.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidValue(option, path, f"a file that can be read ({reason})") from error
