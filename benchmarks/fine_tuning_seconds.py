"""How long the simulated answer for a fine-tuning of Llama 3.1 8B takes from a cold start.

LoRA, QLoRA, compiled layers and Liger's kernels, at 2048 to 8192 tokens on an H100: whole processes, imports included,
with an empty cache, one after the other. Needs peft, Triton and Liger's kernels, but no GPU. Run:
`python benchmarks/fine_tuning_seconds.py`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from batchfinder.versions import installed

os.environ.setdefault("BATCHFINDER_RECORDER", "fake-device")  # as where no CUDA build is installed

RESULTS = Path(__file__).parent / "results"
LENGTHS = (2048, 4096, 8192)
TECHNIQUES = {
    "LoRA": ("--lora", "16", "--precision", "bf16-true"),
    "QLoRA": ("--lora", "16", "--quantization", "nf4", "--precision", "bf16-mixed"),
    "LoRA, layers compiled": ("--lora", "16", "--compile", "layers", "--precision", "bf16-true"),
    "LoRA, Liger": ("--lora", "16", "--loss", "liger", "--precision", "bf16-true"),
}
COMMON = ("--model", "llama-3.1-8b", "--gpu", "h100", "--json")


def asked(command: str, technique: str, length: int) -> dict[str, Any]:
    """Seconds of one process, and what it answered."""
    more = ("--no-cache",) if command == "sweep" else ("--batch-size", "1")
    arguments = (command, *COMMON, *more, "--seq-len", str(length), *TECHNIQUES[technique])
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "batchfinder", *arguments],
            env={**os.environ, "BATCHFINDER_CACHE": cache},
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - start
    row: dict[str, Any] = {"command": command, "technique": technique, "seq_len": length, "seconds": round(seconds, 1)}
    if done.returncode:
        return {**row, "failed": done.stderr.strip().splitlines()[-1]}
    found = json.loads(done.stdout)
    if command == "sweep":
        (cell,) = found["rows"]
        return {**row, "max_batch_size": cell["max_batch_size"], "unscaled": cell["unscaled"]}
    return {**row, "peak_bytes": found["peak_bytes"]}


def main() -> None:
    """Ask for each and print it; the result is complete after every row."""
    result: dict[str, Any] = {
        "benchmark": "fine_tuning_seconds",
        "command": "python benchmarks/fine_tuning_seconds.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": installed("torch", "transformers", "peft", "triton"),
        "python": platform.python_version(),
        "rows": [],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"fine_tuning_seconds-{os.cpu_count()}-cores.json"
    for command in ("estimate", "sweep"):
        for technique in TECHNIQUES:
            for length in LENGTHS:
                result["rows"].append(asked(command, technique, length))
                print(result["rows"][-1], flush=True)
                path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
