"""The ladder of timm's benchmark: the size that ran, and the next larger one, which did not; see README.md."""

from __future__ import annotations

import math
from pathlib import Path

from batchfinder.devices import find_gpu
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import MIB
from benchmarks.measured.case import RESERVED, Case, read_rows

CONTEXT_BYTES = 1685 * MIB
"""The CUDA context on an RTX 3090 before CUDA 11.7: of four that were printed, that of the latest PyTorch, 1.8.2."""

OTHER_CONTEXTS = (999 * MIB, 1486 * MIB, find_gpu("RTX 3090").context_bytes)
"""Two of the others, and today's."""

NOTES = {
    "cspresnet50": "it runs on what a context of 1626 MiB leaves, not on what one of 1630 MiB does",
    "resnetv2_152x4_bitm": "it runs on what a context of 1458 MiB leaves, not on what one of 1460 MiB does",
    "tf_efficientnet_b0_ap": "cuDNN's workspaces: benchmark mode keeps the fastest algorithm, whatever it takes",
    "regnetx_080": "cuDNN's workspaces: benchmark mode keeps the fastest algorithm, whatever it takes",
    "sequencer2d_s": "not known: 16.9 GiB are recorded for the size that failed; its LSTMs run in cuDNN",
}
"""What explains brackets that are missed."""


def cases() -> list[Case]:
    """Two for each row."""
    found = []
    for row in read_rows(Path(__file__).parent):
        ran = int(row["train_batch_size"])
        for size in (ran, next_larger(ran)):
            arguments = {"model": row["model"], "image_size": int(row["train_img_size"])}
            found.append(
                Case(
                    name=f"{row['model']} {size}",
                    technique="eager",
                    gpu="RTX 3090",
                    statistic=RESERVED,
                    published_bytes=None,
                    workload=WorkloadSpec("benchmarks.measured.timm.model:build", arguments),
                    step=StepConfig(precision="16-mixed", steps=2),
                    batch_size=size,
                    seq_len=None,
                    context_bytes=CONTEXT_BYTES,
                    other_contexts=OTHER_CONTEXTS,
                    bracket=row["model"],
                    ran=size == ran,
                    note=NOTES.get(row["model"], ""),
                )
            )
    return found


def next_larger(size: int) -> int:
    """The size of the ladder 512, 384, 256, 192, 128, ... that comes before this one; above 2, two to each power of 2.

    Source: `decay_batch_step` in timm/utils/decay_batch.py.
    """
    power = 2 ** math.floor(math.log2(size))
    return size + max(power // 2, 1)
