"""What `cuda_check.py` measures: training steps, budgets for the largest batch, and trainers for the callback."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB, MIB

BUILDER = "batchfinder.models:build_workload"
TINY = str(Path(__file__).parent / "bert-tiny")


@dataclass(frozen=True)
class Cell:
    """One training step.

    Attributes:
        model: a name in the catalog of models, or a folder with a config.json.
        seq_len: tokens per sample, or the side of an image in pixels.
        batch_size: samples in the micro-batch.
        precision: a name in `batchfinder.training.step`, as is `optimizer`.
        attention: `eager`, `sdpa`, or None for a model without a choice.
        checkpointing: gradient checkpointing.
    """

    model: str
    seq_len: int
    batch_size: int
    precision: str = "fp32"
    optimizer: str = "adamw"
    attention: str | None = "sdpa"
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """As reports show it and `--only` matches it."""
        model = "bert-tiny" if self.stand_in else self.model
        parts = [model, f"{self.batch_size}x{self.seq_len}", self.precision]
        parts += [self.optimizer, self.attention or "", "checkpointing" if self.checkpointing else ""]
        return " ".join(part for part in parts if part)

    @property
    def stand_in(self) -> bool:
        """Whether it is for dry runs: small enough to train on a CPU."""
        return self.model == TINY

    def spec(self) -> WorkloadSpec:
        """The model, for a child process to build."""
        arguments = {"attention": self.attention, "gradient_checkpointing": self.checkpointing}
        return WorkloadSpec(BUILDER, {"spec": self.model, **arguments})

    def step_config(self) -> StepConfig:
        """How the step is taken."""
        return StepConfig(precision=self.precision, optimizer=self.optimizer)


@dataclass(frozen=True)
class Ladder:
    """One training step whose largest batch is searched under several budgets.

    Attributes:
        cell: the step; its batch size is not used.
        budgets: bytes that the allocator may reserve.
    """

    cell: Cell
    budgets: tuple[int, ...]

    @property
    def name(self) -> str:
        """As reports show it and `--only` matches it."""
        shown = self.cell.name.split()
        return " ".join([shown[0], str(self.cell.seq_len), *shown[2:]])


# By model and length; the least telling come last, as they are cut when the time is over.
_STEPS: dict[tuple[str, int], list[tuple[Any, ...]]] = {
    ("bert-base", 128): [
        (64, "fp32", "adamw", "sdpa"),
        (64, "fp32", "adamw", "eager"),
        (64, "bf16-mixed", "adamw", "sdpa"),
        (64, "16-mixed", "adamw", "sdpa"),
        (64, "fp32", "adamw-fused", "sdpa"),
        (64, "fp32", "sgd", "sdpa"),
        (128, "fp32", "adamw", "sdpa", True),
        (128, "bf16-mixed", "adamw", "eager", True),
    ],
    ("gpt2-medium", 512): [
        (8, "fp32", "adamw", "sdpa"),
        (8, "bf16-mixed", "adamw", "sdpa"),
        (8, "bf16-mixed", "adamw", "eager"),
        (8, "16-mixed", "adamw-fused", "sdpa"),
        (8, "fp32", "sgd", "eager"),
        (16, "bf16-mixed", "adamw", "sdpa", True),
    ],
    ("resnet50", 224): [
        (64, "fp32", "sgd-momentum", None),
        (64, "bf16-mixed", "adamw", None),
        (64, "16-mixed", "sgd", None),
        (64, "fp32", "adamw-fused", None),
    ],
    ("llama-3.2-1b", 512): [
        (4, "bf16-mixed", "adamw", "sdpa"),
        (8, "bf16-mixed", "adamw-fused", "sdpa", True),
        (2, "fp32", "sgd", "eager"),
        (4, "bf16-true", "adamw", "sdpa"),
    ],
    ("bert-large", 128): [
        (32, "fp32", "adamw", "sdpa"),
        (32, "bf16-mixed", "adamw-fused", "sdpa", True),
        (32, "16-mixed", "adamw", "eager"),
        (32, "fp32", "sgd", "eager"),
    ],
    ("vit-base", 224): [
        (64, "fp32", "adamw", "sdpa"),
        (64, "bf16-mixed", "adamw", "eager"),
        (64, "16-mixed", "adamw-fused", "sdpa"),
        (128, "bf16-mixed", "sgd", "sdpa", True),
    ],
}

CELLS = tuple(Cell(*step, *row) for step, rows in _STEPS.items() for row in rows)

BUDGETS = (int(11.17 * GIB), 12 * GIB, 16 * GIB, 24 * GIB)

LADDERS = (
    Ladder(Cell("gpt2-medium", 512, 1, "bf16-mixed"), BUDGETS),
    Ladder(Cell("bert-base", 128, 1, "fp32"), BUDGETS),
    Ladder(Cell("resnet50", 224, 1, "fp32", "sgd-momentum", None), BUDGETS),
)

TRACED = (
    Cell("bert-base", 128, 16, "fp32", "adamw", "sdpa"),
    Cell("resnet50", 224, 16, "fp32", "sgd-momentum", None),
    Cell("gpt2-medium", 512, 4, "bf16-mixed", "adamw", "sdpa"),
    Cell("bert-base", 128, 16, "16-mixed", "adamw-fused", "eager", True),
    Cell("vit-base", 224, 16, "bf16-mixed", "adamw", "sdpa"),
)

# For a dry run: small enough to train on a CPU.
STAND_IN_CELLS = (
    Cell(TINY, 32, 8, "fp32", "sgd", "eager"),
    Cell(TINY, 32, 8, "bf16-mixed", "adamw-fused", "eager", True),
)
STAND_IN_LADDERS = (Ladder(Cell(TINY, 128, 1, "fp32", "sgd", "eager"), (24 * MIB,)),)
STAND_IN_TRACED = (Cell(TINY, 32, 4, "fp32", "sgd", "eager"),)


CALLBACK_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Which `torch.use_deterministic_algorithms` asks for on CUDA."""

_NETS = {
    "transformer": {"rows": 4096, "seq_len": 128, "width": 256},
    "conv net": {"rows": 4096, "side": 64, "width": 64},
}
_TINY_NETS = {"transformer": {"rows": 64, "seq_len": 8, "width": 16}, "conv net": {"rows": 64, "side": 8, "width": 4}}

CALLBACK_CASES: tuple[dict[str, Any], ...] = tuple(
    {"net": net, "precision": precision, "accelerator": "gpu", "size": size, "budget_bytes": 2 * GIB}
    for precision in ("32-true", "16-mixed", "bf16-mixed")
    for net, size in _NETS.items()
)
"""Arguments of `callback.compare`."""

STAND_IN_CALLBACK_CASES: tuple[dict[str, Any], ...] = tuple(
    {"net": net, "precision": "32-true", "accelerator": "cpu", "size": size, "max_batch_size": 8}
    for net, size in _TINY_NETS.items()
)
