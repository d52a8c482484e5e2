"""Lines on stderr, and text that may come from anywhere made fit to be shown."""

from __future__ import annotations

import errno
import os
import re
import sys

from batchfinder.errors import InvalidValue, shortened
from batchfinder.units import format_bytes

_TOO_MANY_FILES = os.strerror(errno.EMFILE)
_NO_MEMORY = re.compile(
    "MemoryError|bad_alloc|failed to map segment|(?:cannot|can't) allocate memory|can't start new thread", re.IGNORECASE
)
"""In what Python, C++, the dynamic linker, the system and PyTorch say where no more memory can be mapped."""


def tell(line: str) -> None:
    """Print a line on stderr, and go on where nobody reads it any more or its disk is full."""
    try:
        print(printable(line, lines=True), file=sys.stderr, flush=True)
    except OSError:
        # What is left in its buffer would fail again when Python closes it, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def printable(text: str, most: int | None = None, lines: bool = False) -> str:
    """A text without what a terminal would take for commands, such as colours.

    Args:
        most: characters; of a longer text the middle is left out.
        lines: keep those of a text of several, such as a traceback; without it the text is one line.
    """
    if most is not None:
        text = shortened(text, most)
    if text.isprintable():
        return text
    kept, text = ("\n", text.replace("\t", "    ")) if lines else ("", text)
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


def words_of(error: BaseException) -> str:
    """What an error says, with an option as it is typed on the command line: `--seq-len` for `seq_len`."""
    if isinstance(error, InvalidValue) and error.option.isidentifier() and error.option.islower():
        return f"--{error.option.replace('_', '-')}{str(error).removeprefix(error.option)}"
    words = str(error)
    return f"{words}\n{limit}" if (limit := limit_met(words)) else words


def last_line_of(error: BaseException) -> str:
    """The last line of what an error says: of a traceback, the exception."""
    return words_of(error).strip().splitlines()[-1]


def limit_met(words: str) -> str:
    """What to do where a limit on this process explains an error; empty where none does.

    Args:
        words: what the error says; a child's will do, which has the same limits.
    """
    import resource

    again = "in a new shell where this one does not allow it"
    if _TOO_MANY_FILES in words:
        count, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"This process may have {count} files open, which are too few: raise that with ulimit -n 1024, {again}."
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    if size == resource.RLIM_INFINITY or not _NO_MEMORY.search(words):
        return ""
    return (
        f"This process may map {format_bytes(size)} of memory (ulimit -v {size >> 10}), and PyTorch with a model of "
        f"BERT's size takes more than 1 GiB: raise that with ulimit -v unlimited, {again}."
    )
