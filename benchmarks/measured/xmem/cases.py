"""xMem's jobs, three steps each; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import RESERVED, Case, read_rows

TOKENS = 128
"""Texts are cut there; a batch is as long as its longest."""

_NAMED = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adafactor": "adafactor"}


def cases() -> list[Case]:
    """All rows, those that ran out of memory too; repeats of a job are numbered."""
    found: list[Case] = []
    for row in read_rows(Path(__file__).parent):
        model, optimizer = row["model"], row["optimizer"]
        of_text = "/" in model or model == "T5-small"  # named as on Hugging Face's hub
        arguments = {"model": model}
        if optimizer not in _NAMED:
            arguments["optimizer"] = optimizer
        name = f"{model} {optimizer} {row['batch_size']}"
        repeat = sum(each.name.partition(" #")[0] == name for each in found)
        found.append(
            Case(
                name=name + (f" #{repeat + 1}" if repeat else ""),
                technique="eager",
                gpu=row["gpu"],
                statistic=RESERVED,
                published_bytes=None if row["real_oom"] == "True" else int(row["nvml_peak_bytes"]),
                workload=WorkloadSpec(f"benchmarks.measured.xmem.models:{'text' if of_text else 'images'}", arguments),
                step=StepConfig(optimizer=_NAMED.get(optimizer, "sgd"), steps=3),
                batch_size=int(row["batch_size"]),
                seq_len=TOKENS if of_text else None,
            )
        )
    return found


OTHERS = {"xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}
"""By their columns' names."""


def others() -> dict[str, list[dict[str, Any]]]:
    """What the other estimators said of the same jobs, as rows for `scores.of_rows`, where they gave an answer.

    `unsafe` says that the job ran out of memory when given the estimate as its limit, where that was tried.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in OTHERS.values()}
    for row in read_rows(Path(__file__).parent):
        published = None if row["real_oom"] == "True" else int(row["nvml_peak_bytes"])
        for column, name in OTHERS.items():
            if row[f"{column}_bytes"]:
                predicted = None if row[f"{column}_oom"] == "True" else int(row[f"{column}_bytes"])
                answer: dict[str, Any] = {"published_bytes": published, "predicted_bytes": predicted}
                if published is not None and predicted is not None:
                    answer["error"] = predicted / published - 1
                if row[f"{column}_runtime_s"]:
                    answer["seconds"] = float(row[f"{column}_runtime_s"])
                if row[f"{column}_second_oom"]:
                    answer["unsafe"] = row[f"{column}_second_oom"] == "True"
                answers[name].append(answer)
    return answers
