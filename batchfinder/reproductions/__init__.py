"""Published tables, found again: each reproduction is one module, named here.

Such a module offers what `reproduction.Reproducer` says. To add a table, write a module, and a line below.

The models of the published tables, written for the memory they take. They import torch; nothing else here does.
"""

from __future__ import annotations

REPRODUCTIONS = {
    "titan-x": "batchfinder.reproductions.titan_x",
    "bert-2019": "batchfinder.reproductions.bert_2019",
    "seq2seq": "batchfinder.reproductions.seq2seq",
    "multimodal-bert": "batchfinder.reproductions.multimodal_bert",
}
"""Modules by the name that `batchfinder reproduce` takes, in the order of `reproduce all`."""
