"""How exact the recorders are: the peaks of a training step that they record, beside those of the step itself.

A cell is a model of real width and few layers with its options on a card. Its step is taken on PyTorch's CUDA build on
the stub, where `torch.cuda.max_memory_allocated` and `max_memory_reserved` say what it takes, and recorded by the CUDA
build and by the fake device, each replayed through the allocator model on the same card. Needs `batchfinder stub
install` and peft. Run: `python benchmarks/exactness.py`; cells that the result file has are kept, so that a run that
was stopped goes on; `--again` takes them again, `--again fake-device` that recorder's figures alone, and `--only WORD`
those whose name has the word.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # import from the repository

from batchfinder.devices import device_for, find_gpu  # noqa: E402
from batchfinder.errors import BatchFinderError  # noqa: E402
from batchfinder.recording.simulation import Simulation  # noqa: E402
from batchfinder.results import Shape  # noqa: E402
from batchfinder.simulator.steady_state import SimulatedProbe  # noqa: E402
from batchfinder.testing import CudaStub  # noqa: E402
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE, StepConfig, StepOptions, WorkloadSpec  # noqa: E402

RESULT = ROOT / f"benchmarks/results/exactness-{os.cpu_count()}-cores.json"
RECORDERS = (CUDA_BUILD, FAKE_DEVICE)
AT_ONCE = 12
"""Cells that one process on the stub takes, each in a fork."""
SECONDS = 300
"""After which a fork is ended."""

TEXT: dict[str, tuple[int, dict[str, Any]]] = {
    "bert": (128, {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 3}),
    "roberta": (
        128,
        {
            "model_type": "roberta",
            "architectures": ["RobertaForMaskedLM"],
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "num_hidden_layers": 3,
            "pad_token_id": 1,
        },
    ),
    "distilbert": (
        128,
        {"model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"], "n_layers": 3},
    ),
    "gpt2": (128, {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 3}),
    "opt": (
        128,
        {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "num_hidden_layers": 3,
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_attention_heads": 12,
            "word_embed_proj_dim": 768,
        },
    ),
    "llama": (
        256,
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": (
        256,
        {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 3,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        128,
        {
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "sliding_window": 64,
        },
    ),
    "gemma": (
        128,
        {
            "model_type": "gemma",
            "architectures": ["GemmaForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 4096,
        },
    ),
    "mixtral": (
        128,
        {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 8000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "max_position_embeddings": 2048,
            "sliding_window": None,
        },
    ),
    "t5": (
        96,
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "num_layers": 3,
            "num_decoder_layers": 3,
            "d_model": 512,
            "d_ff": 2048,
            "num_heads": 8,
            "decoder_start_token_id": 0,
        },
    ),
}
"""Language models: the length of a sample, and their config.json."""

IMAGES: dict[str, dict[str, Any]] = {
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 3},
    "resnet50": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]},
    "convnext": {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"]},
    "swin": {"model_type": "swin", "architectures": ["SwinForImageClassification"]},
    "mobilenet": {"model_type": "mobilenet_v2", "architectures": ["MobileNetV2ForImageClassification"]},
    "segformer": {"model_type": "segformer", "architectures": ["SegformerForImageClassification"]},
}
"""Models of images of 224 by 224 pixels, whole but for ViT."""
SIDE = 224
NEVER_CHECKPOINTED = ("distilbert", "mobilenet", "resnet50", "convnext", "swin", "segformer")
"""Which transformers cannot checkpoint, or which are small in memory."""

CONVOLUTIONS = ("resnet50", "convnext", "mobilenet")
PRECISIONS = ("fp32", "bf16-mixed", "16-mixed", "bf16-true")
OPTIMIZERS = ("adamw", "adamw-fused", "sgd-momentum", "adafactor")
BATCH_SIZES = (1, 3, 8)
CARDS = ("A100 80GB", "T4", "H100")


@dataclass(frozen=True)
class Cell:
    """One step: a model with its options on a card; `allocator` is what PYTORCH_CUDA_ALLOC_CONF has."""

    model: str
    gpu: str
    options: StepOptions
    batch_size: int
    seq_len: int
    micro_batches: int = 1

    @property
    def name(self) -> str:
        """Unlike any other's."""
        accumulated = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.model} x {self.batch_size} on {self.gpu}: {', '.join(self.options.words())}{accumulated}"

    @property
    def step(self) -> StepConfig:
        """How its steps are taken."""
        return self.options.step(self.micro_batches)


