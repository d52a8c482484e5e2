"""xMem's jobs, three steps each; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import RESERVED, Case, read_rows

TOKENS = 128
"""Texts are cut there; a batch is as long as its longest."""

_OF_LENGTHS = (
    "the texts of some steps are shorter: with a second step of 120 tokens {:+.1f} %, with a first one {:+.1f} %"
)
_WORKSPACES = (
    "0.36 and 0.53 GiB more than all tensors: cuDNN's workspaces, by size; it picks its algorithms on the card"
)
NOTES = {
    "cerebras/Cerebras-GPT-111M SGD 10": _OF_LENGTHS.format(-1.8, 4.8),
    "cerebras/Cerebras-GPT-111M AdamW 10": _OF_LENGTHS.format(-0.6, -12.6),
    "T5-small Adam 5": _OF_LENGTHS.format(2.6, -3.0),
    "cerebras/Cerebras-GPT-111M SGD 5": _OF_LENGTHS.format(-3.1, 9.0),
    "MnasNet AdamW 200": _WORKSPACES,
    "MnasNet Adam 300": _WORKSPACES,
}
"""What explains rows that are off."""

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
        note = NOTES.get(name, "")
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
                note="" if repeat else note,
                limits_tried=tuple(
                    (int(row[f"{tool}_bytes"]), row[f"{tool}_second_oom"] == "False")
                    for tool in OTHERS
                    if row[f"{tool}_bytes"] and row[f"{tool}_second_oom"]
                ),
            )
        )
    return found


NUM_PARAMETERS = {
    "EleutherAI/gpt-neo-125M": 125_198_592,
    "cerebras/Cerebras-GPT-111M": 111_050_496,
    "distilbert/distilgpt2": 81_912_576,
    "T5-small": 60_506_624,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "google/gemma-2-2b-it": 2_614_341_888,
    "MnasNet": 3_115_122,
    "ConvNeXtTiny": 28_589_128,
    "ConvNeXtBase": 88_591_464,
    "MobeNetV3Large": 4_214_842,
}
"""Of the models that `models.py` builds."""

OTHERS = {"xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}
"""By their columns' names."""


def others() -> dict[str, list[dict[str, Any]]]:
    """What the other estimators said of the same jobs, as rows for `scores.of_rows`, where they gave an answer.

    `unsafe` says that the job ran out of memory when given the estimate as its limit, where that was tried. The
    formula is that of `accelerate estimate-memory` for fp32, 16 bytes for each parameter and nothing for activations:
    `estimate_training_usage` in
    https://github.com/huggingface/accelerate/blob/v1.10.0/src/accelerate/commands/estimate.py.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in OTHERS.values()}
    answers["accelerate's formula, Adam"] = []
    for row in read_rows(Path(__file__).parent):
        published = None if row["real_oom"] == "True" else int(row["nvml_peak_bytes"])
        if published is not None and row["optimizer"] in ("Adam", "AdamW"):
            predicted = 16 * NUM_PARAMETERS[row["model"]]
            answer = {"published_bytes": published, "predicted_bytes": predicted, "error": predicted / published - 1}
            answers["accelerate's formula, Adam"].append(answer)
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
