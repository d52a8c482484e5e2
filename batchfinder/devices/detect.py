"""The GPUs of this machine, by NVML, nvidia-smi or rocm-smi so that torch need not be imported, and its CPU's name."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchfinder.errors import InvalidValue
from batchfinder.units import GIB, MIB, parse_budget

_NVIDIA_QUERY = ("--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits")
_ROCM_QUERY = ("--showproductname", "--showmeminfo", "vram", "--json")
_TIMEOUT_SECONDS = 10.0
_MPS_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


@dataclass(frozen=True, slots=True)
class PresentGpu:
    """A GPU in this machine.

    Attributes:
        index: its number in nvidia-smi or rocm-smi. CUDA numbers cards of different models by speed instead, unless
            `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set.
        name: as the driver prints it; `find_gpu` takes it.
        smi_total_bytes: the program's total; nvidia-smi counts memory the driver keeps: up to 3 % more than CUDA.
        compute_capability: major and minor; None for AMD, or when the driver does not say.
        uuid: such as `GPU-8f6c...`; empty for AMD.
    """

    index: int
    name: str
    smi_total_bytes: int
    compute_capability: tuple[int, int] | None
    uuid: str = ""


def present_gpus(timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[PresentGpu, ...]:
    """The GPUs that this process can see: NVIDIA's, or AMD's where there are none.

    NVML is asked first, where nvidia-ml-py is installed: containers may have the driver without nvidia-smi.
    `CUDA_VISIBLE_DEVICES` (`HIP_VISIBLE_DEVICES` for AMD) hides the others.

    Returns:
        The GPUs in CUDA's order of that variable, else by index; empty when neither NVML, nvidia-smi nor rocm-smi is
        there, or it fails or does not answer in time.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = nvml_gpus() or parse_nvidia_smi(_ask("nvidia-smi", _NVIDIA_QUERY, timeout_seconds))
    if visible is not None and visible.startswith("MIG-"):
        return mig_slices(_ask("nvidia-smi", ("-L",), timeout_seconds), gpus, visible) or gpus
    if not gpus:
        gpus = parse_rocm_smi(_ask("rocm-smi", _ROCM_QUERY, timeout_seconds))
        visible = os.environ.get("HIP_VISIBLE_DEVICES", visible)
    return visible_gpus(gpus, visible)


def nvml_gpus() -> tuple[PresentGpu, ...]:
    """What NVML has, NVIDIA's library below nvidia-smi; empty without nvidia-ml-py, the driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return ()
    gpus = []
    try:
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
                total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
                capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                gpus.append(PresentGpu(index, name, total, tuple(capability), uuid))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    return tuple(gpus)


def driver_is_here() -> bool:
    """Whether a GPU's driver can be loaded, and nothing hides all GPUs: PyTorch may see one that nothing else lists."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    for library in ("libcuda.so.1", "libamdhip64.so"):
        with suppress(OSError):
            ctypes.CDLL(library)
            return True
    return False


def visible_gpus(gpus: Sequence[PresentGpu], visible: str | None) -> tuple[PresentGpu, ...]:
    """Those of the GPUs that a value of `CUDA_VISIBLE_DEVICES` leaves, in its order; None for a variable not set.

    Its entries are all indices or all prefixes of UUIDs. The first that names no GPU ends the list; naming one twice
    leaves none (`_parse_visible_devices`, https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/__init__.py).
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[PresentGpu] = []
    for entry in visible.split(","):
        if visible.startswith("GPU-"):
            named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        else:
            digits = re.match(r"\s*\+?(\d+)", entry)  # CUDA reads `1gpu` as 1
            named = [gpu for gpu in gpus if digits and gpu.index == int(digits[1])]
        if len(named) != 1:
            break
        if named[0] in chosen:
            return ()
        chosen += named
    return tuple(chosen)


def mig_slices(listed: str, gpus: Sequence[PresentGpu], visible: str) -> tuple[PresentGpu, ...]:
    """The slice that a value of `CUDA_VISIBLE_DEVICES` such as `MIG-c7384736-...` names: CUDA shows a process one.

    Args:
        listed: what `nvidia-smi -L` prints: a line for each GPU, and after it one for each of its slices, such as
            `  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-...)`.
        gpus: the whole GPUs.
        visible: the value; of several entries the first counts.

    Returns:
        The slice with its GPU's name and its own, as CUDA names it, and the gigabytes of its profile; empty where it is
        not listed. Older drivers write `MIG-GPU-<UUID of the GPU>/3/0`, which is not looked up.
    """
    wanted, whole = visible.partition(",")[0].strip(), None
    for line in listed.splitlines():
        if found := re.match(r"GPU (\d+): ", line):
            whole = next((gpu for gpu in gpus if gpu.index == int(found[1])), None)
        found = re.match(r"\s+MIG (\d+g\.(\d+)gb)\S*\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        if found and whole is not None and found[3].startswith(wanted):
            name = f"{whole.name} MIG {found[1]}"
            return (PresentGpu(whole.index, name, int(found[2]) * GIB, whole.compute_capability, found[3]),)
    return ()


def mps_limit_bytes(index: int) -> int | None:
    """The most that MPS lets this process take of a GPU, by `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`, such as `0=4G,1=512M`.

    Its units are taken for powers of 1024
    (https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html). None where it is not set.

    Raises:
        InvalidValue: what it has for this GPU is not a size.
    """
    for entry in os.environ.get(_MPS_LIMIT, "").strip("'\"").split(","):
        number, _, size = entry.partition("=")
        if number.strip() == str(index):
            letters = re.fullmatch(r"(\d+)\s*([GM])B?", size.strip(), re.IGNORECASE)
            if letters is None:
                raise InvalidValue(_MPS_LIMIT, size.strip(), "a size such as 4G or 512M")
            return parse_budget(f"{letters[1]}{letters[2].upper()}iB", _MPS_LIMIT)
    return None


def driver_version(timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """The NVIDIA driver's version, such as `580.95.05`; empty where nvidia-smi does not say."""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    lines = _ask("nvidia-smi", query, timeout_seconds).splitlines()
    return lines[0].strip() if lines else ""


def memory_in_use(gpu: PresentGpu, timeout_seconds: float = _TIMEOUT_SECONDS) -> int:
    """Bytes of an NVIDIA GPU's memory that are in use, by whatever process; 0 where nvidia-smi does not say."""
    query = (f"--id={gpu.index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    answer = _ask("nvidia-smi", query, timeout_seconds).strip()
    return int(answer) * MIB if answer.isdecimal() else 0


def _ask(name: str, query: Sequence[str], timeout_seconds: float) -> str:
    """What a program answers; empty when it is not there, fails or does not answer in time."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        answer = subprocess.run([program, *query], capture_output=True, timeout=timeout_seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.decode("utf-8", errors="replace")


def parse_nvidia_smi(text: str) -> tuple[PresentGpu, ...]:
    """One GPU for each line of index, UUID, name, total MiB and compute capability, separated by commas.

    Other lines, such as warnings, are skipped.
    """
    gpus = []
    for line in text.splitlines():
        index, _, rest = line.partition(",")
        uuid, _, rest = rest.partition(",")
        fields = [field.strip() for field in rest.rsplit(",", 2)]  # a name may hold a comma
        if len(fields) != 3 or not index.strip().isdecimal() or not fields[1].isdecimal():
            continue
        major, _, minor = fields[2].partition(".")
        capability = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
        gpus.append(PresentGpu(int(index), fields[0], int(fields[1]) * MIB, capability, uuid.strip()))
    return tuple(gpus)


def parse_rocm_smi(text: str) -> tuple[PresentGpu, ...]:
    """Read rocm-smi's answer to the query of `present_gpus`.

    Args:
        text: JSON such as `{"card0": {"Card Series": "AMD Instinct MI210", "VRAM Total Memory (B)": "68702699520"}}`;
            older versions write `Card series`, and put the name in brackets after the chip's.

    Returns:
        One GPU for each card with a name and at least 1 GiB: the graphics unit of a CPU has less.
    """
    try:
        cards = json.loads(text[text.index("{") :])  # warnings may come first
    except ValueError:
        return ()
    gpus = []
    for card, values in cards.items():
        facts = {key.lower(): str(value) for key, value in values.items()} if isinstance(values, dict) else {}
        total = facts.get("vram total memory (b)", "")
        name = facts.get("card series", "")
        name = name.rstrip("]").rpartition("[")[2].strip()
        if card.removeprefix("card").isdecimal() and name and total.isdecimal() and int(total) >= GIB:
            gpus.append(PresentGpu(int(card.removeprefix("card")), name, int(total), None))
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


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
