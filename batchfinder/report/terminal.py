"""Lines on stderr, and text that may come from anywhere made fit to be shown."""

from __future__ import annotations

import os
import sys

from batchfinder.errors import InvalidValue, shortened


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
    return str(error)
