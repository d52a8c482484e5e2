"""What processes tell each other about a training step, as plain data. Nothing here imports torch."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypedDict

from batchfinder.errors import InvalidValue
from batchfinder.training.synonyms import one_of
from batchfinder.units import parse_count

MODES = ("train", "forward", "inference")
"""All stages of training, one forward in eval mode with its graph kept, or one without a graph."""

PRECISION_NAMES = ("fp32", "bf16-mixed", "16-mixed", "bf16-true")
"""`fp32`, and three by Lightning's names; `training.step.PRECISIONS` says what each means."""

OPTIMIZER_NAMES = (
    "adamw", "adamw-fused", "adam", "sgd", "sgd-momentum", "adafactor", "adamw-offload", "adamw-8bit",
    "paged-adamw-8bit", "adamw-4bit", "lion", "muon", "schedule-free",
)  # fmt: skip
"""`training.optimizers.OPTIMIZERS` makes each of them."""

QUANTIZATION_NAMES = ("nf4", "nf4-double", "int8")
"""Types of frozen weights; `models.quantization.QUANTIZATIONS` says what each is in bitsandbytes."""

ATTENTION_NAMES = ("eager", "sdpa", "flash")
"""`models.pretrained.ATTENTION` says what each is in transformers."""

CHECKPOINTING_NAMES = ("full", "every-2", "every-4", "selective")
"""Of all layers, of every second or fourth (`every-K` for any), or of all but their matrix products and attention."""
LOSS_NAMES = ("default", "chunked", "liger", "trl")
"""`models.pretrained.replace_loss` says what each is."""

GPUS_PER_NODE = 8
"""The default size of a group of GPUs: of `hsdp`'s shards, `fsdp2-tp`'s tensors and `fsdp2-cp`'s contexts."""


@dataclass(frozen=True)
class Strategy:
    """How several GPUs train one model together."""

    words: str  # as it stands above a table
    shards: bool = True  # whether each GPU holds a part of the parameters, and not all of them
    reshards: bool = True  # whether what was gathered for a forward is given back until the backward
    communicators: int = 1  # of NCCL, in which a GPU takes part
    not_on_cuda_build: str = ""  # why PyTorch's CUDA build does not take its steps; empty where it does


STRATEGIES = {
    "ddp": Strategy("DDP", shards=False, reshards=False),
    "ddp-bucket-view": Strategy("DDP with gradients as views of its buckets", shards=False, reshards=False),
    "fsdp2": Strategy("FSDP2"),
    "fsdp2-shard-grad-op": Strategy("FSDP2 that reshards after the backward alone", reshards=False),
    "hsdp": Strategy("HSDP", communicators=2),
    "fsdp": Strategy("FSDP version 1"),
    "fsdp-shard-grad-op": Strategy("FSDP version 1 that reshards after the backward alone", reshards=False),
    "tp": Strategy(
        "tensor parallelism",
        reshards=False,
        not_on_cuda_build="PyTorch's optimizers refuse split parameters beside whole ones, unless `foreach=False`",
    ),
    "fsdp2-tp": Strategy("FSDP2 and tensor parallelism", communicators=2),
    "fsdp2-cp": Strategy("FSDP2 and context parallelism", communicators=2),
    "zero1": Strategy("ZeRO-1 by DDP", shards=False, reshards=False),
    "zero2": Strategy(
        "DeepSpeed's ZeRO-2", shards=False, reshards=False, not_on_cuda_build="DeepSpeed's own code is imitated"
    ),
}
"""By the names of `--strategy`; `training.strategies` says what each does."""

FSDP2_STRATEGIES = ("fsdp2", "fsdp2-shard-grad-op", "hsdp")
"""Those that are `fully_shard` of each block."""

_FSDP2 = (*FSDP2_STRATEGIES, "fsdp2-tp", "fsdp2-cp")

DDP_STRATEGIES = ("ddp", "ddp-bucket-view", "zero1")
"""Those that are `DistributedDataParallel`."""

FSDP1_STRATEGIES = ("fsdp", "fsdp-shard-grad-op")
"""Those that are `FullyShardedDataParallel` of each block."""

SHARDED_OPTIMIZERS = ("adamw", "adamw-fused", "adam", "sgd", "sgd-momentum")
"""PyTorch's own that look at one element at a time, and so at a shard as at a whole parameter."""
OFFLOADED_OPTIMIZER = "adamw-offload"
"""The one whose states are in the host's memory, beside a copy of the parameters and gradients."""
OWN_OPTIMIZER = "the module's optimizer"
"""What stands for an optimizer that a workload brings."""

