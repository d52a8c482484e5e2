"""A batch and its samples: their number, lengths and weights, how a batch is split, and which samples make a batch.

`size_table.py` imports no torch, so that the command line can use it.
"""

from __future__ import annotations
