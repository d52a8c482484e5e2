"""Published tables, found again. A new one is a module that offers what `base.Reproducer` says, and a line below."""

from __future__ import annotations

REPRODUCTIONS = {
    "titan-x": "batchfinder.reproductions.titan_x",
    "bert-2019": "batchfinder.reproductions.bert_2019",
    "seq2seq": "batchfinder.reproductions.seq2seq",
    "multimodal-bert": "batchfinder.reproductions.multimodal_bert",
}
"""Modules by the name that `batchfinder reproduce` takes, in the order of `reproduce all`."""
