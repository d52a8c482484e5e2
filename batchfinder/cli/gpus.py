"""`gpus`: the GPUs that can be named."""

from __future__ import annotations

import argparse
import json

from batchfinder.cli.main import OK
from batchfinder.devices import Gpu, all_gpus
from batchfinder.devices.catalog import CAPABILITIES
from batchfinder.report.table import Columns, Table
from batchfinder.training.synonyms import one_of
from batchfinder.units import GIB, format_bytes, parse_bytes


def main(arguments: argparse.Namespace) -> int:
    """List them."""
    least = 0 if arguments.min is None else round(parse_bytes(arguments.min, "--min") / GIB)
    needed = [one_of("--has", each, tuple(CAPABILITIES)) for each in arguments.has]
    found = [gpu for gpu in all_gpus() if gpu.class_gb >= least and all(gpu.multiplies(each) for each in needed)]
    found.sort(key=lambda gpu: (gpu.memory_bytes, gpu.name))
    if arguments.json:
        print(json.dumps([_as_json(gpu) for gpu in found], indent=1))
        return OK
    columns: Columns = {
        "GPU": [gpu.name for gpu in found],
        "memory": [format_bytes(gpu.memory_bytes) for gpu in found],
        "usable": [format_bytes(gpu.usable_bytes) for gpu in found],
        "architecture": [gpu.architecture for gpu in found],
        "bf16": ["yes" if gpu.multiplies("bf16") else "-" for gpu in found],
        "fp8": ["yes" if gpu.multiplies("fp8") else "-" for gpu in found],
        "also called": [", ".join(gpu.aliases) for gpu in found],
    }
    notes = ("usable is what the caching allocator can reserve beside the CUDA context",)
    Table(f"{len(found)} GPUs that --gpu takes", (), columns, notes).show()
    return OK


def _as_json(gpu: Gpu) -> dict[str, object]:
    return {
        "name": gpu.name,
        "aliases": list(gpu.aliases),
        "vendor": gpu.vendor,
        "memory_bytes": gpu.memory_bytes,
        "usable_bytes": gpu.usable_bytes,
        "compute_capability": gpu.compute_capability and list(gpu.compute_capability),
        "architecture": gpu.architecture,
        "source": gpu.source,
    }