def cells() -> Iterator[Cell]:
    """A tour in which each pair of settings comes up somewhere; not all combinations."""
    sizes = {**{model: length for model, (length, _) in TEXT.items()}, **dict.fromkeys(IMAGES, SIDE)}
    for i, model in enumerate(sizes):
        attentions = {"gemma2": ("eager",)}.get(model, ("sdpa", "eager")) if model not in CONVOLUTIONS else (None,)
        for j, gpu in enumerate(CARDS):
            rounds = 3 if gpu == "A100 80GB" else 2
            for k, (precision, turn) in enumerate(itertools.product(PRECISIONS, range(rounds))):
                number = i + j + k + turn
                options = StepOptions(
                    precision=precision,
                    optimizer=OPTIMIZERS[number % 4],
                    attention=attentions[number % len(attentions)],
                    gradient_checkpointing=model not in NEVER_CHECKPOINTED and turn == rounds - 1,
                )
                yield Cell(model, gpu, options, BATCH_SIZES[(number + j) % 3], sizes[model])
    for model, gpu in itertools.product(("llama", "qwen2", "gpt2", "bert"), ("A100 80GB", "T4")):
        adapters = StepOptions(precision="16-mixed", attention="sdpa", lora=16, gradient_checkpointing=gpu == "T4")
        yield Cell(model, gpu, adapters, 3, sizes[model])
        yield Cell(model, gpu, replace(adapters, lora=None), 3, sizes[model], micro_batches=2)
    for model in ("llama", "qwen2", "gpt2"):
        yield Cell(model, "A100 80GB", StepOptions(precision="bf16-mixed", loss="chunked"), 3, sizes[model])
        yield Cell(model, "H100", StepOptions(precision="bf16-true", packed=True), 3, sizes[model])
    for model, (gpu, quantization) in itertools.product(
        ("llama", "qwen2", "gpt2"), (("A100 80GB", "nf4"), ("T4", "nf4-double"))
    ):
        adapters = StepOptions(precision="16-mixed", lora=16, quantization=quantization)
        yield Cell(model, gpu, adapters, 8, sizes[model])
    for model, optimizer in itertools.product(("bert", "llama"), ("adamw-8bit", "paged-adamw-8bit", "muon")):
        yield Cell(model, "A100 80GB", StepOptions(precision="bf16-mixed", optimizer=optimizer), 3, sizes[model])
    # Whole models at batches as they are trained.
    for model, size, length in (("gpt2", 24, 512), ("bert", 64, 512), ("llama", 8, 2048), ("vit", 128, SIDE)):
        for precision in ("fp32", "bf16-mixed"):
            yield Cell(model, "A100 80GB", StepOptions(precision=precision), size, length)


def spec_of(cell: Cell, folder: Path) -> WorkloadSpec:
    """How its workload is built: from a config.json in the folder."""
    path = folder / f"{cell.model}.json"
    if not path.exists():
        path.write_text(json.dumps(TEXT[cell.model][1] if cell.model in TEXT else IMAGES[cell.model]))
    return cell.options.workload(str(path))


def taken(steps: list[tuple[WorkloadSpec, StepConfig, int, int]]) -> list[Any]:
    """On the stub: the peaks of each step, allocated and reserved, or what went wrong."""
    import transformers

    transformers.logging.set_verbosity_error()
    return [_in_fork(lambda one=one: _peaks(*one)) for one in steps]


def _peaks(spec: WorkloadSpec, config: StepConfig, batch_size: int, seq_len: int) -> list[int]:
    import torch

    from batchfinder.models import build_workload
    from batchfinder.training.step import Step

    torch.set_num_threads(1)
    workload = build_workload(**spec.arguments)
    device = torch.device("cuda", 0)
    step = Step(workload, config, device)
    workload.model.to(device, step.weights_dtype)
    step.run(batch_size, seq_len)
    if retries := torch.cuda.memory_stats()["num_alloc_retries"]:
        raise RuntimeError(f"the card is too small: {retries} retries")
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def _in_fork(work: Callable[[], Any]) -> Any:
    """What a function returns in a process of its own; a text where it fails."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        signal.alarm(SECONDS)
        try:
            result: Any = work()
        except BaseException as error:
            result = _in_a_line(error)
        with os.fdopen(write, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    _, status = os.waitpid(process, 0)
    return json.loads(said) if said else f"it ended with {os.waitstatus_to_exitcode(status)}"


def _in_a_line(error: BaseException) -> str:
    """What went wrong, without the traceback and the files of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "/" not in line]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]


