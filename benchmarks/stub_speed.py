"""Four training steps of BERT-base on the CUDA stub beside recording them on the fake device, in one run.

A new process for each. Compared are the seconds of the steps themselves, without imports and building the model, and
those of whole processes. The stub runs each size; one recording on the fake device answers for many. Needs
`batchfinder stub install`. Run: `python benchmarks/stub_speed.py`; `--dry-run` takes a small model and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # import from the repository

from batchfinder.stub_cards import open_session, stub_card  # noqa: E402

MODEL = """
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(**{options})
"""
ON_STUB = (
    MODEL
    + """
import json, time, torch
model = BertForSequenceClassification(config).cuda().train()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.ones({batch}, {length}, dtype=torch.long, device="cuda")
labels = torch.zeros({batch}, dtype=torch.long, device="cuda")
seconds = []
for _ in range({steps}):
    start = time.perf_counter()
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - start)
print(json.dumps([sum(seconds), torch.cuda.max_memory_allocated()]))
"""
)
ON_FAKE_DEVICE = (
    MODEL
    + """
import json, time, torch
from batchfinder.devices import device_for, find_gpu
from batchfinder.recording.record_step import record_step
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Workload

def batch(size, length):
    ids = torch.ones(size, length, dtype=torch.long)
    return {{"input_ids": ids, "labels": torch.zeros(size, dtype=torch.long)}}

workload = Workload(BertForSequenceClassification(config).train(), batch)
start = time.perf_counter()
trace = record_step(workload, StepConfig(steps={steps}), (8, 0), {batch}, {length})
trace = trace.on(device_for(find_gpu("A100 80GB")).reduces_on)
seconds = time.perf_counter() - start
live = most = 0
for event in trace.structure.order:
    live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
    most = max(most, live)
print(json.dumps([seconds, most]))
"""
)


def run(script: str, environment: dict[str, str]) -> tuple[float, int, float]:
    """Seconds of the steps, the peak allocated in bytes, and seconds of the whole process."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak, time.perf_counter() - start


def main() -> None:
    """Run both sides in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="a small model, once, as JSON")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/stub_speed-2-cores.json"), help="JSON file")
    small = parser.parse_args().dry_run
    options = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    given = {"options": options if small else {}, "batch": 32, "length": 128, "steps": 4}
    here = dict(os.environ)
    sides: dict[str, list[tuple[float, int, float]]] = {"stub": [], "fake device": []}
    with open_session([stub_card("A100")]) as session:
        for _ in range(1 if small else 5):
            sides["stub"].append(run(ON_STUB.format(**given), {**here, **session.variables()}))
            sides["fake device"].append(run(ON_FAKE_DEVICE.format(**given), here))
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {version('torch')}",
        "steps": given["steps"],
    }
    for name, runs in sides.items():
        result[name] = {
            "steps_seconds": statistics.median(run[0] for run in runs),
            "process_seconds": statistics.median(run[2] for run in runs),
            "peak_allocated_bytes": runs[0][1],
        }
    pairs = zip(sides["fake device"], sides["stub"], strict=True)
    result["fake device over stub, steps"] = statistics.median(fake[0] / stub[0] for fake, stub in pairs)
    print(json.dumps(result, indent=1))
    if not small:
        Path(parser.parse_args().output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
