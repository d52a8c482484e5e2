"""`sweep` on the Titan X table against tracing each size by itself; its cost as the work grows; start-up times.

Three other ways find the same sizes, each a whole process for each model:

    MemTracker on fake CPU tensors   what one would write without a GPU and without batchfinder
    each size recorded               batchfinder's recording and allocator, without scaling
    MemTracker on the fake GPU       with the kernels that CUDA runs; two lengths only, near the sweep's answer

The sizes are those that batchfinder's own search tries; doubling and bisection try about twice as many. Run:
`python benchmarks/sweep_speed.py` on an otherwise idle machine. It takes about 10 minutes, nearly all of it for the
other ways. `--dry-run` compares them on a small model and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import Device, host_name
from batchfinder.devices.cards import card
from batchfinder.find import find_max_batch_size
from batchfinder.recording.answers import search_simulated
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.search import Secant
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from batchfinder.versions import installed

os.environ.setdefault("BATCHFINDER_RECORDER", "fake-device")  # as where no CUDA build is installed

ROOT = Path(__file__).resolve().parents[1]
TINY = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 500}
LENGTHS = (64, 128, 256, 320, 384, 512)
ON_CPU, RECORDED, ON_GPU = "MemTracker on fake CPU tensors", "each size recorded", "MemTracker on the fake GPU"
COMMANDS = {
    "pass": ("-c", "pass"),
    "import batchfinder": ("-c", "import batchfinder"),
    "batchfinder --help": ("-m", "batchfinder", "--help"),
}
HELP_IMPORTS_TORCH = (
    "import sys\nfrom batchfinder.cli.parser import build_parser\n"
    "build_parser().format_help()\nsys.exit('torch' in sys.modules)"
)
Sizes = dict[str, dict[int, int]]
"""The largest batch size, by model and length."""


def _processor_seconds() -> float:
    """Of this process and of all child processes it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@dataclass
class Clock:
    """Wall and processor seconds since it was made. The latter are comparable on a busy machine as well."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=_processor_seconds)

    def read(self) -> dict[str, float]:
        """Seconds so far."""
        return {
            "seconds": round(time.perf_counter() - self.wall, 2),
            "processor_seconds": round(_processor_seconds() - self.processor, 2),
        }


def start_up(rounds: int) -> dict[str, Any]:
    """Seconds of whole processes, which take turns; and whether `--help` imports torch."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(round(time.perf_counter() - started, 4))
    # The difference is taken within each round, as the machine's other work changes from round to round.
    above = {
        name: statistics.median(taken - bare for taken, bare in zip(seconds[name], seconds["pass"], strict=True))
        for name in COMMANDS
        if name != "pass"
    }
    return {
        "seconds": seconds,
        "median_ms_above_pass": {name: round(1000 * value, 1) for name, value in above.items()},
        "imports_torch": subprocess.run([sys.executable, "-c", HELP_IMPORTS_TORCH]).returncode != 0,
    }


def _spec(model: str) -> WorkloadSpec:
    return WorkloadSpec("batchfinder.models:build_workload", {"spec": model})


def simulated(model: str, seq_lens: Sequence[int], device: Device) -> dict[str, Any]:
    """One sweep in this process with an empty cache, the start of the recording process included."""
    clock = Clock()
    with Simulation(_spec(model), StepConfig()) as simulation:
        probe = simulation.probe(device, seq_lens)
        outcomes = [search_simulated(probe, Shape(seq_len)) for seq_len in seq_lens]
    return {
        "recordings": probe.traces.recordings,
        "sizes_tried": sum(len(outcome.trials) for outcome in outcomes),
        "largest": max(outcome.max_batch_size for outcome in outcomes),
        **clock.read(),
    }