def recorded(probe: SimulatedProbe, cell: Cell) -> Any:
    """The peaks of a recording on the cell's card, allocated and reserved; a text where it fails."""
    try:
        timeline = probe.steady_state(cell.batch_size, Shape(cell.seq_len), exact=True).timeline
    except BatchFinderError as error:
        return _in_a_line(error)
    return [timeline.max_allocated_bytes, timeline.max_reserved_bytes]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each recorder and figure: how many are equal to the byte, and how far off the others are, in percent."""
    found: dict[str, Any] = {"cells": len(rows), "taken": sum(isinstance(row["real"], list) for row in rows)}
    for recorder, (place, figure) in itertools.product(RECORDERS, enumerate(("allocated", "reserved"))):
        known = [row for row in rows if isinstance(row["real"], list) and isinstance(row[recorder], list)]
        off = [100 * (row[recorder][place] / row["real"][place] - 1) for row in known]
        if off:
            found[f"{recorder}, {figure}"] = {
                "cells": len(off),
                "equal to the byte": sum(each == 0 for each in off),
                "within 0.5 %": sum(abs(each) <= 0.5 for each in off),
                "median": round(statistics.median(map(abs, off)), 4),
                "lowest": round(min(off), 2),
                "highest": round(max(off), 2),
            }
    return found


def record_again(recorder: str, rows: list[tuple[Cell, dict[str, Any]]], source: str) -> None:
    """Put a recorder's figures of today into rows that were taken before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Simulation(spec_of(rows[0][0], folder), rows[0][0].step, recorder) as opened:
            probes = []
            for cell, _ in rows:
                simulation = opened.with_spec(spec_of(cell, folder), cell.step)
                probes.append(simulation.probe(device_for(find_gpu(cell.gpu)), [cell.seq_len]))
                probes[-1].traces.ask(cell.batch_size, cell.seq_len)
            for probe, (cell, row) in zip(probes, rows, strict=True):
                row |= {recorder: recorded(probe, cell), f"source of {recorder}": source}
                print(json.dumps({"cell": cell.name, "real": row["real"], recorder: row[recorder]}), flush=True)


def main() -> None:
    """Take the cells, card by card, and print a line for each, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="cells whose name has it; nothing is written")
    again = "take cells again that the result file has; of one recorder its figures alone"
    parser.add_argument("--again", nargs="?", choices=RECORDERS, const="all", help=again)
    asked = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if RESULT.exists() and asked.again != "all" and not asked.only:
        rows = {row["cell"]: row for row in json.loads(RESULT.read_text())["rows"]}
    usual, by_name = StepOptions(), {cell.name: cell for cell in cells()}
    todo = [cell for name, cell in by_name.items() if name not in rows and asked.only in name]
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    source = subprocess.run(described, capture_output=True, text=True).stdout.strip()

    def write() -> None:
        ordered = [rows[name] for name in by_name if name in rows]
        result = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
            "command": "python benchmarks/exactness.py",
            "summary": summary(ordered),
            "rows": ordered,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")

    if asked.again in RECORDERS:
        record_again(asked.again, [(by_name[name], row) for name, row in rows.items() if name in by_name], source)
        write()
        todo = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = todo[0] if todo else next(cells())
        opened = {each: Simulation(spec_of(first, folder), first.step, each) for each in RECORDERS}
        try:
            for gpu in CARDS:
                of_card = [cell for cell in todo if cell.gpu == gpu]
                for start in range(0, len(of_card), AT_ONCE):
                    some = of_card[start : start + AT_ONCE]
                    begun = time.monotonic()
                    steps = [(spec_of(cell, folder), cell.step, cell.batch_size, cell.seq_len) for cell in some]
                    device, probes = device_for(find_gpu(gpu)), {}
                    for (cell, (spec, config, *size)), by in itertools.product(
                        zip(some, steps, strict=True), RECORDERS
                    ):
                        probe = opened[by].with_spec(spec, config).probe(device, [cell.seq_len])
                        probe.traces.ask(*size)
                        probes[cell, by] = probe
                    real = CudaStub(gpu=gpu, timeout=SECONDS * AT_ONCE).run(taken, steps).result
                    for cell, seen in zip(some, real, strict=True):
                        row = {
                            "cell": cell.name,
                            "model": cell.model,
                            "gpu": cell.gpu,
                            "batch_size": cell.batch_size,
                            "seq_len": cell.seq_len,
                            "micro_batches": cell.micro_batches,
                            "options": {n: v for n, v in asdict(cell.options).items() if v != getattr(usual, n)},
                            "source": source,
                            "real": seen,
                            **{by: recorded(probes[cell, by], cell) for by in RECORDERS},
                        }
                        rows[cell.name] = row
                        print(json.dumps({key: row[key] for key in ("cell", "real", *RECORDERS)}), flush=True)
                    print(f"{len(some)} cells in {time.monotonic() - begun:.0f} s", flush=True)
                    if not asked.only:
                        write()
        finally:
            for each in opened.values():
                each.close()
    chosen = [row for name, row in rows.items() if asked.only in name]
    print(json.dumps(summary(chosen), indent=1))


if __name__ == "__main__":
    main()
