"""What was found for a command: a row for each GPU and length, and the line to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from batchfinder.cuda_stub import StubCard
from batchfinder.programs import FoundForCommand
from batchfinder.report.dry_run import WITHIN_EPOCH
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.results import StopReason, Trial
from batchfinder.units import format_bytes

_CAPPED = (
    "no larger size was to be tried, or one takes no more memory: then the data has no more samples, or the command "
    "does not use the size"
)


def trial_words(card: StubCard, trial: Trial) -> str:
    """A run in a line, as a search goes on."""
    length = "" if trial.shape.seq_len is None else f", {trial.shape}"
    seen = trial.measurement
    if seen.fits:
        verdict = f"fits, peak {format_bytes(seen.peak_reserved_bytes or 0)} reserved"
    else:
        verdict = seen.message or seen.verdict.value
    return f"{_name(card)}{length}: batch size {trial.batch_size} {verdict} ({seen.seconds:.0f} s)"


def found_table(found: Sequence[FoundForCommand], explain: bool = False) -> Table:
    """A row for each, and below them the line to run for each that fits."""
    columns: Columns = {"GPU": [_name(each.card) for each in found]}
    if any(each.result.shape.seq_len for each in found):
        columns["seq len"] = [str(each.result.shape.seq_len) for each in found]
    columns["batch size"] = [str(each.result.max_batch_size) for each in found]
    if any(each.plan for each in found):
        columns["accumulation"] = [
            "-" if each.plan is None else f"{each.plan.micro_batch_size} x {each.plan.accumulation}" for each in found
        ]
    columns |= {
        "peak reserved": [_peak(each) for each in found],
        "usable": [format_bytes(_usable(each.card)) for each in found],
        "runs": [str(each.runs) for each in found],
        "seconds": [f"{each.seconds:.0f}" for each in found],
    }
    notes = []
    for each in found:
        length = "" if each.result.shape.seq_len is None else f" at {each.result.shape}"
        if each.result.max_batch_size:
            notes.append(f"{_name(each.card)}{length}: {line_to_run(each)}")
        else:
            smallest = min(trial.batch_size for trial in each.result.trials)
            notes.append(f"{_name(each.card)}{length}: not even batch size {smallest} fits")
        if each.result.stop is StopReason.CAP:
            notes.append(f"{_name(each.card)}{length}: {_CAPPED}")
    if kept := sum(each.kept for each in found):
        of_all = f"{kept} of the {sum(each.runs for each in found)} runs"
        notes.append(f"{of_all} had been made before, and nothing has changed since: --again makes them anew")
    last = [process for each in found for process in each.last.processes]
    if any(process.ended in ("steady", "most steps") and process.in_first_epoch for process in last):
        notes.append(f"runs were {WITHIN_EPOCH}")
    build = found[0].last.build
    exact = all(each.result.stop is StopReason.EXACT for each in found)
    above = "the next size" if exact else "a larger one"
    title = f"Largest batch size that trains: each was run, and so was {above}, which does not fit"
    assumed = [words for each in found for words in each.last.assumed]
    recorder = f"recorder: CUDA build {build}" if build else "measured on the GPU that is here"
    return Table(title, (recorder,), columns, (*notes, *assumptions(assumed, explain)))


def line_to_run(found: FoundForCommand) -> str:
    """What to type: variables, the command with its sizes, and what to set in config files."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in found.environment.items()]
    line = " ".join([*variables, shlex.join(found.argv)])
    changes = ", ".join(f"{place} = {number}" for place, number in found.config.items())
    return f"{line}  (with {changes})" if changes else line


def found_as_json(found: Sequence[FoundForCommand]) -> list[dict[str, Any]]:
    """All of it as plain data, sizes in bytes."""
    return [
        {
            "gpu": _name(each.card),
            "usable_bytes": _usable(each.card),
            "seq_len": each.result.shape.seq_len,
            "batch_size": each.result.max_batch_size,
            "stop": each.result.stop.name.lower(),
            "micro_batch_size": None if each.plan is None else each.plan.micro_batch_size,
            "accumulation": None if each.plan is None else each.plan.accumulation,
            "command": list(each.argv),
            "environment": dict(each.environment),
            "config": dict(each.config),
            "runs": [
                {
                    "batch_size": trial.batch_size,
                    "verdict": trial.measurement.verdict.name.lower(),
                    "peak_allocated_bytes": trial.measurement.peak_allocated_bytes,
                    "peak_reserved_bytes": trial.measurement.peak_reserved_bytes,
                    "seconds": round(trial.measurement.seconds, 1),
                }
                for trial in each.result.trials
            ],
            "kept": each.kept,
            "seconds": each.seconds,
            "build": each.last.build,
            "assumed": list(each.last.assumed),
        }
        for each in found
    ]


def _name(card: StubCard) -> str:
    return card.name.removeprefix("NVIDIA ")


def _usable(card: StubCard) -> int:
    return card.total_bytes - card.context_bytes - card.held_bytes


def _peak(found: FoundForCommand) -> str:
    process = found.last.fullest
    return "-" if process is None or not found.result.max_batch_size else format_bytes(process.peak_reserved_bytes)
