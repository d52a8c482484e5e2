"""Stands for a worker on a card: a made-up memory curve under the limit it is given, on a card with 384 MiB free."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from batchfinder.training.child_process import answer, requests_from

MIB = 1 << 20
FREE_BYTES = 384 * MIB


def main(requests: int, answers: int) -> None:
    """Serve, and write down what was asked."""
    capacity = FREE_BYTES
    with Path(os.environ["ASKED"]).open("a") as asked:
        for request in requests_from(requests):
            print(json.dumps(request), file=asked, flush=True)
            if "query_gpu" in request:
                card = {"name": "Tesla T4", "total_bytes": 512 * MIB, "compute_capability": [7, 5]}
                answer(answers, {"gpu": {**card, "free_bytes": FREE_BYTES, "versions": {"torch": "2.13.0"}}})
            elif "open" in request:
                capacity = min(FREE_BYTES, request["open"]["limit_bytes"] or FREE_BYTES)
                answer(answers, {"opened": {}})
            else:
                answer(answers, {"measurement": step(capacity, **request["probe"])})


def step(capacity: int, batch_size: int, seq_len: int) -> dict[str, Any]:
    """128 MiB for the model, and 8 MiB for each token of the batch."""
    peak = 128 * MIB + batch_size * seq_len * 8 * MIB
    if peak > capacity:
        return {"verdict": "OUT_OF_MEMORY", "message": "CUDA out of memory."}
    return {"verdict": "FITS", "peak_allocated_bytes": peak, "peak_reserved_bytes": peak}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
