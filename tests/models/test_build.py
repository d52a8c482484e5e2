"""Tests of batchfinder/models/build.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from batchfinder.errors import InvalidValue, UnknownName
from batchfinder.models import build_workload

TINY = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 40,
    "max_position_embeddings": 24,
}
USER_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, input_ids):
        return self.embedding(input_ids)

def tiny_bert():
    from transformers import BertConfig, BertForMaskedLM
    return BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a model in a folder."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "gpt2"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(TINY))
    return place


@pytest.mark.parametrize("spec", ["./gpt2", "gpt2/config.json", "./gpt2/config.json"])
def test_a_path_is_a_path(folder: Path, spec: str) -> None:
    """A folder and the file in it mean the same; written with a separator it wins over a model of that name."""
    workload = build_workload(spec)
    assert type(workload.model).__name__ == "BertForSequenceClassification"
    assert workload.max_seq_len == 24


def test_a_path_without_a_separator(folder: Path) -> None:
    """A folder whose name is no model's is found too."""
    folder.rename(folder.parent / "checkpoint")
    assert build_workload("checkpoint").max_seq_len == 24


def test_a_path_that_does_not_exist() -> None:
    """What looks like a path but is none is not called an unknown model."""
    with pytest.raises(InvalidValue, match=r"'nowhere/config.json' will not do; .* that exists"):
        build_workload("nowhere/config.json")


def test_an_unknown_name() -> None:
    """A name that nothing has is an unknown model."""
    with pytest.raises(UnknownName, match=r"unknown model 'gtp2'\. Did you mean gpt2"):
        build_workload("gtp2")


def test_an_unknown_attention() -> None:
    """Attention has three names."""
    with pytest.raises(InvalidValue, match="attention: 'fast' will not do; expected one of eager, sdpa, flash"):
        build_workload("gpt2", attention="fast")


def test_options_of_a_module_of_ones_own(write_module: Callable[[str, str], None]) -> None:
    """Options that only the user's code can set are refused for it, by name."""
    write_module("mine", USER_MODEL)
    with pytest.raises(InvalidValue, match="mine:Net chooses the attention of its model itself"):
        build_workload("mine:Net", attention="eager")
    with pytest.raises(InvalidValue, match="mine:Net enables it in its model"):
        build_workload("mine:Net", gradient_checkpointing=True)


def test_options_of_a_transformers_model_of_ones_own(write_module: Callable[[str, str], None]) -> None:
    """A transformers model that a factory returns takes every option, and gets its head's batches."""
    write_module("mine", USER_MODEL)
    workload = build_workload("mine:tiny_bert", attention="eager", gradient_checkpointing=True)
    assert workload.model.config._attn_implementation == "eager"
    assert all(layer.gradient_checkpointing for layer in workload.model.bert.encoder.layer)
    assert workload.max_seq_len == 512
    workload.model.train()(**workload.make_batch(2, 6)).loss.backward()
