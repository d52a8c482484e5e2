"""Writes requirements.json and requirements.md: which batch of which model trains on which card.

`python docs/make_requirements.py` simulates what the file lacks, such as a new card's column; `--again` all of it, in
more than an hour on two cores; `--again gpt2` one model; `--page` only writes the page. A test simulates some cells
again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import batchfinder
from batchfinder.simulator.trace import SCHEMA
from batchfinder.units import format_bytes
from batchfinder.versions import installed

os.environ.setdefault("BATCHFINDER_RECORDER", "fake-device")  # as where no CUDA build is installed

RESULTS = Path(__file__).with_name("requirements.json")
PAGE = Path(__file__).with_name("requirements.md")

MODELS = {
    "bert-base": 512,
    "bert-large": 512,
    "gpt2": 1024,
    "gpt2-xl": 1024,
    "qwen2.5-0.5b": 2048,
    "qwen2.5-1.5b": 2048,
    "qwen2.5-7b": 2048,
    "llama-3.2-1b": 2048,
    "llama-3.2-3b": 2048,
    "llama-3.1-8b": 2048,
    "mistral-7b": 2048,
    "qwen3-8b": 2048,
}
"""Tokens of a sample, by model."""
CLASSIFIERS = ("bert-base", "bert-large")
"""Whose heads peft trains in full, so that their weights cannot be of 4 bits."""

WITHOUT_BF16 = ("T4",)
GPUS = (
    *WITHOUT_BF16,
    *("RTX 3060", "RTX 3090", "RTX 4090", "L4", "RTX 5090", "A100 40GB", "L40S", "A100 80GB", "H100 80GB"),
)
FOR_LEAST = "RTX 4090"
"""Whose kernels the memory of one sample is given for."""

ADAPTERS = {"lora": 16, "lora_targets": "all-linear"}
METHODS: dict[str, dict[str, Any]] = {
    "QLoRA": {**ADAPTERS, "quantization": "nf4", "precision": "bf16-mixed", "optimizer": "paged-adamw-8bit"},
    "LoRA": {**ADAPTERS, "precision": "bf16-true", "optimizer": "adamw"},
    "full": {"precision": "bf16-mixed", "optimizer": "adamw"},
}
WORDS = {
    "QLoRA": "nf4 weights, LoRA of rank 16 on all linear layers, bf16-mixed, paged 8-bit AdamW",
    "LoRA": "LoRA of rank 16 on all linear layers, weights in bf16, AdamW",
    "full": "all weights in fp32, bf16-mixed, AdamW",
}

HEAD = """\
# What trains on which card

The largest micro-batch of a training step, simulated by batchfinder {batchfinder} on {date} with torch {torch} and
transformers {transformers}, without a GPU. `0` says that not one sample fits. All of it is with
`--gradient-checkpointing` and each model's own loss. `docs/requirements.json` has the same figures, and
`python docs/make_requirements.py` made both.

"""
METHOD = """\
## {method}

{words}:

```console
$ {command}
```

{table}

"""
OLDER = """\
Not simulated again since reductions and the sums of gradients are recorded as on a GPU, which made LoRA's sizes of
GPT-2 up to 19 % smaller: {models}.

"""
AFTER = """\
*One sample* is what the caching allocator reserves at a batch size of 1 on an RTX 4090; a card also needs room for its
CUDA context, 0.1 to 0.7 GiB ([Devices](devices.md)). A T4 has no bf16 units: its column is with `--precision 16-mixed`,
so that LoRA's frozen weights are in fp32 there. A chunked loss (`--loss chunked`) makes room for more of models with
large vocabularies ([Gallery](gallery.md)). An effective batch beyond these is reached by accumulation
(`--target-batch-size`). A size may fit after the allocator has given its cache back once, and does not count where
each further step would have to ([thrashing](glossary.md)). Which of the two it is depends on how blocks lie, down to
the size of cuBLAS's workspace, so of two cards of nearly one size either can have the larger batch.

What these figures leave out, as `--explain` lists it:

{assumptions}
"""


def options(method: str, without_bf16: bool) -> dict[str, Any]:
    """Those of the step: the keyword arguments of `batchfinder.simulate`."""
    how = METHODS[method] | {"gradient_checkpointing": True}
    return how | {"precision": "16-mixed"} if without_bf16 else how


def methods_of(model: str) -> list[str]:
    """Those of a model's rows."""
    return [method for method in METHODS if not (method == "QLoRA" and model in CLASSIFIERS)]


