"""Which samples make a batch: in training those of like length, in a try the longest that the data have.

`table.py` imports no torch, so that the command line can use it.
"""
