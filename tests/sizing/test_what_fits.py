"""Tests of batchfinder/sizing/what_fits.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.sizing.what_fits import what_fits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": ["speed"]}, "keep: invalid value 'speed'"),
        ({"allow": ["prefix"]}, "allow: invalid value 'prefix'"),
        ({"recorder": "a100"}, "recorder: invalid value 'a100'"),
        ({"min_micro_batch": 9}, "min_micro_batch: invalid value 9; expected from 1 to 8"),
        ({"seq_len": 4096}, "seq_len: invalid value 4096; expected at most 512"),
    ],
)
def test_refused(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    """What cannot be used is named, with what can."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 24, "vocab_size": 100}))
    with pytest.raises(InvalidValue, match=message):
        what_fits(str(path), gpu="T4", **arguments)  # type: ignore[arg-type]
