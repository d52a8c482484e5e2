"""Writes gallery.md by running its commands: `python docs/make_gallery.py`. It takes a few minutes, and no GPU."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("gallery.md")
os.environ.setdefault("BATCHFINDER_RECORDER", "fake-device")  # as where no CUDA build is installed

ROOT = PAGE.parents[1]


class Case(NamedTuple):
    """What somebody wants to know, what they type, and what the answer means."""

    title: str
    words: str
    commands: tuple[str, ...] = ()
    code: str = ""  # of a notebook's cell, whose last line is shown
    copied: str = ""  # of a file in the repository, into the folder in which the commands run
    notebook: str = ""  # whose cells are run, but for the one that installs


QLORA = (
    "batchfinder sweep --model llama-3.1-8b --gpu rtx-4090 --seq-len 2048 --lora 16 --quantization nf4 "
    "--precision bf16-mixed --gradient-checkpointing"
)
PLAN = "batchfinder plan --model llama-3.1-8b --gpu rtx-4090 --seq-len 2048 --target-batch-size 16"
NET = """\
import pytorch_lightning as pl
import torch
from torch import nn

from batchfinder import simulate


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 10))

    def training_step(self, batch, batch_idx):
        features, labels = batch
        return nn.functional.cross_entropy(self.body(features), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(512, 4096), torch.randint(10, (512,)))
        return torch.utils.data.DataLoader(data, batch_size=32)


simulated = simulate(Net(), gpu="RTX 4090", precision="bf16-mixed")
simulated, simulated.on("T4").batch_size, str(simulated.plan(1 << 20))
"""
CASES = (
    Case(
        "A LightningModule in a notebook",
        "As it is, with its own step, optimizer and data; it is left as it was.",
        code=NET,
    ),
    Case(
        "The notebook for Colab, without a GPU",
        "Its cells, one after the other ([notebook](notebooks/colab.ipynb)). In a runtime with a T4 the check compares "
        "its prediction with the card, and the fit finds the size there.",
        notebook="docs/notebooks/colab.ipynb",
    ),
    Case(
        "A 7B model on 24 GB, from an axolotl config",
        "The config that trains it one sample at a time, and the sizes put back into it; the rest of the file stays as "
        "it was ([The config that you have](configs.md)).",
        ('batchfinder sweep --from qlora.yml --gpu "RTX 4090" --write',),
        copied="docs/examples/axolotl/qlora.yml",
    ),
    Case(
        "8B pre-training, and what it costs by the hour",
        "FSDP2 over 8 to 64 GPUs of two kinds of instances; prices are dated, and `--prices` takes yours.",
        (
            "batchfinder sweep llama-3.1-8b --instance p4d.24xlarge,p5.48xlarge --strategy fsdp2 --gpus 8,16,64 "
            "--seq-len 4096 --precision bf16-mixed --gradient-checkpointing --target-batch-size 512",
        ),
    ),
    Case(
        "What a million tokens cost",
        "At a share of the GPUs' peak FLOP/s that you state, since a simulated step takes no time "
        "([Devices](devices.md) has the formula).",
        (
            "batchfinder sweep qwen2.5-0.5b --seq-len 2048 --bf16 --instance g6.xlarge,g6e.xlarge,p4d.24xlarge "
            "--mfu 40%",
        ),
    ),
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


def output_of(words: list[str], cache: Path, folder: Path) -> str:
    """What a Python program prints that runs in a folder; of a command also what it says beside its answer."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "BATCHFINDER_CACHE": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("batchfinder: ")]
    return "\n".join([*said, done.stdout.rstrip()])


CELLS = """
import ast, contextlib, io, json, sys
namespace, printed = {"__name__": "__main__"}, []
for source in json.load(sys.stdin):
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
        if value is not None:
            print(repr(value))
    printed.append(said.getvalue())
print(json.dumps(printed))
"""
"""Runs cells as a notebook does, which shows the value of a cell's last line."""


def run_cells(notebook: Path, cache: Path, folder: Path) -> list[tuple[str, str]]:
    """A notebook's cells of code but for the first, which installs; each with what it shows where there is no GPU.

    Raises:
        subprocess.CalledProcessError: a cell failed.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    _, *sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", CELLS],
        input=json.dumps(sources),
        cwd=folder,
        env={**os.environ, "BATCHFINDER_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return list(zip(sources, json.loads(done.stdout.splitlines()[-1]), strict=True))


def shown(code: str) -> str:
    """A cell that prints the value of its last line, as a notebook does."""
    *lines, last = code.splitlines()
    return "\n".join([*lines, f"print({last}, sep='\\n')"])


def main() -> None:
    """Run all commands and write the page."""
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name) / "cache"
        for case in CASES:
            parts.append(f"\n## {case.title}\n\n{case.words}\n")
            folder = ROOT
            if case.copied:
                folder = Path(name)
                shutil.copy(ROOT / case.copied, folder)
            if case.code:
                printed = output_of(["-c", shown(case.code)], cache, ROOT)
                parts.append(f"\n```python\n{case.code}```\n\n```\n{printed}\n```\n")
            for source, said in run_cells(ROOT / case.notebook, cache, folder) if case.notebook else ():
                parts.append(f"\n```python\n{source.rstrip()}\n```\n")
                parts.append(f"\n```\n{said.rstrip()}\n```\n" if said.strip() else "")
            for command in case.commands:
                printed = output_of(["-m", *shlex.split(command)], cache, folder)
                parts.append(f"\n```console\n$ {command}\n{printed}\n```\n")
    PAGE.write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
