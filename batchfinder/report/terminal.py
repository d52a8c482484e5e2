"""Lines on stderr, and text that may come from anywhere made fit to be shown."""

from __future__ import annotations

import os
import sys


def tell(line: str) -> None:
    """Print a line on stderr, and go on where nobody reads it any more or its disk is full."""
    try:
        print("\n".join(map(printable, line.replace("\t", "    ").split("\n"))), file=sys.stderr, flush=True)
    except OSError:
        # What is left in its buffer would fail again when Python closes it, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def printable(text: str, most: int | None = None) -> str:
    """A text without what a terminal would take for commands, such as colours, on one line.

    Args:
        most: characters; of a longer text the middle is left out.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]}...{text[-(most // 2) :]}"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
