"""Which NVIDIA GPUs this machine has, asked of nvidia-smi, so that torch need not be imported to find out.

The machine itself, for those who train on its CPU.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchfinder.units import MIB

_QUERY = ("--query-gpu=index,name,memory.total,compute_cap", "--format=csv,noheader,nounits")
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PresentGpu:
    """A GPU in this machine.

    Attributes:
        index: nvidia-smi's number for it; CUDA's may differ (`CUDA_DEVICE_ORDER`, `CUDA_VISIBLE_DEVICES`).
        name: as the driver prints it; `find_gpu` takes it.
        smi_total_bytes: nvidia-smi's total, which counts memory the driver keeps: up to 3 % more than CUDA reports.
        compute_capability: major and minor; None when the driver does not say.
    """

    index: int
    name: str
    smi_total_bytes: int
    compute_capability: tuple[int, int] | None


def present_gpus(timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[PresentGpu, ...]:
    """Ask nvidia-smi which GPUs there are.

    Args:
        timeout_seconds: how long to wait for its answer.

    Returns:
        The GPUs by index; empty when nvidia-smi is not there, fails or does not answer in time.
    """
    return parse_nvidia_smi(_ask(_QUERY, timeout_seconds))


def driver_version(timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """The NVIDIA driver's version, such as `580.95.05`; empty where nvidia-smi does not say.

    Args:
        timeout_seconds: how long to wait for its answer.
    """
    lines = _ask(("--query-gpu=driver_version", "--format=csv,noheader"), timeout_seconds).splitlines()
    return lines[0].strip() if lines else ""


def _ask(query: Sequence[str], timeout_seconds: float) -> str:
    """What nvidia-smi answers; empty when it is not there, fails or does not answer in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run([program, *query], capture_output=True, timeout=timeout_seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.decode("utf-8", errors="replace")


def parse_nvidia_smi(text: str) -> tuple[PresentGpu, ...]:
    """Read nvidia-smi's answer to the query of `present_gpus`.

    Args:
        text: lines of index, name, total MiB and compute capability, separated by commas.

    Returns:
        One GPU for each line that has an index and a total; warnings and other lines are passed over.
    """
    parsed = (_parse_line(line) for line in text.splitlines())
    return tuple(gpu for gpu in parsed if gpu is not None)


def _parse_line(line: str) -> PresentGpu | None:
    index, _, rest = line.partition(",")
    fields = [field.strip() for field in rest.rsplit(",", 2)]
    if len(fields) != 3 or not index.strip().isdecimal() or not fields[1].isdecimal():
        return None
    major, _, minor = fields[2].partition(".")
    capability = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
    return PresentGpu(int(index), fields[0], int(fields[1]) * MIB, capability)


_CPUINFO = Path("/proc/cpuinfo")


def host_name() -> str:
    """What the CPU calls itself, such as `AMD EPYC 7B13`; its architecture where it does not say."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    )
    return next(filter(None, named), "") or platform.processor() or platform.machine()
