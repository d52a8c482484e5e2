"""`sweep` on the Titan X table, beside tracing each size by itself; what it costs with more to do; how it starts.

Three ways to trace each size, as whole processes:

    MemTracker on fake CPU tensors   what one would write without a GPU and without batchfinder
    each size recorded               batchfinder's recording and allocator, but nothing scaled
    MemTracker on the pretend GPU    with the kernels that CUDA runs; at two lengths, and near the sweep's answer only

The sizes are chosen by batchfinder's own search, which needs the fewest; doubling and bisection, which is what one
would write, takes about twice as many. Run: `python benchmarks/sweep_speed.py`, on an otherwise idle machine. It takes
about 10 minutes, nearly all of it the other ways'. `--dry-run` compares them on a small model and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from speed_parts.clock import Clock, total
from speed_parts.growth import deeper, larger, more_cells
from speed_parts.recorded import recorded_each
from speed_parts.start_up import start_up

from batchfinder.cli.options import card
from batchfinder.devices import Device, host_name

HERE = Path(__file__).resolve().parent
TINY = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 500}
LENGTHS = (64, 128, 256, 320, 384, 512)
ON_CPU, RECORDED, ON_PRETEND = (
    "MemTracker on fake CPU tensors",
    "each size recorded",
    "MemTracker on the pretend GPU",
)
Sizes = dict[str, dict[int, int]]


def swept(models: list[str], seq_lens: Sequence[int], budget: str | None) -> tuple[dict[str, float], Sizes]:
    """`batchfinder sweep`, a whole process with nothing known.

    Returns:
        Its seconds, and the largest sizes by model and length.
    """
    options = [f"--model={model}" for model in models] + [f"--seq-len={seq_len}" for seq_len in seq_lens]
    options += ["--gpu=titan x", *([f"--budget={budget}"] if budget else [])]
    with tempfile.TemporaryDirectory() as cache:
        clock = Clock()
        done = subprocess.run(
            [sys.executable, "-m", "batchfinder", "sweep", "--json", *options],
            env={**os.environ, "BATCHFINDER_CACHE": cache},
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        taken = clock.read()
    sizes: Sizes = {model: {} for model in models}
    for row in json.loads(done.stdout)["rows"]:
        sizes[row["model"]][row["seq_len"]] = row["max_batch_size"]
    return taken, sizes


def tracked(
    model: str, seq_lens: Sequence[int], device: Device, where: str, near: dict[int, int]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """One model's cells by MemTracker, a whole process. Returns its seconds and the cells."""
    asked = {"model": model, "seq_lens": seq_lens, "budget_bytes": device.usable_bytes, "device": where, "near": near}
    clock = Clock()
    done = subprocess.run(
        [sys.executable, str(HERE / "speed_parts" / "tracked.py"), json.dumps(asked)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return clock.read(), json.loads(done.stdout)


def compared(models: list[str], seq_lens: tuple[int, ...], budget: str | None, rounds: int) -> dict[str, Any]:
    """The sweep and the other ways on the same cells, sweeps before, between and after them."""
    device = card("titan x", budget).device
    taken, answers = swept(models, seq_lens, budget)
    sweeps = [taken]
    ways: dict[str, Any] = {}
    for way in (ON_CPU, RECORDED, ON_PRETEND):
        cells, readings = {}, []
        for model in models:
            if way == RECORDED:
                taken, cells[model] = recorded_each(model, seq_lens, device)
            elif way == ON_CPU:
                taken, cells[model] = tracked(model, seq_lens, device, "cpu", {})
            else:
                taken, cells[model] = tracked(model, seq_lens[1::4] or seq_lens, device, "pretend", answers[model])
            readings.append(taken)
        ways[way] = {**total(readings), **_agreement(answers, cells), "cells": cells}
        print(json.dumps({way: ways[way]}), file=sys.stderr)
        sweeps += [swept(models, seq_lens, budget)[0] for _ in range(rounds)]
    for way in (ON_CPU, RECORDED):
        ways[way]["times_the_sweep"] = {
            name: round(ways[way][name] / statistics.median(each[name] for each in sweeps), 1) for name in taken
        }
    return {"budget_bytes": device.usable_bytes, "sweeps": sweeps, "sizes": answers, "ways": ways}


def _agreement(answers: Sizes, cells: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """How another way's answers stand to the sweep's."""
    both = [(answers[model][cell["seq_len"]], cell["max_batch_size"]) for model in cells for cell in cells[model]]
    ratios = [theirs / ours for ours, theirs in both if ours]
    return {
        "sizes_tried": sum(len(cell["tried"]) for model in cells for cell in cells[model]),
        "cells_compared": len(both),
        "same_answers": sum(ours == theirs for ours, theirs in both),
        "of_the_sweeps_answer": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def table(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    sweeps = result["titan_x"]["sweeps"]
    seconds, processor = (statistics.median(each[name] for each in sweeps) for name in sweeps[0])
    lines = [f"sweep: {seconds:.1f} s, {processor:.1f} s of processor time"]
    for name, way in result["titan_x"]["ways"].items():
        low, high = way["of_the_sweeps_answer"]
        times = way.get("times_the_sweep")
        beside = f" ({times['seconds']}x; processor {times['processor_seconds']}x)" if times else ""
        lines.append(
            f"{name}: {way['seconds']} s{beside} for {way['sizes_tried']} sizes; same answer in"
            f" {way['same_answers']} of {way['cells_compared']} cells, {low} to {high} of the sweep's"
        )
    for name, rows in result["growth"].items():
        lines += [f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}" for row in rows]
    above = result["start_up"]["median_ms_above_pass"]
    return "\n".join([*lines, *(f"{name}: {value} ms above bare Python" for name, value in above.items())])


def main() -> None:
    """Measure, print the table, and write the result beside the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="sweeps after each other way (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="a small model, and no result is written")
    arguments = parser.parse_args()
    dry = arguments.dry_run
    titan_x = card("titan x", None).device
    result: dict[str, Any] = {
        "benchmark": "sweep_speed",
        "command": "python benchmarks/sweep_speed.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": {name: version(name) for name in ("batchfinder", "torch", "transformers")},
        "python": platform.python_version(),
        "start_up": start_up(2 if dry else 20),
        "growth": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if dry:
            (folder / "config.json").write_text(json.dumps(TINY))
            result["titan_x"] = compared([str(folder / "config.json")], (16,), "40MiB", 0)
            print(json.dumps(result))
            return
        result["growth"] = {
            "more cells": more_cells("bert-base", (1, 6, 30), titan_x),
            "more layers": deeper((2, 8, 32), titan_x, folder),
            "a larger card": larger("bert-base", (4, 64, 1024), titan_x),
        }
        result["titan_x"] = compared(["bert-base", "bert-large"], LENGTHS, None, arguments.rounds)
    print(table(result))
    path = HERE / "results" / f"sweep_speed-{os.cpu_count()}-cores.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
