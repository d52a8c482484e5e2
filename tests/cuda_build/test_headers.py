"""The stub's structures and numbers beside those of NVIDIA's headers, which pip brings and no file here repeats."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from batchfinder.cuda_stub.compile import SOURCES

pytestmark = pytest.mark.cuda_build

WHEELS = {
    12: ("nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cuda-nvcc-cu12==12.8.93"),
    13: ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"),
}
# Of `struct cudaDeviceProp`, by the names in device.c.
FIELDS = {
    "NAME": "name", "UUID": "uuid", "TOTAL": "totalGlobalMem", "SHARED": "sharedMemPerBlock", "REGISTERS": "regsPerBlock",
    "WARP": "warpSize", "PITCH": "memPitch", "BLOCK_THREADS": "maxThreadsPerBlock", "BLOCK": "maxThreadsDim", "GRID": "maxGridSize",
    "CONSTANT": "totalConstMem", "MAJOR": "major", "MINOR": "minor", "TEXTURES": "textureAlignment",
    "MULTIPROCESSORS": "multiProcessorCount", "MAP_HOST": "canMapHostMemory", "CONCURRENT": "concurrentKernels", "PCI_BUS": "pciBusID",
    "ENGINES": "asyncEngineCount", "UNIFIED": "unifiedAddressing", "BUS": "memoryBusWidth", "L2": "l2CacheSize",
    "THREADS_PER_SM": "maxThreadsPerMultiProcessor", "PRIORITIES": "streamPrioritiesSupported", "SHARED_PER_SM": "sharedMemPerMultiprocessor",
    "REGISTERS_PER_SM": "regsPerMultiprocessor", "MANAGED": "managedMemory", "COOPERATIVE": "cooperativeLaunch",
    "SHARED_OPTIN": "sharedMemPerBlockOptin", "BLOCKS_PER_SM": "maxBlocksPerMultiProcessor", "RESERVED_SHARED": "reservedSharedMemPerBlock",
    "POOLS": "memoryPoolsSupported", "CLUSTERS": "clusterLaunch",
}  # fmt: skip
# Of `enum cudaDeviceAttr`, by the numbers in device.c.
ATTRIBUTES = {
    1: "MaxThreadsPerBlock", 4: "MaxBlockDimZ", 5: "MaxGridDimX", 6: "MaxGridDimY", 8: "MaxSharedMemoryPerBlock", 9: "TotalConstantMemory",
    10: "WarpSize", 11: "MaxPitch", 12: "MaxRegistersPerBlock", 13: "ClockRate", 14: "TextureAlignment", 16: "MultiProcessorCount",
    19: "CanMapHostMemory", 31: "ConcurrentKernels", 33: "PciBusId", 36: "MemoryClockRate", 37: "GlobalMemoryBusWidth", 38: "L2CacheSize",
    39: "MaxThreadsPerMultiProcessor", 40: "AsyncEngineCount", 41: "UnifiedAddressing", 75: "ComputeCapabilityMajor",
    76: "ComputeCapabilityMinor", 78: "StreamPrioritiesSupported", 81: "MaxSharedMemoryPerMultiprocessor",
    82: "MaxRegistersPerMultiprocessor", 83: "ManagedMemory", 95: "CooperativeLaunch", 97: "MaxSharedMemoryPerBlockOptin",
    106: "MaxBlocksPerMultiprocessor", 111: "ReservedSharedMemoryPerBlock", 115: "MemoryPoolsSupported", 120: "ClusterLaunch",
}  # fmt: skip


def written(major: int) -> dict[str, int]:
    """The places that device.c has for this version of CUDA."""
    source = (SOURCES / "cudart" / "device.c").read_text()
    new, old, rest = re.search(
        r"#if CUDA_MAJOR >= 13\nenum (.*?);\n#else\nenum (.*?);\n#endif\nenum (.*?);", source, re.S
    ).groups()  # type: ignore[union-attr]
    pairs = re.findall(r"(\w+) = (\d+)", (new if major >= 13 else old) + rest)
    return {name: int(value) for name, value in pairs}


@pytest.mark.parametrize("major", [12, 13])
def test_properties_and_attributes(major: int, tmp_path: Path) -> None:
    """A field in another place would give PyTorch another card than was asked for, with no error."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), *WHEELS[major]]
    subprocess.run(command, check=True)
    for wheel in tmp_path.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path, [name for name in archive.namelist() if name.endswith((".h", ".hpp"))])
    (header,) = tmp_path.rglob("driver_types.h")
    crt = {f"-I{file.parent.parent}" for file in tmp_path.rglob("crt/host_defines.h")}
    expected = written(major)
    assert expected.keys() == {*FIELDS, "PROPERTIES_BYTES"}
    places = "\n".join(
        f'printf("{name} %zu\\n", offsetof(struct cudaDeviceProp, {field}));' for name, field in FIELDS.items()
    )
    numbers = "\n".join(f'printf("{number} %d\\n", cudaDevAttr{name});' for number, name in ATTRIBUTES.items())
    program = tmp_path / "places.c"
    program.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include <driver_types.h>\nint main(void) {{\n{places}\n{numbers}\n"
        'printf("PROPERTIES_BYTES %zu\\n", sizeof(struct cudaDeviceProp)); return 0; }\n'
    )
    subprocess.run(["cc", f"-I{header.parent}", *crt, "-o", tmp_path / "places", program], check=True)
    printed = subprocess.run([tmp_path / "places"], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in map(str.split, printed.splitlines())}
    assert {name: found[name] for name in expected} == expected
    assert [found[str(number)] for number in ATTRIBUTES] == list(ATTRIBUTES)
