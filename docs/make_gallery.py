"""Writes gallery.md by running its commands: `python docs/make_gallery.py`. It takes a few minutes, and no GPU."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("gallery.md")
ROOT = PAGE.parents[1]


class Case(NamedTuple):
    """What somebody wants to know, what they type, and what the answer means."""

    title: str
    words: str
    commands: tuple[str, ...]


QLORA = (
    "batchfinder sweep --model llama-3.1-8b --gpu rtx-4090 --seq-len 2048 --lora 16 --quantization nf4 "
    "--precision bf16-mixed --gradient-checkpointing"
)
PLAN = "batchfinder plan --model llama-3.1-8b --gpu rtx-4090 --seq-len 2048 --target-batch-size 16"
CASES = (
    Case(
        "An 8B model on a card of 24 GB",
        "QLoRA: 4-bit weights, adapters of rank 16, activation checkpointing. The peak is at the logits, so the "
        "chunked loss makes room for larger micro-batches.",
        (QLORA, f"{QLORA} --loss chunked"),
    ),
    Case(
        "The same model, whole, on that card",
        "Does not fit, and `plan` says what does: the mildest change first, and two runners-up.",
        (f"{PLAN} --allow lora --allow qlora",),
    ),
    Case(
        "ViT on an RTX 3090",
        "For images, `--seq-len` is the side in pixels.",
        ("batchfinder sweep --model vit-base --gpu rtx-3090 --seq-len 224 --seq-len 384 --precision bf16-mixed",),
    ),
    Case(
        "A 70B model on 64 H100",
        "Any model of transformers is built from its `config.json`; this one is Llama 3.1 70B's. FSDP2 is PyTorch's "
        "own, recorded for one rank of 64.",
        (
            "batchfinder sweep --model docs/examples/llama-70b/config.json --gpu h100 --gpus 64 --strategy fsdp2 "
            "--seq-len 4096 --precision bf16-mixed --gradient-checkpointing",
        ),
    ),
)
HEAD = """\
# Gallery

Questions that people ask, and what batchfinder says. `python docs/make_gallery.py` ran these commands and wrote this
page. All of it is simulated, without a GPU.
"""


def output_of(command: str, cache: Path) -> str:
    """What the command prints in a clone."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "BATCHFINDER_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rstrip()


def main() -> None:
    """Run all commands and write the page."""
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            parts.append(f"\n## {case.title}\n\n{case.words}\n")
            parts += [f"\n```console\n$ {each}\n{output_of(each, Path(folder))}\n```\n" for each in case.commands]
    PAGE.write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
