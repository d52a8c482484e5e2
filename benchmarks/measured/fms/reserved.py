"""What nvidia-smi saw in the rows of 4 GPUs, beside the peak reserved of the same steps by FSDP version 1.

Run: `python -m benchmarks.measured.fms.reserved [--recorder cuda-build]`. README.md says what came out. The row that is
at its card's limit is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from batchfinder.training.spec import FAKE_DEVICE, RECORDERS
from batchfinder.units import MIB
from benchmarks.measured.case import RESERVED, read_rows, record
from benchmarks.measured.fms.cases import cases

CONTEXT_MIB, COMMUNICATOR_MIB = 502, 688
AT_ITS_LIMIT = "meta-llama/Meta-Llama-3-8B full 8, 4 GPUs, foak-fast-kernels, bf16 mixed"


def main() -> int:
    """Print each row, and how far off they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorder", choices=RECORDERS, default=FAKE_DEVICE, help="(default: %(default)s)")
    recorder = parser.parse_args().recorder
    rows = [row for row in read_rows(Path(__file__).parent) if row["mem_peak_torch_mem_alloc_in_bytes"]]
    asked = [
        (case, float(row["mem_nvidia_mem_reserved"]))
        for case, row in zip(cases(), rows, strict=True)
        if case.step.gpus == 4 and case.name != AT_ITS_LIMIT
    ]
    errors = []
    for (case, seen), (_, trace) in zip(asked, record([case for case, _ in asked], recorder), strict=True):
        if isinstance(trace, Exception):
            raise trace
        predicted = replace(case, statistic=RESERVED).predicted_bytes(trace)
        assert predicted is not None, "it ran"
        mib = predicted / MIB + CONTEXT_MIB + COMMUNICATOR_MIB
        errors.append(mib / seen - 1)
        print(f"{case.name:<80} nvidia-smi {seen:9,.0f} MiB, here {mib:9,.0f} {errors[-1]:+7.1%}", flush=True)
    middle = statistics.median(map(abs, errors))
    print(f"{len(errors)} rows: {min(errors):+.1%} to {max(errors):+.1%}, {middle:.1%} off at the median")
    return 0


if __name__ == "__main__":
    sys.exit(main())
