"""Batches of samples of mixed lengths, each length with a batch size of its own.

`table.py` imports no torch, so that the command line can use it.
"""
