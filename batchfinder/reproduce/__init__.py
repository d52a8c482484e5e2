"""Published tables, found again: each reproduction is one module, named here.

Such a module offers what `reproduction.Reproducer` says. To add a table, write a module, and a line below.
"""

from __future__ import annotations

REPRODUCTIONS = {
    "titan-x": "batchfinder.reproduce.titan_x",
    "bert-2019": "batchfinder.reproduce.bert_2019",
    "seq2seq": "batchfinder.reproduce.seq2seq",
    "multimodal-bert": "batchfinder.reproduce.multimodal_bert",
}
"""Modules by the name that `batchfinder reproduce` takes, in the order of `reproduce all`."""
