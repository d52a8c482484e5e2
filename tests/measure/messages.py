"""What an `OutOfMemory` says, without the figures of this machine."""

from __future__ import annotations

import re


def without_figures(message: str) -> str:
    """The message without the limit and what the process held, which it must have named."""
    figures = r" The limit is \d[^,]+, of which \d\S* \w+ were held before the first try\."
    text, count = re.subn(figures, "", message)
    assert count == 1, message
    return text