def growth(device: Device, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The cost of a sweep with more lengths, deeper models (their configs go to `folder`) and larger cards."""
    cells = [{"cells": count, **simulated("bert-base", range(32, 32 + 16 * count, 16), device)} for count in (1, 6, 30)]
    layers = []
    config = {"model_type": "bert", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    for count in (2, 8, 32):
        path = folder / f"{count}-layers" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps({**config, "num_hidden_layers": count}))
        layers.append({"layers": count, **simulated(str(path), (128,), device)})
    budgets = []
    for budget in (4, 64, 1024):
        larger = replace(device, total_bytes=budget * GIB, usable_bytes=budget * GIB)
        budgets.append({"budget_gib": budget, **simulated("bert-base", (128,), larger)})
    return {"more cells": cells, "more layers": layers, "a larger card": budgets}


def swept(models: list[str], seq_lens: Sequence[int], budget: str | None) -> tuple[dict[str, float], Sizes]:
    """`batchfinder sweep` as a process, with an empty cache: its seconds and its sizes."""
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


class RecordedProbe:
    """Records each size it is asked for, and replays it through the simulated allocator; scales nothing."""

    source = "simulated"
    unmodelled: tuple[str, ...] = ()

    def __init__(self, probe: SimulatedProbe) -> None:
        self._probe = probe

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        later = self._probe.steady_state(batch_size, shape, exact=True)
        timeline = later.timeline
        if not later.fits:
            return Measurement(Verdict.OUT_OF_MEMORY)
        return Measurement(Verdict.FITS, timeline.max_allocated_bytes, timeline.max_reserved_bytes)


def recorded(model: str, seq_lens: Sequence[int], device: Device) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """One model's cells, each size recorded; the seconds include the start of the recording process."""
    clock = Clock()
    cells = []
    with Simulation(_spec(model), StepConfig()) as simulation:
        probe = RecordedProbe(simulation.probe(device, seq_lens))
        for seq_len in seq_lens:
            search = Secant(limit_bytes=device.usable_bytes, tolerance=0.0)
            outcome = find_max_batch_size(probe, Shape(seq_len), search=search)
            tried = [trial.batch_size for trial in outcome.trials]
            cells.append({"seq_len": seq_len, "max_batch_size": outcome.max_batch_size, "tried": tried})
    return clock.read(), cells


def tracked(
    model: str, seq_lens: Sequence[int], device: Device, where: str, near: dict[int, int]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """One model's cells by `memtracker.py`."""
    request = {"model": model, "seq_lens": seq_lens, "budget_bytes": device.usable_bytes, "device": where, "near": near}
    clock = Clock()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memtracker", json.dumps(request)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return clock.read(), json.loads(done.stdout)


def compared(models: list[str], seq_lens: tuple[int, ...], budget: str | None, rounds: int) -> dict[str, Any]:
    """The sweep and the other ways on the same cells, with sweeps before the ways and after each."""
    device = card("titan x", budget).device
    taken, answers = swept(models, seq_lens, budget)
    sweeps = [taken]
    ways: dict[str, Any] = {}
    for way in (ON_CPU, RECORDED, ON_GPU):
        cells, readings = {}, []
        for model in models:
            if way == RECORDED:
                taken, cells[model] = recorded(model, seq_lens, device)
            elif way == ON_CPU:
                taken, cells[model] = tracked(model, seq_lens, device, "cpu", {})
            else:
                taken, cells[model] = tracked(model, seq_lens[1::4] or seq_lens, device, "gpu", answers[model])
            readings.append(taken)
        total = {name: round(sum(reading[name] for reading in readings), 2) for name in taken}
        ways[way] = {**total, **_agreement(answers, cells), "cells": cells}
        print(json.dumps({way: ways[way]}), file=sys.stderr)
        sweeps += [swept(models, seq_lens, budget)[0] for _ in range(rounds)]
    for way in (ON_CPU, RECORDED):
        ways[way]["times_the_sweep"] = {
            name: round(ways[way][name] / statistics.median(each[name] for each in sweeps), 1) for name in taken
        }
    return {"budget_bytes": device.usable_bytes, "sweeps": sweeps, "sizes": answers, "ways": ways}


def _agreement(answers: Sizes, cells: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Another way's answers against the sweep's."""
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
    """Measure, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="sweeps after each other way (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="a small model; no result is written")
    arguments = parser.parse_args()
    dry = arguments.dry_run
    result: dict[str, Any] = {
        "benchmark": "sweep_speed",
        "command": "python benchmarks/sweep_speed.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": installed("torch", "transformers"),
        "python": platform.python_version(),
        "start_up": start_up(2 if dry else 20),
        "growth": {},
    }
    with tempfile.TemporaryDirectory() as name:
        if dry:
            config = Path(name) / "config.json"
            config.write_text(json.dumps(TINY))
            result["titan_x"] = compared([str(config)], (16,), "40MiB", 0)
            print(json.dumps(result))
            return
        result["growth"] = growth(card("titan x", None).device, Path(name))
        result["titan_x"] = compared(["bert-base", "bert-large"], LENGTHS, None, arguments.rounds)
    print(table(result))
    path = ROOT / "benchmarks" / "results" / f"sweep_speed-{os.cpu_count()}-cores.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
