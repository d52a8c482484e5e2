"""A batch in parts: its samples, its parts, their lengths and weights, and whether it may be split at all.

Which samples make a batch: in training those of like length, in a try the longest that the data have.

`table.py` imports no torch, so that the command line can use it.
"""

from __future__ import annotations
