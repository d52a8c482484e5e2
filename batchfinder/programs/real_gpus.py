"""The real GPUs of this machine for a command's processes, with the session that simulated ones have."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from batchfinder.cuda_stub import StubCard, StubReport
from batchfinder.cuda_stub.launch import AFTER_TORCH_VARIABLE, CHILD_FOLDER
from batchfinder.devices.detect import memory_in_use, present_gpus
from batchfinder.errors import InvalidValue


class RealGpus(contextlib.AbstractContextManager["RealGpus"]):
    """Processes on the GPUs that are here, which import what the variable names after torch.

    Attributes:
        folder: what they share; removed at the end.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="batchfinder-run-"))

    def variables(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment variables to set for a process besides those that it has otherwise."""
        path = os.pathsep.join(each for each in (str(CHILD_FOLDER), base.get("PYTHONPATH")) if each)
        return {"PYTHONPATH": path, AFTER_TORCH_VARIABLE: base.get(AFTER_TORCH_VARIABLE, "")}

    def report(self) -> StubReport:
        """Nothing is assumed on a real GPU."""
        return StubReport()

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def real_gpu() -> StubCard:
    """The first GPU of this machine, with what is in use of its memory.

    Raises:
        InvalidValue: nvidia-smi and rocm-smi list no GPU that this process can see.
    """
    gpus = present_gpus()
    if not gpus:
        raise InvalidValue("--device", "cuda", "a GPU in this machine, and none is seen; without it one is simulated")
    return StubCard(gpus[0].name, gpus[0].smi_total_bytes, held_bytes=memory_in_use(gpus[0]))
