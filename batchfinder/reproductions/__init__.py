"""Published tables, found again. A new one is a line below and a module that offers:

- `WORKLOAD`, one of its workloads, with which the recording process is opened;
- `NEEDED_BYTES`, what the allocator must be able to take of a GPU for the cells to run there;
- `reproduce(context: Context) -> Reproduction`, which may raise any `BatchFinderError`.
"""

from __future__ import annotations

REPRODUCTIONS = {
    "titan-x": "batchfinder.reproductions.titan_x",
    "bert-2019": "batchfinder.reproductions.bert_2019",
    "seq2seq": "batchfinder.reproductions.seq2seq",
    "multimodal-bert": "batchfinder.reproductions.multimodal_bert",
}
"""Modules by the name that `batchfinder reproduce` takes, in the order of `reproduce all`."""
