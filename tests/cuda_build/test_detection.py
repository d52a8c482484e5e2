"""The GPUs that are here are found without nvidia-smi: the stub has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.stub_cards import open_session, stub_card
from batchfinder.testing import CudaStubFixture

pytestmark = pytest.mark.cuda_build

PRESENT = """
import json
from batchfinder.devices import present_gpus
print(json.dumps([[gpu.index, gpu.name, gpu.smi_total_bytes, gpu.compute_capability] for gpu in present_gpus()]))
"""
PLACE = """
import json
from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import choose_place
place = choose_place(build_parser().parse_args(["sweep"]))
print(json.dumps([place.device, place.cards[0].name, place.cards[0].device.total_bytes]))
"""


def on_cards(code: str, folder: Path, **more: str) -> object:
    """What a process prints that has a T4 and an A100, and no program that lists them."""
    variables = {"PATH": str(folder), **more}
    with open_session([stub_card("T4"), stub_card("A100 80GB")]) as session:
        own = {**os.environ, **session.variables(), **variables}
        own.pop("CUDA_VISIBLE_DEVICES", None)
        own |= {name: value for name, value in more.items() if name == "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_nvml_lists_them(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """With the totals that the driver reports; CUDA's variable hides one."""
    t4, a100 = stub_card("T4"), stub_card("A100 80GB")
    listed = [[0, "NVIDIA T4", t4.total_bytes, [7, 5]], [1, "NVIDIA A100 80GB", a100.total_bytes, [8, 0]]]
    assert on_cards(PRESENT, tmp_path) == listed
    assert on_cards(PRESENT, tmp_path, CUDA_VISIBLE_DEVICES="1") == listed[1:]


def test_pytorch_is_asked_where_nothing_lists_them(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """Without NVML either, the driver can be loaded, and PyTorch sees the card; what is hidden is not looked for."""
    (tmp_path / "pynvml.py").write_text("raise ImportError('hidden')\n")
    hidden = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    assert on_cards(hidden + PRESENT, tmp_path) == []
    assert on_cards(hidden + PLACE, tmp_path) == ["cuda:0", "T4", stub_card("T4").total_bytes]
    assert on_cards(hidden + PLACE, tmp_path, CUDA_VISIBLE_DEVICES="")[0] == "simulated"  # type: ignore[index]
