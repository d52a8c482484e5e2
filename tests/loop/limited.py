"""A plain loop in a process of its own, under a real RLIMIT_AS: what the tests of real limits start.

    python -m tests.loop.limited '{"limit_mib": 60, "tune": {...}, "batch_size": null}'

prints one line of JSON with what happened.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "4096",
    "PYTHONMALLOC": "malloc",
    "PYTHONHASHSEED": "0",
}
ROOT = Path(__file__).parents[2]
STEPS = 3


def run(**request: Any) -> dict[str, Any]:
    """Train in a child process; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.loop.limited", json.dumps(request)],
        cwd=ROOT,
        env={**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _train(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    from batchfinder import tune_batch_size
    from batchfinder.probing.signs import classify
    from tests.loop.loops import WORDS, Transformer, tokens

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Transformer(width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(batch: Any) -> None:
        text, labels = batch
        nn.functional.cross_entropy(model(text).view(-1, WORDS), labels.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(batch_size: int, seq_len: int | None) -> Any:
        return tokens(batch_size, 64)

    # What a training takes once: the engine's threads, the first optimizer's imports.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    (torch.ones(4, requires_grad=True) * 2).sum().backward()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = request.get("limit_bytes") or pages * resource.getpagesize() + (request["limit_mib"] << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    found = tune_batch_size(train_step, make_batch, [model, optimizer], **request["tune"]).smallest
    answer: dict[str, Any] = {
        "largest": found.outcome.max_batch_size,
        "source": found.outcome.source,
        "trials": [[trial.batch_size, trial.fits] for trial in found.outcome.trials],
        "text": str(found),
        "limit_bytes": limit,
        "limit_unchanged": resource.getrlimit(resource.RLIMIT_AS)[0] == limit,
        "steps": 0,
        "verdict": None,
    }
    batch_size = request.get("batch_size") or found.outcome.max_batch_size
    try:
        for _ in range(STEPS):
            train_step(make_batch(batch_size, None))
            answer["steps"] += 1
    except RuntimeError as error:
        verdict = classify(error, device="cpu")
        answer |= {"verdict": None if verdict is None else verdict.name, "error": str(error)[:300]}
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return answer


if __name__ == "__main__":
    print(json.dumps(_train(json.loads(sys.argv[1]))))