COMPILED_PARTS = ("model", "layers")
"""What `torch.compile` is given: all of the model, or each of its layers, as torchtitan and accelerate do."""

COMPILED_WORDS = {"model": "compiled", "layers": "layers compiled"}

FAKE_DEVICE, CUDA_BUILD = RECORDERS = ("fake-device", "cuda-build")
"""What records a step: the fake device, with any PyTorch; or PyTorch's CUDA build on the stub.

`cuda-build==2.6.0` is the CUDA build of that PyTorch, in place of the version that is installed.
"""
_OF_A_VERSION = re.compile(rf"{CUDA_BUILD}==((\d+)\.(\d+)\.\d+)")
_OLDEST_RECORDING = 2, 6
"""The first PyTorch whose CUDA build records a step: the first that is supported."""
AUTO = "auto"
"""What chooses between them."""
_RECORDER_VARIABLE = "BATCHFINDER_RECORDER"


def named_recorder(asked: str) -> str:
    """The recorder that is asked for, or where that is `auto` the one that `BATCHFINDER_RECORDER` names; or `auto`.

    Raises:
        InvalidValue: there is no such recorder.
    """
    named, here = _checked_recorder("recorder", asked), os.environ.get(_RECORDER_VARIABLE)
    return _checked_recorder(_RECORDER_VARIABLE, here) if named == AUTO and here else named


def _checked_recorder(option: str, named: str) -> str:
    of_a_version = _OF_A_VERSION.fullmatch(named)
    if of_a_version is None:
        return one_of(option, named, (AUTO, *RECORDERS, f"{CUDA_BUILD}==2.6.0"))
    if (int(of_a_version[2]), int(of_a_version[3])) < _OLDEST_RECORDING:
        raise InvalidValue(option, named, f"PyTorch {'.'.join(map(str, _OLDEST_RECORDING))} or later")
    return named


def is_cuda_build(recorder: str) -> bool:
    """Whether a recorder is PyTorch's CUDA build, of whichever version."""
    return recorder == CUDA_BUILD or _OF_A_VERSION.fullmatch(recorder) is not None


def torch_of(recorder: str) -> str | None:
    """The PyTorch that a recorder names, such as `2.6.0`; None for the one that is installed."""
    of_a_version = _OF_A_VERSION.fullmatch(recorder)
    return of_a_version[1] if of_a_version else None


def recorder_in_words(recorder: str, version: str) -> str:
    """Such as `CUDA build 2.13.0+cu130`.

    Args:
        version: of the PyTorch that runs there.
    """
    return f"CUDA build {version}" if is_cuda_build(recorder) else f"fake device, PyTorch {version}"


_FIRST = ("mode", "precision", "optimizer", "attention", "gradient_checkpointing")  # options of the first version
_OF_THE_MODEL = ("compile", "loss", "packed", "lora", "lora_targets", "quantization")  # newer, and part of the model

PEAK_STEPS = 2
"""Optimizer steps that show the peak: Adam's state appears at the end of the first, so the peak comes in the second."""

FSDP2_PEAK_STEPS = 3
"""With FSDP2, whose streams have segments of their own: in the third it reserves up to a tenth more than before."""

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
    optimizer_in_backward: bool = False  # whether each parameter is stepped as soon as its gradient is there
    gpus: int = 1  # that train together, each with a micro-batch of its own
    strategy: str | None = None  # of `STRATEGIES`; None for one GPU, or where the workload brings its own
    tensor_parallel: int = GPUS_PER_NODE  # over how many of them `fsdp2-tp` splits layers
    context_parallel: int = GPUS_PER_NODE  # over how many of them `fsdp2-cp` splits sequences
    lengths: tuple[int, ...] = ()  # of one step after the other, the last of all further ones; empty for one length