def command(model: str, method: str, gpus: Iterable[str]) -> list[str]:
    """The sweep of a row's cards, which all have bf16 units or all have none."""
    gpus = list(gpus)
    said = ["batchfinder", "sweep", "--model", model, "--seq-len", str(MODELS[model])]
    for gpu in gpus:
        said += ["--gpu", gpu]
    for name, value in options(method, gpus[0] in WITHOUT_BF16).items():
        said += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return said


def batch_sizes(model: str, method: str, gpus: Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """The largest batch sizes by GPU, and what they leave out."""
    called = [sys.executable, "-m", *command(model, method, gpus), "--json", "--no-cache"]
    rows = json.loads(subprocess.run(called, check=True, capture_output=True, text=True).stdout)["rows"]
    left_out = [text for row in rows for text in row["unmodelled"]]
    return {row["gpu"]: row["max_batch_size"] for row in rows}, list(dict.fromkeys(left_out))


def least_bytes(model: str, method: str) -> int:
    """What the allocator reserves for one sample."""
    how = options(method, without_bf16=False)
    one = batchfinder.simulate(model, gpu=FOR_LEAST, seq_len=MODELS[model], max_batch_size=1, seconds=600, **how)
    return one.reserved_bytes(1)


def row(model: str, method: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """A row of the page's tables; cards that it has already are not simulated again."""
    known = known or {
        "schema": SCHEMA,
        "batch_sizes": {},
        "unmodelled": [],
        "one_sample_reserved_bytes": least_bytes(model, method),
    }
    found, left_out = dict(known["batch_sizes"]), list(known["unmodelled"])
    new = [gpu for gpu in GPUS if gpu not in found]
    for gpus in ([gpu for gpu in new if (gpu in WITHOUT_BF16) is without] for without in (True, False)):
        if gpus:
            sizes, said = batch_sizes(model, method, gpus)
            found, left_out = found | sizes, left_out + said
    return {
        "model": model,
        "method": method,
        "seq_len": MODELS[model],
        "one_sample_reserved_bytes": known["one_sample_reserved_bytes"],
        "batch_sizes": {gpu: found[gpu] for gpu in GPUS},
        "unmodelled": list(dict.fromkeys(left_out)),
        "schema": known["schema"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one method, in Markdown."""
    lines = [["model", "tokens", "one sample", *GPUS], ["---", *["---:"] * (2 + len(GPUS))]]
    for each in rows:
        sizes = [str(each["batch_sizes"][gpu]) for gpu in GPUS]
        lines.append([each["model"], str(each["seq_len"]), format_bytes(each["one_sample_reserved_bytes"]), *sizes])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """requirements.md, of the results that lie beside it."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = HEAD.format(date=found["date"], **found["versions"])
    for method in METHODS:
        rows = [each for each in found["rows"] if each["method"] == method]
        shown = shlex.join(command("llama-3.1-8b", method, [FOR_LEAST]))
        text += METHOD.format(method=method, words=WORDS[method], command=shown, table=table(rows))
    older = dict.fromkeys(each["model"] for each in found["rows"] if each["schema"] != SCHEMA)
    text += OLDER.format(models=", ".join(older)) if older else ""
    left_out = dict.fromkeys(text for each in found["rows"] for text in each["unmodelled"])
    return text + AFTER.format(assumptions="\n".join(f"- {each}" for each in left_out))


def main() -> None:
    """Simulate what was asked for, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    rows = {(each["model"], each["method"]): each for each in before}
    for model in [] if asked.page else asked.models:
        for method in methods_of(model):
            rows[model, method] = row(model, method, None if asked.again else rows.get((model, method)))
            print(model, method, rows[model, method]["batch_sizes"], flush=True)
        ordered = [rows[key] for key in ((name, method) for name in MODELS for method in METHODS) if key in rows]
        results = {
            "date": date.today().isoformat(),
            "versions": installed("torch", "transformers"),
            "made_by": "python docs/make_requirements.py",
            "gpus": list(GPUS),
            "options": {method: options(method, without_bf16=False) for method in METHODS},
            "options_without_bf16": {method: options(method, without_bf16=True) for method in METHODS},
            "without_bf16": list(WITHOUT_BF16),
            "rows": ordered,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
