"""What processes tell each other about a training step, as plain data. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

MODES = ("train", "forward", "inference")
"""All stages of training, one forward in eval mode with its graph kept, or one without a graph."""

PRECISION_NAMES = ("fp32", "bf16-mixed", "16-mixed", "bf16-true")
"""`fp32`, and three by Lightning's names; `training.step.PRECISIONS` says what each means."""

OPTIMIZER_NAMES = ("adamw", "adamw-fused", "adam", "sgd", "sgd-momentum", "adafactor")
"""`training.step.OPTIMIZERS` makes each of them."""

ATTENTION_NAMES = ("eager", "sdpa", "flash")
"""`models.pretrained.ATTENTION` says what each is in transformers."""

COMPILED_PARTS = ("model", "layers")
"""What `torch.compile` is given: all of the model, or each of its layers, as torchtitan and accelerate do."""

COMPILED_WORDS = {"model": "compiled", "layers": "layers compiled"}

CHECKPOINTING_NAMES = ("full", "every-2", "every-4", "selective")
"""Of all layers, of every second or fourth (`every-K` for any), or of all but their matrix products and attention."""

PEAK_STEPS = 2
"""Optimizer steps that show the peak: Adam's state appears at the end of the first, so the peak comes in the second."""

PEAK_MICRO_BATCHES = 2
"""Micro-batches that show a step's peak: the second runs with the first one's gradients; a third adds nothing."""

MAX_BATCHES_WITHOUT_STEP = 64
"""Batches after which an optimizer that has not stepped (a GradScaler skips a few steps) is taken not to step."""


@dataclass(frozen=True)
class WorkloadSpec:
    """How to build a workload in another process."""

    builder: str  # `module:function`, which returns a `Workload`
    arguments: dict[str, Any] = field(default_factory=dict)  # its keyword arguments, as JSON values

    @property
    def name(self) -> str:
        """The model as the user wrote it, for messages."""
        return str(self.arguments.get("spec", self.builder))


@dataclass(frozen=True)
class StepConfig:
    """How a step is taken."""

    mode: str = "train"  # one of `MODES`
    precision: str = "fp32"  # one of `PRECISION_NAMES`
    optimizer: str = "adamw"  # one of `OPTIMIZER_NAMES`; not used where the workload brings its own
    micro_batches: int = 1  # forwards and backwards per optimizer step
    flash: bool = False  # whether attention must run as the flash kernel
    steps: int = PEAK_STEPS  # optimizer steps


@dataclass(frozen=True)
class RecordingJob:
    """One recording.

    A workload of its own is built in place of the one that the process was opened with; what that one imported need not
    be imported again.
    """

    config: StepConfig
    capability: tuple[int, int]  # the simulated GPU's compute capability
    batch_size: int  # samples in a micro-batch
    seq_len: int | None  # tokens per sample; None for data of one fixed shape
    workload: WorkloadSpec | None = None

    def __str__(self) -> str:
        size = f"batch size {self.batch_size}"
        return size if self.seq_len is None else f"{size}, sequence length {self.seq_len}"


@dataclass(frozen=True)
class WorkloadFacts:
    """What the recording process says about a workload that it has built.

    Attributes:
        fingerprint: of all in the workload that changes the memory it takes (`models.fingerprint`).
        max_seq_len: the longest sequence its positions allow; None where there is no limit.
        seq_len_unit: what a sequence length counts.
        brings_optimizer: whether it has an optimizer of its own.
        versions: of the libraries that took part.
    """

    fingerprint: str
    max_seq_len: int | None
    seq_len_unit: str
    brings_optimizer: bool
    versions: dict[str, str]


@dataclass(frozen=True)
class StepOptions:
    """How a model is built and stepped, by the six options that every command has for it.

    Attributes:
        mode: one of `MODES`.
        precision: one of `PRECISION_NAMES`.
        optimizer: one of `OPTIMIZER_NAMES`; `its own` where a workload brings one.
        attention: one of `ATTENTION_NAMES`; None for the model's own.
        gradient_checkpointing: whether activations are recomputed in the backward; True for those of every layer, else
            one of `CHECKPOINTING_NAMES`.
        compile: one of `COMPILED_PARTS`; None for a model as it is, compiled or not.
    """

    mode: str = "train"
    precision: str = "fp32"
    optimizer: str = "adamw"
    attention: str | None = None
    gradient_checkpointing: bool | str = False
    compile: str | None = None

    def workload(self, model: str) -> WorkloadSpec:
        """How another process builds a model that was asked for by name, path or factory."""
        return WorkloadSpec(
            builder="batchfinder.models:build_workload",
            arguments={
                "spec": model,
                "attention": self.attention,
                "gradient_checkpointing": self.gradient_checkpointing,
                **({} if self.compile is None else {"compile": self.compile}),
            },
        )

    def step(self, micro_batches: int = 1) -> StepConfig:
        """How a step is taken, by the recording process or on a real device."""
        flash = self.attention == "flash"
        return StepConfig(self.mode, self.precision, self.optimizer, micro_batches, flash)

    def to_json(self) -> dict[str, Any]:
        """All of them, with `default` for the model's own attention."""
        return {**asdict(self), "attention": self.attention or "default"}

    def words(self) -> list[str]:
        """What stands above a table."""
        words = [self.precision, self.optimizer if self.mode == "train" else self.mode]
        words += [f"{self.attention} attention"] if self.attention else []
        if self.gradient_checkpointing:
            how = f"{self.gradient_checkpointing} " if isinstance(self.gradient_checkpointing, str) else ""
            words.append(f"{how}gradient checkpointing")
        return words if self.compile is None else [*words, COMPILED_WORDS[self.compile]]
