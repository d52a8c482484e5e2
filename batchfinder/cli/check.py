"""`check`: real training steps on this machine's GPU, and their peaks beside the simulated ones."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from batchfinder.cli.options import check_file, step_options, whole_number, write_file
from batchfinder.cli.sweep_request import CUDA_DEVICE, real_gpu
from batchfinder.devices import host_name
from batchfinder.errors import InvalidValue
from batchfinder.measure.child_probe import ChildProcessProbe
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.results import Measurement, Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.sizing.recorder import take_with_recorder
from batchfinder.sizing.sweep_request import Place
from batchfinder.training.spec import AUTO, StepOptions, WorkloadFacts, recorder_in_words, seq_lens_of, torch_of
from batchfinder.units import format_bytes

DEFAULT_MODELS = ("bert-base", "gpt2", "resnet50")
_PEAKS = ("allocated", "reserved")


def main(arguments: argparse.Namespace) -> int:
    """Check each model at one size; a size that does not fit is a result, not an error."""
    models = tuple(dict.fromkeys(arguments.model or DEFAULT_MODELS))
    if arguments.strategy is not None:
        raise InvalidValue("--strategy", arguments.strategy, "none: one GPU is checked")
    options = step_options(arguments)
    batch_size = whole_number("--batch-size", arguments.batch_size)
    micro_batches = whole_number("--accumulation", arguments.accumulation)
    seq_len = whole_number("--seq-len", arguments.seq_len)
    for model in models:
        check_model_name(model)
    if options.gpus > 1:
        raise InvalidValue("--gpus", options.gpus, "1: one GPU is checked")
    if arguments.out is not None:
        check_file("--out", arguments.out)
    if not CUDA_DEVICE.fullmatch(arguments.device):
        raise InvalidValue("--device", arguments.device, "cuda, or cuda:1 and so on; `profile` simulates a GPU")
    try:
        place = real_gpu(arguments.device, None)
    except InvalidValue as error:
        expected = f"{error.expected.removeprefix('cpu, or ')}; `profile` simulates a GPU"
        raise InvalidValue("--device", arguments.device, expected) from error
    (card,) = place.cards
    rows, unmodelled = [], []
    with StatusLine() as line:
        for model in models:
            asked = () if seq_len is None else (seq_len,)
            row, left_out = check_model(
                model, options, micro_batches, batch_size, asked, place, line, arguments.recorder
            )
            rows.append(row)
            unmodelled += [words for words in left_out if words not in unmodelled]
    found = {
        "command": shlex.join(["batchfinder", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": host_name(), "gpu": asdict(card.device)},
        "versions": {"python": platform.python_version(), **place.versions},
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("PYTORCH_", "CUBLAS"))},
        "options": asdict(options),
        "rows": rows,
    }
    if arguments.out is not None:
        write_file("--out", arguments.out, json.dumps(found, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in place.versions.items())
    recorders = dict.fromkeys(f"recorder: {row['recorder']}" for row in rows)
    usable = f"{format_bytes(card.device.usable_bytes)} usable; {versions}"
    details = (", ".join(options.words()), usable, *recorders)
    title = f"Peaks of training steps on {card.name}, simulated and measured"
    Table(title, details, as_columns(rows), assumptions(unmodelled, arguments.explain)).show()
    return 0


def check_model(
    model: str,
    options: StepOptions,
    micro_batches: int,
    batch_size: int,
    asked: tuple[int, ...],
    place: Place,
    line: StatusLine,
    recorder: str = AUTO,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Simulate one model's steps at one size, then take them on the place's device.

    Args:
        asked: the sequence length, or nothing for the usual one of the model.
        recorder: what the steps are simulated by: one of `RECORDERS`, or `auto`.

    Returns:
        A row of the result, in bytes, and what the simulation leaves out.

    Raises:
        BatchFinderError: the model could not be built or recorded, or its steps failed for another reason than memory.
    """
    (card,) = place.cards
    spec, step = options.workload(model), options.step(micro_batches)

    def simulate(by: str) -> tuple[WorkloadFacts, int | None, Measurement, tuple[str, ...]]:
        with Simulation(spec, step, by) as simulation:
            line.update(f"recording {model}")
            facts = simulation.facts()
            seq_len = seq_lens_of(model, asked, facts)[-1]
            probe = simulation.probe(card.device, [seq_len], AllocatorSettings.from_environment(torch_of(by)))
            return facts, seq_len, probe(batch_size, Shape(seq_len)), probe.unmodelled

    (facts, seq_len, simulated, unmodelled), instead = take_with_recorder(recorder, options, [card], simulate)
    line.update(f"{model}: training steps on {card.name}")
    with ChildProcessProbe(spec, step, place.device) as real:
        measured = real(batch_size, Shape(seq_len))
    row: dict[str, Any] = {"model": model, "seq_len": seq_len, "batch_size": batch_size, "accumulation": micro_batches}
    row |= {"recorder": recorder_in_words(facts.recorder, facts.versions["torch"]), "versions": facts.versions}
    row |= {"simulated": _side(simulated), "measured": _side(measured)}
    return row, (*unmodelled, *([instead] if instead else []))


def _side(seen: Measurement) -> dict[str, Any]:
    """What one row has of a measurement."""
    peaks = {"peak_allocated_bytes": seen.peak_allocated_bytes, "peak_reserved_bytes": seen.peak_reserved_bytes}
    return {"verdict": seen.verdict.name.lower(), **peaks, "message": seen.message}


def as_columns(rows: list[dict[str, Any]]) -> Columns:
    """The rows as a table: a size without a peak has its verdict in that place."""
    columns: Columns = {
        "model": [row["model"] for row in rows],
        "seq len": ["-" if row["seq_len"] is None else str(row["seq_len"]) for row in rows],
        "batch size": [str(row["batch_size"]) for row in rows],
    }
    for peak in _PEAKS:
        name = f"peak_{peak}_bytes"
        for side in ("simulated", "measured"):
            seen = [row[side] for row in rows]
            words = [each["verdict"].replace("_", " ") for each in seen]
            columns[f"{peak} {side}"] = [
                word if each[name] is None else format_bytes(each[name]) for word, each in zip(words, seen, strict=True)
            ]
        pairs = [(row["simulated"][name], row["measured"][name]) for row in rows]
        columns[f"{peak} off by"] = [
            "" if not simulated or not measured else f"{100 * (simulated / measured - 1):+.2f} %"
            for simulated, measured in pairs
        ]
    return columns
