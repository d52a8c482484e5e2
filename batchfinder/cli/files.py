"""Files that verbs read.

Files that results are written to, beside what is printed.
"""

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


def check_file(option: str, path: str | None) -> None:
    """Find out before the work whether a file could be written.

    Args:
        option: what the path was given for.
        path: as it was given; None for no file.

    Raises:
        InvalidValue: there is no such folder, or the path is one.
    """
    if path is not None and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
        raise InvalidValue(option, path, "a file in a folder that exists")


def write_file(option: str, path: str, content: str | bytes) -> None:
    """Write it.

    Args:
        option: what the path was given for.
        path: as it was given.
        content: all of it; text is written as UTF-8.

    Raises:
        InvalidValue: it cannot be written.
    """
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidValue(option, path, f"a file that can be written ({error.strerror})") from error
