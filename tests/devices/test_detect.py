"""The GPUs and the CPU of this machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from batchfinder.devices import PresentGpu, detect, driver_version, find_gpu, host_name, present_gpus
from batchfinder.devices.detect import _TIMEOUT_SECONDS, mig_slices, parse_nvidia_smi, parse_rocm_smi, visible_gpus
from batchfinder.units import MIB

# In the format of nvidia-smi --query-gpu=index,uuid,name,memory.total,compute_cap --format=csv,noheader,nounits, with
# the names and totals that nvidia-smi prints for these cards.
TWO_CARDS = "0, GPU-1a2b, NVIDIA H200, 143771, 9.0\n1, GPU-1a3c, Tesla V100-SXM2-16GB, 16384, 7.0\n"


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable hides a card, and NVML has none: what is asked here are programs."""
    monkeypatch.setattr(detect, "nvml_gpus", lambda: ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str = "nvidia-smi") -> None:
    """Put a program of that name, and nothing else, on PATH."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_parse_two_cards() -> None:
    """Each line is a GPU, in order, with its total in bytes."""
    assert parse_nvidia_smi(TWO_CARDS) == (
        PresentGpu(0, "NVIDIA H200", 143771 * MIB, (9, 0), "GPU-1a2b"),
        PresentGpu(1, "Tesla V100-SXM2-16GB", 16384 * MIB, (7, 0), "GPU-1a3c"),
    )


def test_parsed_names_are_in_the_catalogue() -> None:
    """What nvidia-smi calls a card, the catalogue finds; nvidia-smi's total is the larger, by at most 3 %."""
    for present in parse_nvidia_smi(TWO_CARDS):
        assert 1.0 <= present.smi_total_bytes / find_gpu(present.name).memory_bytes < 1.03


def test_parse_passes_over_what_is_no_gpu() -> None:
    """Warnings, half lines and cards without a total are passed over; a missing capability is None."""
    text = (
        "WARNING: infoROM is corrupted at gpu 0000:00:1E.0\n\nNo devices were found\n"
        "0, GPU-0, NVIDIA A2, 15356, [N/A]\n1, GPU-1, NVIDIA GB10, [N/A], 12.1\n2, GPU-2, Tesla K80\n"
    )
    assert parse_nvidia_smi(text) == (PresentGpu(0, "NVIDIA A2", 15356 * MIB, None, "GPU-0"),)


def test_parse_keeps_a_comma_in_a_name() -> None:
    """A name may hold a comma: index and UUID come first, total and capability last."""
    assert parse_nvidia_smi("3, GPU-3, Card, the second, 1024, 8.6")[0].name == "Card, the second"


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without nvidia-smi has no GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert present_gpus() == ()


