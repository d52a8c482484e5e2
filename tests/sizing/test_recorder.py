"""What takes a simulated step where no recorder is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.devices.cards import card
from batchfinder.errors import InvalidValue
from batchfinder.sizing.recorder import choose_recorder
from batchfinder.training.spec import StepOptions, is_cuda_build, named_recorder, torch_of


def test_what_is_typed_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that before `auto`; a name that there is not is refused, wherever it stands."""
    monkeypatch.setenv("BATCHFINDER_RECORDER", "cuda_build")
    assert [named_recorder(each) for each in ("fake-device", "auto")] == ["fake-device", "cuda-build"]
    monkeypatch.setenv("BATCHFINDER_RECORDER", "cuda")
    with pytest.raises(InvalidValue, match="BATCHFINDER_RECORDER: invalid value 'cuda'"):
        named_recorder("auto")
    monkeypatch.delenv("BATCHFINDER_RECORDER")
    assert named_recorder("auto") == "auto"


def test_a_version_may_be_named() -> None:
    """Of the CUDA build, that records with it: 2.6 or later, as pip has it."""
    assert named_recorder("cuda-build==2.10.1") == "cuda-build==2.10.1"
    named = ("fake-device", "cuda-build", "cuda-build==2.10.1")
    assert [is_cuda_build(each) for each in named] == [False, True, True]
    assert [torch_of(each) for each in named] == [None, None, "2.10.1"]
    for wrong, expected in {
        "cuda-build==2.5.1": "PyTorch 2.6 or later",
        "cuda-build==2.6": "one of auto, fake-device, cuda-build, cuda-build==2.6.0",
        "fake-device==2.6.0": "one of auto, fake-device, cuda-build, cuda-build==2.6.0",
    }.items():
        with pytest.raises(InvalidValue, match=f"recorder: invalid value '{wrong}'; expected {expected}"):
            named_recorder(wrong)


def test_without_a_cuda_build_the_fake_device_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded for it."""
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path))
    assert choose_recorder(StepOptions(), [card("T4")]) == "fake-device"
    assert not list(tmp_path.iterdir())
