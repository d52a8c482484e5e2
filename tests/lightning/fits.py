"""Fits in processes of their own, under a real limit: what the tests of the callback start.

    python fits.py '{"net": "Transformer", "limit_mib": 300, "finder": {...}, "batch_size": 2, "steps": 50}'

prints one line of JSON with what happened.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "PYTHONMALLOC": "malloc",  # Python's own allocator maps 1 MiB at a time
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # fewer page faults: twice as fast
}
ROOT = Path(__file__).parents[2]


def run_fit(**request: Any) -> dict[str, Any]:
    """Fit in a child process; returns what it printed."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(request)],
        env={**os.environ, **MALLOC, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return json.loads(lines[-1])


def _fit(request: dict[str, Any]) -> dict[str, Any]:
    import nets
    import pytorch_lightning as pl
    import torch

    from batchfinder.lightning.callback import BatchFinder
    from batchfinder.probing.signs import classify

    torch.set_num_threads(1)
    (torch.ones(4, requires_grad=True) * 2).sum().backward()  # the engine's threads exist before the limit does
    pl.seed_everything(1)
    module = getattr(nets, request["net"])(batch_size=request.get("batch_size", 2), **request.get("options", {}))
    finder = BatchFinder(**request["finder"]) if request.get("finder") is not None else None
    trainer = nets.trainer(
        callbacks=[finder] if finder else [],
        max_epochs=-1,
        max_steps=request.get("steps", 50),
        **request.get("trainer", {}),
    )
    if request.get("limit_mib"):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit_bytes = request.get("limit_bytes") or size + (request["limit_mib"] << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
    limit = resource.getrlimit(resource.RLIMIT_AS)
    seconds, core_seconds = [0.0], [0.0]
    if finder is not None:
        start = finder.on_fit_start

        def timed(*args: Any) -> None:
            began, worked = time.perf_counter(), time.process_time()
            start(*args)
            seconds[0], core_seconds[0] = time.perf_counter() - began, time.process_time() - worked

        finder.on_fit_start = timed
    error, verdict = None, None
    try:
        trainer.fit(module)
    except Exception as raised:
        verdict = classify(raised, device="cpu")
        error = f"{type(raised).__name__}: {str(raised)[:300]}"
    unchanged = resource.getrlimit(resource.RLIMIT_AS) == limit
    resource.setrlimit(resource.RLIMIT_AS, (limit[1], limit[1]))
    outcomes = {} if finder is None else finder.outcomes.get("fit", {})
    return {
        "error": error,
        "verdict": None if verdict is None else verdict.name,
        "steps": trainer.global_step,
        "batch_size": None if finder is None else finder.batch_size,
        "trials": [
            [t.batch_size, t.fits, t.measurement.peak_reserved_bytes] for o in outcomes.values() for t in o.trials
        ],
        "found": {str(length): outcome.max_batch_size for length, outcome in outcomes.items()},
        "sources": [outcome.source for outcome in outcomes.values()],
        "seconds": seconds[0],
        "core_seconds": core_seconds[0],
        "limit_unchanged": unchanged,
        "limit_bytes": limit[0],
    }


if __name__ == "__main__":
    print(json.dumps(_fit(json.loads(sys.argv[1]))))
