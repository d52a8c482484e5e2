"""Tests of batchfinder/cli/sequence_length.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cli.main import main
from batchfinder.devices.cards import card
from batchfinder.recording.answers import search_seq_len
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Shape
from batchfinder.training.spec import StepOptions

pytestmark = pytest.mark.usefixtures("forked_recorders")

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL},
    "a window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024, **SMALL},
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("model", ["a window"])
def test_the_longest_fits_and_the_next_does_not(model: str, tmp_path: Path) -> None:
    """Each length recorded by itself agrees, at batches of one and of three; some lengths have a window's mask."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS[model]))
    options, device = StepOptions(), card("a100 40gb", "96MiB").device
    with Simulation(options.workload(str(file)), options.step()) as simulation:
        for batch_size in (1, 3):
            probe = simulation.probe(device, [])
            found = search_seq_len(probe, batch_size, 128, 4096).max_batch_size
            assert 128 <= found < 4096
            assert found % 128 == 0
            each = {found: True, found + 128: False, found // 256 * 128: True}
            for length, fits in each.items():
                assert probe.steady_state(batch_size, Shape(length), exact=True).fits is fits, (batch_size, length)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A row for each batch size; larger batches have room for shorter sequences, and a model's limit is named."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["llama"]))
    asked = ["sweep", "--find", "seq-len", "--model", str(file), "--gpu", "a100 40gb", "--budget", "96MiB"]
    asked += ["--batch-size", "1", "--batch-size", "3"]
    assert main([*asked, "--json"]) == 0
    one, three = json.loads(capsys.readouterr().out)["rows"]
    assert (one["batch_size"], three["batch_size"]) == (1, 3)
    assert one["max_seq_len"] > three["max_seq_len"] > 0
    assert max(one["peak_reserved_bytes"], three["peak_reserved_bytes"]) <= 96 << 20
    assert main([*asked[:-2], "--budget", "4GiB"]) == 0
    assert "4096 is the most that its positions allow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--find", "gold"), "--find: invalid value 'gold'; expected one of batch-size, seq-len"),
        (("--batch-size", "2"), "--batch-size: invalid value '2'; expected --find seq-len with it"),
        (("--find", "seq-len", "--mfu", "0.4"), "expected none of it with --find seq-len, whose answer is a length"),
        (("--find", "seq-len", "--seq-len", "8"), "expected none of it with --find seq-len, whose answer is a length"),
        (("--find", "seq-len", "--batch-size", "0"), "--batch-size: invalid value '0'; expected a whole number"),
        (("--find", "seq-len", "--device", "cpu", "--budget", "1GiB"), "--gpu or --device simulated"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str) -> None:
    """With what was expected, before anything is recorded."""
    assert main(["sweep", *options]) == 1
    assert message in capsys.readouterr().err