def test_asks_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer of the nvidia-smi on PATH is what is reported."""
    fake_nvidia_smi(tmp_path, monkeypatch, "echo '0, GPU-0, Tesla T4, 15360, 7.5'")
    assert present_gpus() == (PresentGpu(0, "Tesla T4", 15360 * MIB, (7, 5), "GPU-0"),)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1]),
        ("0,1", [0, 1]),
        ("1", [1]),
        (" 1, 0", [1, 0]),
        ("1gpu", [1]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("NoDevFiles", []),
        ("0,0", []),
        ("GPU-1a3c", [1]),
        ("GPU-1a3,GPU-1a2", [1, 0]),
        ("GPU-1a", []),
        ("GPU-1a3,0", [1]),
        ("GPU-1a3,GPU-1a3c", []),
    ],
)
def test_visible_gpus(visible: str | None, indices: list[int]) -> None:
    """Indices or unique prefixes of UUIDs, in their order, up to the first that names no GPU; a double leaves none."""
    assert [gpu.index for gpu in visible_gpus(parse_nvidia_smi(TWO_CARDS), visible)] == indices


def test_a_driver_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all cards hidden no library is tried; without a library that loads there is no driver."""
    loaded: list[str] = []

    def load(name: str) -> object:
        loaded.append(name)
        if name != "libamdhip64.so":
            raise OSError(name)
        return object()

    monkeypatch.setattr(detect.ctypes, "CDLL", load)
    assert detect.driver_is_here()
    assert loaded == ["libcuda.so.1", "libamdhip64.so"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not detect.driver_is_here()
    assert len(loaded) == 2


def test_hidden_gpus_are_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES=1 leaves one of two GPUs, as PyTorch sees it."""
    fake_nvidia_smi(tmp_path, monkeypatch, f"printf '{TWO_CARDS}'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.name for gpu in present_gpus()] == ["Tesla V100-SXM2-16GB"]


SLICED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-69f10e26-3bd8-9f0e-3f6f-0e4c64e7a4a2)
  MIG 3g.40gb     Device  0: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-1e1b9bb5-1ae9-5a14-9e3f-a6f8fbc6c1be)
"""
WHOLE = "0, GPU-5c89, NVIDIA A100-SXM4-40GB, 40960, 8.0\n1, GPU-69f1, NVIDIA H100 80GB HBM3, 81559, 9.0\n"


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        ("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", "H100 80GB MIG 3g.40gb"),
        ("MIG-1e1b", "H100 80GB MIG 1g.10gb"),
        ("MIG-c6d4,MIG-cba6", "A100 40GB MIG 1g.5gb"),
    ],
)
def test_a_slice_is_a_gpu_of_the_catalog(
    visible: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that the variable names; where nvidia-smi does not list it, whole GPUs are reported as before."""
    script = f"if [ \"$1\" = -L ]; then printf '{SLICED}'; else printf '{WHOLE}'; fi"
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (found,) = present_gpus()
    assert find_gpu(found.name).name == name
    assert mig_slices(SLICED, parse_nvidia_smi(WHOLE), "MIG-77") == ()


# As rocm-smi --showproductname --showmeminfo vram --json writes it: a card of today, one as older versions spell it,
# and the graphics unit of a CPU.
AMD = """{
    "card1": {"VRAM Total Memory (B)": "34342961152", "Card series": "Arcturus GL-XL [AMD Instinct MI100]"},
    "card0": {"VRAM Total Memory (B)": "68702699520", "Card Series": "AMD Instinct MI210", "GFX Version": "gfx90a"},
    "card2": {"VRAM Total Memory (B)": "67108864", "Card Series": "Raphael"},
    "system": {"Driver version": "6.10.5"}
}"""


def test_parse_rocm_smi() -> None:
    """Cards by index, under the names that the catalog has; what is no card, or no JSON, is skipped."""
    assert parse_rocm_smi(f"WARNING: low-power state\n{AMD}") == (
        PresentGpu(0, "AMD Instinct MI210", 68702699520, None),
        PresentGpu(1, "AMD Instinct MI100", 34342961152, None),
    )
    assert find_gpu(parse_rocm_smi(AMD)[0].name).name == "MI210"
    for text in ("", "ERROR", '{"card0": {}}', '{"card0": 3}', '{"card0": {"Card Series": "x"'):
        assert parse_rocm_smi(text) == ()


def test_asks_rocm_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without NVIDIA's GPUs the machine has AMD's; HIP_VISIBLE_DEVICES hides them, and comes before CUDA's variable."""
    (tmp_path / "cards.json").write_text(f"{AMD}\n")
    script = f'while read -r line; do echo "$line"; done < {tmp_path}/cards.json'
    fake_nvidia_smi(tmp_path, monkeypatch, script, name="rocm-smi")
    assert [gpu.index for gpu in present_gpus()] == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.index for gpu in present_gpus()] == [0]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in present_gpus()] == [1]


@pytest.mark.parametrize(
    "script", ["echo '0, GPU-0, Tesla T4, 15360, 7.5'; exit 9", "while :; do :; done", "printf '\\377'"]
)
def test_failure_is_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """An nvidia-smi that fails, hangs or prints rubbish means no GPUs, never an exception."""
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert present_gpus(timeout_seconds=1.0) == ()


def test_default_timeout_is_short() -> None:
    """A hanging driver is waited for ten seconds at most."""
    assert _TIMEOUT_SECONDS <= 10.0


def test_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's version is asked for by itself; nvidia-smi has a line for each card. Without one it is empty."""
    script = '[ "$*" = "--query-gpu=driver_version --format=csv,noheader" ] && printf "580.95.05\\n580.95.05\\n"'
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert driver_version() == "580.95.05"
    fake_nvidia_smi(tmp_path, monkeypatch, "exit 9")
    assert driver_version() == ""


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
