"""Stands for a worker on a card whose context dies at batch size 8: what such a worker answers, and how it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batchfinder.results import Measurement, Verdict
from batchfinder.training.child_process import answer, describe, requests_from


def main(requests: int, answers: int) -> None:
    """Serve until the context is dead. With `ONCE`, the name of a file, it dies once."""
    for request in requests_from(requests):
        if "query_gpu" in request:
            card = {"name": "a card", "total_bytes": 2000, "free_bytes": 1500, "compute_capability": [9, 0]}
            answer(answers, {"gpu": card})
        elif "open" in request:
            limit_bytes = request["open"]["limit_bytes"]
            answer(answers, {"opened": {}})
        elif request["probe"]["batch_size"] < 8 or Path(os.environ["ONCE"]).exists():
            seen = Measurement(Verdict.FITS, os.getpid(), limit_bytes)
            fields = {name: getattr(seen, name) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
            answer(answers, {"measurement": {**fields, "verdict": "FITS"}})
        else:
            if os.environ["ONCE"].endswith("once"):
                Path(os.environ["ONCE"]).touch()
            error = RuntimeError("CUDA error: device-side assert triggered")
            answer(answers, {"error": describe(error), "context": "dead"})
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
