"""The verb `table`, on what a sweep printed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from batchfinder.cli.main import main
from batchfinder.report.sweep import SCHEMA, SweepRow

CELLS = (
    *(("bert-base", "Titan X Pascal", seq_len, size) for seq_len, size in ((512, 33), (64, 269), (128, 134))),
    *(("bert-large", "Titan X Pascal", seq_len, size) for seq_len, size in ((64, 4), (512, 0))),
    ("bert-large", "Tesla T4", 64, 5),
)


def _row(model: str, gpu: str, seq_len: int | None, size: int) -> SweepRow:
    step = ("train", "fp32", "adamw", "default", False)
    return SweepRow(model, seq_len, gpu, 12 << 30, *step, size, None, None, "simulated", trials=8, seconds=0.5)


def _rows(*cells: tuple[str, str, int | None, int]) -> str:
    """What `sweep --json` prints of these."""
    return json.dumps({"schema": SCHEMA, "rows": [_row(*cell).to_json() for cell in cells]}, indent=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two models on two cards."""
    path = tmp_path / "sweep.json"
    path.write_text(_rows(*CELLS))
    return path


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["table", *arguments])
    return (code, *capsys.readouterr())


def test_forms(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of JSON, the shortest length first; from a file or from stdin."""
    assert _run(capsys, str(file), "--model", "bert-base") == (0, '{"64": 269, "128": 134, "512": 33}\n', "")
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text()))
    assert _run(capsys, "-", "--model", "bert-base", "--format", "lhotse") == (
        0,
        '{"bucket_duration_bins": [64, 128, 512], "bucket_batch_size": [269, 134, 33]}\n',
        "",
    )


def test_lengths_where_nothing_fits(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are left out, and that is said."""
    assert _run(capsys, str(file), "--model", "bert-large", "--gpu", "Titan X Pascal") == (
        0,
        '{"64": 4}\n',
        "batchfinder: left out, since not one sample fits: seq_len 512\n",
    )


def test_mistakes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told in one line."""
    other, newer, none, fixed = (tmp_path / name for name in ("other", "newer", "none", "fixed"))
    other.write_text('{"schema": 1}')
    newer.write_text('{"schema": 2, "rows": []}')
    none.write_text(_rows())
    fixed.write_text(_rows(("net", "Tesla T4", None, 8)))
    sweep = "what `batchfinder sweep --json` prints, with schema 1"
    said = {
        (
            str(file),
        ): "--model: None will not do; expected one of those that the file has sizes of: bert-base, bert-large.",
        (
            str(file),
            "--model",
            "bert-large",
        ): "--gpu: None will not do; expected one of those that the file has sizes of: Titan X Pascal, Tesla T4.",
        (str(file), "--model", "gpt2"): "unknown model in this file 'gpt2'. Did you mean bert-base, bert-large?",
        (str(file), "--format", "yaml"): "--format: 'yaml' will not do; expected one of json, lhotse.",
        (str(other),): f"FILE: '{{\"schema\": 1}}' will not do; expected {sweep}.",
        (str(newer),): f"FILE: 'schema 2' will not do; expected {sweep}.",
        (str(none),): "batch sizes: 'there are none' will not do; expected a length at which at least one sample fits.",
        (str(fixed),): "batch sizes: 'of one fixed shape' will not do; expected sizes by length, found with seq_lens or"
        " --seq-len.",
        (str(tmp_path),): f"FILE: '{tmp_path}' will not do; expected a file that can be read (Is a directory).",
    }
    for arguments, message in said.items():
        assert _run(capsys, *arguments) == (1, "", f"batchfinder: {message}\n")
