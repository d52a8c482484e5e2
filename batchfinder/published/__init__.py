"""Published tables that are shown beside ours, each with its source."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files


@functools.cache
def titan_x() -> dict[tuple[str, int], int]:
    """The largest batch sizes that google-research/bert published for one 12 GB Titan X, by (model, sequence length).

    TensorFlow 1.11, fine-tuning with Adam in fp32; 0 where not even one sample fits.
    """
    table = tomllib.loads(files(__package__).joinpath("titan_x.toml").read_text())
    return {
        (row["model"], seq_len): size
        for row in table["rows"]
        for seq_len, size in zip(row["seq_len"], row["max_batch_size"], strict=True)
    }