@dataclass(frozen=True)
class RecordingJob:
    """One recording, or one try.

    A workload of its own is built in place of the one that the process was opened with; what that one imported need not
    be imported again.
    """

    config: StepConfig
    capability: tuple[int, int]  # the simulated GPU's compute capability
    batch_size: int  # samples in a micro-batch
    seq_len: int | None  # tokens per sample; None for data of one fixed shape
    workload: WorkloadSpec | None = None
    card: str = ""  # what the CUDA stub is told of the GPU, where PyTorch's CUDA build records
    tried: bool = False  # whether the step is not recorded but tried, on a card that has the GPU's memory

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
        parallelizes: whether it has calls of its own that spread the model over several GPUs.
        versions: of the libraries that took part.
        warnings: what the user is told of how it was built.
        recorder: what records its steps: one of `RECORDERS`.
        layers: the length of the model's longest list of layers; 0 for a model without.
        side: of the images that the model is made for, in pixels; None where it reads none, or of any side.
    """

    fingerprint: str
    max_seq_len: int | None
    seq_len_unit: str
    brings_optimizer: bool
    versions: dict[str, str]
    warnings: tuple[str, ...] = ()
    parallelizes: bool = False
    recorder: str = FAKE_DEVICE
    layers: int = 0
    side: int | None = None


DEFAULT_IMAGE_SIDE = 224


def seq_lens_of(
    model: str, asked: Sequence[int], facts: WorkloadFacts, usual: Sequence[int] = (128,)
) -> tuple[int | None, ...]:
    """The lengths asked for, which the model must allow; without any, those of the usual ones that it allows, and of
    images the side that it is made for.

    None for samples of one shape; where a length was asked for, a warning says that it makes no difference.

    Raises:
        InvalidValue: a length asked for is beyond the model's positions.
    """
    most = facts.max_seq_len
    if facts.seq_len_unit == "none":
        if asked:
            warnings.warn(f"samples of {model} have one shape: a seq_len makes no difference to them", stacklevel=2)
        return (None,)
    for seq_len in asked:
        if most is not None and seq_len > most:
            raise InvalidValue("seq_len", seq_len, f"at most {most} {facts.seq_len_unit}, the most that {model} allows")
    if asked:
        return tuple(asked)
    if facts.seq_len_unit == "pixels":
        return (facts.side or DEFAULT_IMAGE_SIDE,)
    return tuple(seq_len for seq_len in usual if most is None or seq_len <= most) or (most,)


class StepWords(TypedDict, total=False):
    """What `StepOptions.checked` takes where a function has the number of GPUs as an argument of its own."""

    mode: str
    precision: str
    optimizer: str
    attention: str | None
    gradient_checkpointing: bool | str
    compile: str | None
    loss: str
    packed: bool
    optimizer_in_backward: bool
    lora: int | None
    lora_targets: str | None
    quantization: str | None
    strategy: str | None
    tensor_parallel: int | None
    context_parallel: int | None


_NAMES = {
    "mode": MODES,
    "precision": PRECISION_NAMES,
    "optimizer": OPTIMIZER_NAMES,
    "attention": ATTENTION_NAMES,
    "compile": COMPILED_PARTS,
    "loss": LOSS_NAMES,
    "quantization": QUANTIZATION_NAMES,
    "strategy": tuple(STRATEGIES),
}
"""What an option may be, of those that are names."""
_EVERY = re.compile(r"every-\d+")


@dataclass(frozen=True)
class StepOptions:
    """How a model is built and stepped, by the options that every command has for it.

    Attributes:
        mode: one of `MODES`.
        precision: one of `PRECISION_NAMES`.
        optimizer: one of `OPTIMIZER_NAMES`; `OWN_OPTIMIZER` where a workload brings one.
        attention: one of `ATTENTION_NAMES`; None for the model's own.
        gradient_checkpointing: whether activations are recomputed in the backward; True for those of every layer, else
            one of `CHECKPOINTING_NAMES`.
        compile: one of `COMPILED_PARTS`; None for a model as it is, compiled or not.
        loss: one of `LOSS_NAMES`: how a causal model computes its loss.
        packed: whether samples stand one after the other in one row, without padding.
        optimizer_in_backward: whether each parameter is stepped as soon as its gradient is there.
        lora: the rank of peft's adapters, which then are all that trains; None without them.
        lora_targets: the layers that get one, separated by commas; None for peft's own choice.
        quantization: one of `QUANTIZATION_NAMES`, of the frozen weights; None to leave them.
        gpus: how many train together, each with a batch of its own.
        strategy: one of `STRATEGIES`: how they do; None for one GPU, and for workloads with a `parallelize` of theirs.
        tensor_parallel: over how many of them `fsdp2-tp` splits layers; None for those of a node.
        context_parallel: over how many of them `fsdp2-cp` splits sequences; None likewise.
        recorder: one of `RECORDERS`: what records a step that is simulated.
    """

    mode: str = "train"
    precision: str = "fp32"
    optimizer: str = "adamw"
    attention: str | None = None
    gradient_checkpointing: bool | str = False
    compile: str | None = None
    loss: str = "default"
    packed: bool = False
    optimizer_in_backward: bool = False
    lora: int | None = None
    lora_targets: str | None = None
    quantization: str | None = None
    gpus: int = 1
    strategy: str | None = None
    tensor_parallel: int | None = None
    context_parallel: int | None = None
    recorder: str = FAKE_DEVICE

    @classmethod
    def checked(cls, **given: Any) -> Self:
        """Options by these names, but for the recorder; `training.synonyms` has other words for their values.

        Raises:
            InvalidValue: an option does not exist, its value is invalid, or another option rules it out.
        """
        usual = {each.name: each.default for each in fields(cls) if each.name != "recorder"}
        for name, value in given.items():
            if name not in usual:
                raise InvalidValue(name, value, f"none of this name, but {', '.join(usual)}")
            if value is None:
                given[name] = usual[name]
            elif name in _NAMES:
                given[name] = one_of(name, value, _NAMES[name])
            elif name in ("lora", "gpus", "tensor_parallel", "context_parallel"):
                given[name] = parse_count(value, name)
            elif name in ("packed", "optimizer_in_backward") and not isinstance(value, bool):
                raise InvalidValue(name, value, "True or False")
            elif name == "gradient_checkpointing" and not isinstance(value, bool) and not _EVERY.fullmatch(str(value)):
                how = one_of(name, value, (*CHECKPOINTING_NAMES, "none"))
                given[name] = {"full": True, "none": False}.get(how, how)
        options = cls(**given)
        if options.lora_targets is not None and options.lora is None:
            raise InvalidValue("lora_targets", options.lora_targets, "a --lora rank for them")
        if options.quantization is not None and options.lora is None and options.mode != "inference":
            expected = "a --lora rank with it: quantized weights do not train, and adapters do"
            raise InvalidValue("quantization", options.quantization, expected)
        if options.optimizer_in_backward and options.precision == "16-mixed":
            expected = "another --precision than 16-mixed, whose GradScaler looks at all gradients before a step"
            raise InvalidValue("optimizer_in_backward", True, expected)
        if (refused := options.refused_together()) is not None:
            raise refused
        return options

    def workload(self, model: str) -> WorkloadSpec:
        """How another process builds a model that was asked for by name, path or factory."""
        return WorkloadSpec(
            builder="batchfinder.models:build_workload",
            arguments={
                "spec": model,
                "attention": self.attention,
                "gradient_checkpointing": self.gradient_checkpointing,
                **{name: value for name, value in self.newer().items() if name in _OF_THE_MODEL},
                # It decides on the types of weights that do not train.
                **({} if self.lora is None and self.quantization is None else {"precision": self.precision}),
            },
        )

    def step(self, micro_batches: int = 1) -> StepConfig:
        """How a step is taken, by the recording process or on a real device.

        Raises:
            InvalidValue: steps in the backward leave no gradient for another micro-batch to add to.
        """
        if self.optimizer_in_backward and micro_batches > 1:
            expected = "a step of one micro-batch: gradients are gone when the next one would add to them"
            raise InvalidValue("optimizer_in_backward", True, expected)
        flash = self.attention == "flash" and not self.packed
        return StepConfig(
            self.mode,
            self.precision,
            self.optimizer,
            micro_batches,
            flash,
            steps=FSDP2_PEAK_STEPS if self.strategy in _FSDP2 else PEAK_STEPS,
            optimizer_in_backward=self.optimizer_in_backward,
            gpus=self.gpus,
            strategy=self.strategy,
            tensor_parallel=self.tensor_parallel or GPUS_PER_NODE,
            context_parallel=self.context_parallel or GPUS_PER_NODE,
        )

    def refused_together(self) -> InvalidValue | None:
        """Why these options cannot be had with each other, or on several GPUs; None where they can."""
        if self.optimizer == OFFLOADED_OPTIMIZER and self.mode == "train":
            if self.precision == "16-mixed":
                expected = f"another than 16-mixed with {self.optimizer}: a GradScaler looks at gradients on the GPU"
                return InvalidValue("precision", self.precision, expected)
            if self.strategy is not None:
                expected = f"another with {self.strategy}: torchao's CPUOffloadOptimizer is for one GPU"
                return InvalidValue("optimizer", self.optimizer, expected)
            if self.optimizer_in_backward:
                expected = f"a step after the backward with {self.optimizer}"
                return InvalidValue("optimizer_in_backward", True, expected)
        for name, strategy in (("tensor_parallel", "fsdp2-tp"), ("context_parallel", "fsdp2-cp")):
            split = getattr(self, name)
            if split is not None and self.strategy != strategy:
                return InvalidValue(name, split, f"--strategy {strategy} with it")
        if self.strategy is None:
            return None
        if self.gpus < 2:
            return InvalidValue("gpus", self.gpus, f"at least 2 with {self.strategy}")
        if self.strategy == "hsdp" and (self.gpus % GPUS_PER_NODE or self.gpus == GPUS_PER_NODE):
            whole = f"nodes of {GPUS_PER_NODE} GPUs with hsdp, 2 or more: {2 * GPUS_PER_NODE}, {3 * GPUS_PER_NODE}, ..."
            return InvalidValue("gpus", self.gpus, whole)
        split = self.tensor_parallel or GPUS_PER_NODE
        if self.strategy == "fsdp2-tp" and (split < 2 or self.gpus % split or self.gpus == split):
            fitting = [str(size) for size in range(2, self.gpus // 2 + 1) if self.gpus % size == 0]
            expected = (
                f"{', '.join(fitting)}: {self.gpus} GPUs in two or more groups of that many"
                if fitting
                else (f"4 GPUs or more, in two or more groups of one size; there are {self.gpus}")
            )
            return InvalidValue("tensor_parallel", split, expected)
        if self.strategy == "fsdp2-cp":
            split = self.context_parallel or GPUS_PER_NODE
            if split < 2 or self.gpus % split:
                return InvalidValue("context_parallel", split, f"2 or more, which divides the {self.gpus} GPUs")
            if self.attention == "eager" or self.packed:
                return InvalidValue(
                    "strategy", self.strategy, "sdpa attention with it, and samples that are not packed"
                )
        if self.mode != "train":
            return InvalidValue("mode", self.mode, f"train with {self.strategy}")
        if self.optimizer_in_backward:
            return InvalidValue("optimizer_in_backward", True, f"a step after the backward with {self.strategy}")
        if not STRATEGIES[self.strategy].shards and self.strategy != "zero2":
            return None
        if self.precision == "16-mixed":
            return InvalidValue("precision", self.precision, f"another than 16-mixed with {self.strategy}")
        if self.optimizer not in SHARDED_OPTIMIZERS and self.optimizer != OWN_OPTIMIZER:
            expected = f"one of {', '.join(SHARDED_OPTIMIZERS)} with {self.strategy}"
            return InvalidValue("optimizer", self.optimizer, expected)
        by_layers = self.strategy in FSDP2_STRATEGIES
        if self.compile is not None and not (by_layers and self.compile == "layers"):
            expected = "layers or none" if by_layers else "none"
            return InvalidValue("compile", self.compile, f"{expected} with {self.strategy}: else it is not recorded")
        if self.quantization is not None:
            expected = f"none with {self.strategy}, with which it is not recorded"
            return InvalidValue("quantization", self.quantization, expected)
        return None

    @property
    def communicators(self) -> int:
        """How many communicators of NCCL a GPU takes part in; 0 on one GPU."""
        if self.gpus == 1:
            return 0
        return STRATEGIES[self.strategy].communicators if self.strategy is not None else 1

    def newer(self) -> dict[str, Any]:
        """What was asked for of the options that the first version did not have."""
        usual = asdict(StepOptions())
        given = {n: value for n, value in asdict(self).items() if n not in _FIRST and value != usual[n]}
        how = self.gradient_checkpointing
        return {"gradient_checkpointing": how, **given} if isinstance(how, str) else given

    def to_json(self) -> dict[str, Any]:
        """All of them, with `default` for the model's own attention; the newer ones only where they are used."""
        settings = {name: getattr(self, name) for name in _FIRST}
        return {**settings, "attention": self.attention or "default", **self.newer()}

    def words(self) -> list[str]:
        """What stands above a table."""
        words = [self.precision, self.optimizer if self.mode == "train" else self.mode]
        words += ["stepped in the backward"] if self.optimizer_in_backward and self.mode == "train" else []
        if self.lora is not None:
            words.append(f"LoRA of rank {self.lora}" + (f" on {self.lora_targets}" if self.lora_targets else ""))
        words += [f"{self.quantization} weights"] if self.quantization else []
        words += [f"{self.attention} attention"] if self.attention else []
        if self.gradient_checkpointing:
            how = f"{self.gradient_checkpointing} " if isinstance(self.gradient_checkpointing, str) else ""
            words.append(f"{how}gradient checkpointing")
        words += [] if self.loss == "default" else [f"{self.loss} loss"]
        words += ["packed"] if self.packed else []
        if self.gpus > 1:
            how = STRATEGIES[self.strategy].words if self.strategy is not None else "the model's own sharding"
            if self.strategy in ("fsdp2-tp", "fsdp2-cp"):
                split = self.tensor_parallel if self.strategy == "fsdp2-tp" else self.context_parallel
                how += f" of {split or GPUS_PER_NODE}"
            words.append(f"{how} on {self.gpus} GPUs")
        return words if self.compile is None else [*words, COMPILED_WORDS[self.compile]]
