"""Tests of benchmarks/coverage.py: what is counted, and what is given to batchfinder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import coverage


@pytest.mark.slow
def test_types_of_every_task_are_counted_once() -> None:
    """A type that several Auto classes have is counted for the first of the tasks: BERT as masked."""
    types = coverage.model_types()
    assert {task for task, _ in types.values()} == {task for task, _ in coverage.TASKS}
    assert types["whisper"] == ("speech to text", "WhisperForConditionalGeneration")
    assert types["bert"] == ("masked", "BertForMaskedLM")
    assert types["qwen2_vl"] == ("vision-language", "Qwen2VLForConditionalGeneration")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3", "whisper"])
def test_configs_are_shallow_and_name_their_head(model_type: str) -> None:
    """Two layers, also in the parts of a config, and a list with an entry for each layer goes with them."""
    architecture = coverage.model_types()[model_type][1]
    figures = coverage.config_of(model_type, architecture)
    assert figures["architectures"] == [architecture]
    assert figures["model_type"] == model_type
    parts = [figures, *(value for value in figures.values() if isinstance(value, dict))]
    depths = [part[name] for part in parts for name in coverage.DEPTHS & set(part)]
    assert depths
    assert set(depths) == {2}


def test_reasons_say_what_went_wrong_and_nothing_of_this_machine(tmp_path: Path) -> None:
    """The last line of an error, without folders."""
    traceback = f'File "{tmp_path}/code.py", line 3, in f\nValueError: no such thing in {tmp_path}/data.txt'
    assert coverage.reason(traceback) == "ValueError: no such thing in data.txt"
    said = f"model: invalid value '{tmp_path}/config.json'; expected figures that transformers accepts (no depth)."
    assert coverage.reason(said) == "no depth"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_type_of_each_kind_is_recorded(tmp_path: Path) -> None:
    """Text with and without experts, images, speech, and images with text: each works in both precisions."""
    types = ("siglip", "imagegpt", "mobilevitv2", "qwen3_moe", "mt5", "xlm-roberta", "janus", "wav2vec2", "whisper")
    out = tmp_path / "coverage.json"
    command = [sys.executable, coverage.__file__, *[f"--only={name}" for name in types], f"--out={out}"]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(out.read_text())["types"]
    assert {name: row.get("failed") for name, row in rows.items()} == dict.fromkeys(types)
    assert all(row[precision]["gradient_bytes"] > 0 for row in rows.values() for precision in coverage.PRECISIONS)
