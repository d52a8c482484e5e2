from __future__ import annotations

import platform
from pathlib import Path

import pytest

from batchfinder.devices import detect, host_name


def test_the_cpu_has_a_name() -> None:
    """Whatever this machine is, its CPU is called something, on one line."""
    assert host_name()
    assert "\n" not in host_name()


def test_what_linux_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's name where /proc/cpuinfo has one; the architecture where it has none, or is not there."""
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(detect, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert host_name() == "aarch64"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert host_name() == "aarch64"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7B13\nprocessor\t: 1\n")
    assert host_name() == "AMD EPYC 7B13"
