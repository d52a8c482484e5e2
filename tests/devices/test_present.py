from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.devices import PresentGpu, driver_version, find_gpu, parse_nvidia_smi, present_gpus
from batchfinder.devices.detect import _TIMEOUT_SECONDS
from batchfinder.units import MIB

# In the format of nvidia-smi --query-gpu=index,name,memory.total,compute_cap --format=csv,noheader,nounits, with the
# names and totals that nvidia-smi prints for these cards.
TWO_CARDS = "0, NVIDIA H200, 143771, 9.0\n1, Tesla V100-SXM2-16GB, 16384, 7.0\n"


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program of that name, and nothing else, on PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_parse_two_cards() -> None:
    """Each line is a GPU, in order, with its total in bytes."""
    assert parse_nvidia_smi(TWO_CARDS) == (
        PresentGpu(0, "NVIDIA H200", 143771 * MIB, (9, 0)),
        PresentGpu(1, "Tesla V100-SXM2-16GB", 16384 * MIB, (7, 0)),
    )


def test_parsed_names_are_in_the_catalogue() -> None:
    """What nvidia-smi calls a card, the catalogue finds; nvidia-smi's total is the larger, by at most 3 %."""
    for present in parse_nvidia_smi(TWO_CARDS):
        assert 1.0 <= present.smi_total_bytes / find_gpu(present.name).memory_bytes < 1.03


def test_parse_passes_over_what_is_no_gpu() -> None:
    """Warnings, half lines and cards without a total are passed over; a missing capability is None."""
    text = (
        "WARNING: infoROM is corrupted at gpu 0000:00:1E.0\n\nNo devices were found\n"
        "0, NVIDIA A2, 15356, [N/A]\n1, NVIDIA GB10, [N/A], 12.1\n2, Tesla K80\n"
    )
    assert parse_nvidia_smi(text) == (PresentGpu(0, "NVIDIA A2", 15356 * MIB, None),)


def test_parse_keeps_a_comma_in_a_name() -> None:
    """A name may hold a comma: index comes first, total and capability last."""
    assert parse_nvidia_smi("3, Card, the second, 1024, 8.6")[0].name == "Card, the second"


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without nvidia-smi has no GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert present_gpus() == ()


def test_asks_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer of the nvidia-smi on PATH is what is reported."""
    fake_nvidia_smi(tmp_path, monkeypatch, "echo '0, Tesla T4, 15360, 7.5'")
    assert present_gpus() == (PresentGpu(0, "Tesla T4", 15360 * MIB, (7, 5)),)


@pytest.mark.parametrize("script", ["echo '0, Tesla T4, 15360, 7.5'; exit 9", "while :; do :; done", "printf '\\377'"])
def test_failure_is_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """An nvidia-smi that fails, hangs or prints rubbish means no GPUs, never an exception."""
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert present_gpus(timeout_seconds=1.0) == ()


def test_default_timeout_is_short() -> None:
    """Nobody waits for a hanging driver longer than ten seconds."""
    assert _TIMEOUT_SECONDS <= 10.0


def test_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's version is asked for by itself; nvidia-smi has a line for each card. Without one it is empty."""
    script = '[ "$*" = "--query-gpu=driver_version --format=csv,noheader" ] && printf "580.95.05\\n580.95.05\\n"'
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert driver_version() == "580.95.05"
    fake_nvidia_smi(tmp_path, monkeypatch, "exit 9")
    assert driver_version() == ""
