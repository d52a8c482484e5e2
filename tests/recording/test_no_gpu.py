"""A recording must not see a GPU of this machine."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from batchfinder.errors import RecordingDied
from batchfinder.recording import client
from batchfinder.training.spec import WorkloadSpec


def test_the_recording_process_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's environment shows; all else in it is passed on."""
    environments: list[dict[str, str]] = []

    def start(module: str, descriptors: Any, arguments: Any, log: Any, environment: Any) -> Any:
        environments.append(dict(environment))
        return subprocess.Popen(["true"], start_new_session=True)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setattr(client.child, "start", start)
    with client.RecordingClient(WorkloadSpec("no_such_module:build")) as opened, pytest.raises(RecordingDied):
        opened.facts()
    (environment,) = environments
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["HIP_VISIBLE_DEVICES"]) == ("", "")
    assert environment["MINE"] == "kept"
