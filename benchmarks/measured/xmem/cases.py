"""xMem's jobs, four steps each; README.md says what was read where."""

from __future__ import annotations

import csv
import functools
import random
from pathlib import Path
from typing import Any

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import RESERVED, Case, read_rows

TOKENS = 128
"""Texts are cut there; a batch is as long as its longest."""

STEPS = 4
"""The loops end after the step of index `iterations`, which is 3: exp/trainer/__init__.py and train_loop.py."""

DRAWS = {1: 7, 5: 41, 15: 101}
"""Of the steps' lengths, by the batch size from which on: the loader shuffles, and no seed is set.

Each is recorded once. Of batches of one all differ, and the models are the largest; of 15 texts and more few do.
"""

_WORKSPACES = (
    "0.39 and 0.56 GiB more than all tensors: cuDNN's workspaces, by size; it picks its algorithms on the card. The "
    "same jobs run again took 0.39 and 0.70 GiB less than published"
)
NOTES = {
    "cerebras/Cerebras-GPT-111M SGD 10": "one run in four has a shorter step: with a second one of 118 tokens -0.8 %",
    "cerebras/Cerebras-GPT-111M AdamW 10": (
        "one run in four has a shorter step: with a second one of 118 tokens it comes to the same byte"
    ),
    "T5-small Adam 5": "two runs in three have a shorter step, and come to 8 % less or more",
    "distilbert/distilgpt2 AdamW 40": "more than the same job took at 43",
    "MnasNet AdamW 200": _WORKSPACES,
    "MnasNet Adam 300": _WORKSPACES,
    **dict.fromkeys(
        ("MnasNet SGD 323", "MobileNetV2 AdamW 251", "MobileNetV2 Adagrad 317", "VGG19 AdamW 377", "VGG19 Adam 339"),
        "more than all tensors, unlike larger batches: cuDNN's workspaces, by size; it picks algorithms on the card",
    ),
}
"""What explains rows that are off."""

_NAMED = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adafactor": "adafactor"}


def cases() -> list[Case]:
    """All rows, those that ran out of memory too; repeats of a job are numbered."""
    found: list[Case] = []
    for row in read_rows(Path(__file__).parent):
        model, optimizer = row["model"], row["optimizer"]
        of_text = "/" in model or _is_t5(model)  # named as on Hugging Face's hub
        arguments = {"model": model}
        if optimizer not in _NAMED:
            arguments["optimizer"] = optimizer
        name = f"{model} {optimizer} {row['batch_size']}"
        step = CARD_BYTES[row["gpu"]] / 100
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
                step=StepConfig(optimizer=_NAMED.get(optimizer, "sgd"), steps=STEPS),
                batch_size=int(row["batch_size"]),
                seq_len=TOKENS if of_text else None,
                less_model=not of_text,
                note="" if repeat else note,
                limits_tried=tuple(
                    (int(round(int(row[f"{tool}_bytes"]) / step) * step), row[f"{tool}_second_oom"] == "False")
                    for tool in OTHERS
                    if row[f"{tool}_bytes"] and row[f"{tool}_second_oom"]
                ),
                limit_step_bytes=step,
                draws=lengths_drawn(model, int(row["batch_size"])) if of_text else (),
            )
        )
    return found


_BEGUN = ("meta-llama", "deepseek-ai", "google", "facebook")
"""Whose tokenizers put a token before each text."""


def _is_t5(model: str) -> bool:
    return model.lower().startswith("t5")


def lengths_drawn(model: str, batch_size: int) -> tuple[tuple[int, ...], ...]:
    """The lengths of a run's steps, as often as it is drawn: those of the longest of so many texts, in tokens.

    The texts are lines of wikitext-2, of which a third are empty. A batch of empty texts alone has no token, and would
    end the run with an error: it is drawn again.
    """
    counts = _line_lengths()["t5" if _is_t5(model) else "gpt2"]
    chance = random.Random(14)
    begun = model.startswith(_BEGUN)

    def longest() -> int:
        texts = chance.choices(range(TOKENS + 1), counts, k=batch_size)
        return min(TOKENS, max(texts) + begun) or longest()

    draws = DRAWS[max(size for size in DRAWS if size <= batch_size)]
    return tuple(tuple(longest() for _ in range(STEPS)) for _ in range(draws))


@functools.cache
def _line_lengths() -> dict[str, list[int]]:
    """How many lines have 0, 1, 2, ... and `TOKENS` or more tokens, by tokenizer."""
    lines = (Path(__file__).parent / "lengths.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return {name: [int(row[name]) for row in rows] for name in ("gpt2", "t5")}


CARD_BYTES = {"RTX 3060": 12622168064, "RTX 4060": 8318222336, "A100 40GB": 42474471424}
"""`total_gpu_memory` in the results. A second run's limit is a share of it in whole percent, rounded to the nearest:
`_get_mem_fraction` in exp/run.py."""

NUM_PARAMETERS = {
    "EleutherAI/gpt-neo-125M": 125_198_592,
    "cerebras/Cerebras-GPT-111M": 111_050_496,
    "distilbert/distilgpt2": 81_912_576,
    "openai-community/gpt2": 124_439_808,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "T5-small": 60_506_624,
    "t5-base": 222_903_552,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "google/gemma-2-2b-it": 2_614_341_888,
    "MnasNet": 3_115_122,
    "ConvNeXtTiny": 28_589_128,
    "ConvNeXtBase": 88_591_464,
    "MobeNetV3Large": 4_214_842,
    "MobeNetV3Small": 1_528_106,
    "MobileNetV2": 3_504_872,
    "RegNetX400MF": 5_495_976,
    "RegNetY400MF": 4_344_144,
    "ResNet101": 44_549_160,
    "ResNet152": 60_192_808,
    "VGG16": 138_357_544,
    "VGG19": 143_667_240,
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
    for case, row in zip(cases(), read_rows(Path(__file__).parent), strict=True):
        published = None if row["real_oom"] == "True" else int(row["nvml_peak_bytes"])
        if published is not None and row["optimizer"] in ("Adam", "AdamW"):
            predicted = 16 * NUM_PARAMETERS[row["model"]]
            error = predicted / published - 1
            answers["accelerate's formula, Adam"].append(
                {"name": case.name, "published_bytes": published, "predicted_bytes": predicted, "error": error}
            )
        for column, name in OTHERS.items():
            if row[f"{column}_bytes"]:
                predicted = None if row[f"{column}_oom"] == "True" else int(row[f"{column}_bytes"])
                answer: dict[str, Any] = {
                    "name": case.name,
                    "published_bytes": published,
                    "predicted_bytes": predicted,
                }
                if published is not None and predicted is not None:
                    answer["error"] = predicted / published - 1
                if row[f"{column}_runtime_s"]:
                    answer["seconds"] = float(row[f"{column}_runtime_s"])
                if row[f"{column}_second_oom"]:
                    answer["unsafe"] = row[f"{column}_second_oom"] == "True"
                answers[name].append(answer)
    return answers
