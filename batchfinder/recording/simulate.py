"""`simulate`: the largest batch size of a model at hand, or of one by its name, on a GPU that is not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.data.longest_samples import UnreadableData, batches_of
from batchfinder.data.sequence_dim import SequenceDims, find_sequence
from batchfinder.devices import Device, Multiprocessors, device_for, find_gpu
from batchfinder.errors import InvalidValue, OutOfMemory, RecordingFailed
from batchfinder.memory_use.breakdown import OverTime, bytes_over_time
from batchfinder.models.build import build_workload, run_user_code, workload_from_object
from batchfinder.models.catalog import check_model_name
from batchfinder.models.lightning_module import has_training_step, workload_from_training_step
from batchfinder.models.trainer import (
    check_trainer,
    is_config,
    is_trainer,
    mixed_precision_of,
    optimizer_name,
    optimizer_of,
    precision_of,
    prepare_workload,
    workload_from_trainer,
)
from batchfinder.recording import fake_device
from batchfinder.recording.answers import search_simulated
from batchfinder.recording.forked import NotRecordable, record_in_forks
from batchfinder.recording.record_step import record_step
from batchfinder.results import SearchResult, Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.snapshot.training_state import ProcessState, TrainingState
from batchfinder.training.optimizers import OptimizerFactory
from batchfinder.training.spec import (
    LOSS_NAMES,
    OPTIMIZER_NAMES,
    PEAK_MICRO_BATCHES,
    PRECISION_NAMES,
    STRATEGIES,
    StepConfig,
    StepOptions,
    StepWords,
)
from batchfinder.training.step import Workload
from batchfinder.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Trainer, TrainingArguments

MakeBatch = Callable[[int, int | None], Any]
SECONDS = 120.0
"""How long a recording may take."""


class SimulatedTraining:
    """What a training takes on one simulated GPU, and what fits there.

    Attributes:
        gpu: its name.
        seq_len: tokens per sample; None for data of one fixed shape.
        batch_size: the largest that trains; 0 where a single sample does not fit.
        peak_allocated_bytes: `torch.cuda.max_memory_allocated` at that size; None for 0.
        peak_reserved_bytes: `torch.cuda.max_memory_reserved` at that size; None for 0.
        usable_bytes: what the caching allocator can reserve on that GPU.
        seconds: how long the simulation took, with its recordings.
        result: of the search, with each size that was looked at.

    Example:
        >>> simulated = simulate("bert-base", gpu="RTX 4090", seq_len=128, precision="16-mixed")  # doctest: +SKIP
        >>> simulated.batch_size, simulated.on("T4").batch_size, str(simulated.plan(1024))  # doctest: +SKIP
        (440, 265, '341 x 3 = 1023 (1 fewer than the target of 1024)')
    """

    def __init__(
        self, recordings: _Recordings, device: Device, seq_len: int | None, max_batch_size: int | None
    ) -> None:
        start = time.monotonic()
        self._recordings, self._max_batch_size = recordings, max_batch_size
        device = device.among_others(recordings.communicators)
        self.gpu, self.seq_len, self.usable_bytes = device.name, seq_len, device.usable_bytes
        memory = DeviceMemory(device.total_bytes, device.usable_bytes)
        source = recordings.source(device, seq_len)
        self._probe = SimulatedProbe(source, memory, AllocatorSettings.from_environment())
        confirm = recordings.confirm
        self.result: SearchResult = search_simulated(self._probe, Shape(seq_len), max_batch_size, confirm=confirm)
        seen = self.result.measurement if self.result.max_batch_size else None
        self.batch_size = self.result.max_batch_size
        self.peak_allocated_bytes = None if seen is None else seen.peak_allocated_bytes
        self.peak_reserved_bytes = None if seen is None else seen.peak_reserved_bytes
        self.seconds = time.monotonic() - start

    @cached_property
    def timeline(self) -> OverTime:
        """What tensors hold over the recorded steps, in bytes by kind, at the largest size; at 1 where that is 0.

        Raises:
            RecordingFailed: the step cannot be recorded at that size.
        """
        return bytes_over_time(self._probe.trace(max(1, self.batch_size), Shape(self.seq_len)))

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the answers leave out, in words."""
        return self._probe.unmodelled

    def fits(self, batch_size: int) -> bool:
        """Whether a batch size trains.

        Raises:
            RecordingFailed: the step cannot be recorded at that size.
        """
        return self._probe(batch_size, Shape(self.seq_len)).fits

    def reserved_bytes(self, batch_size: int) -> int:
        """The most that the allocator reserves for a batch size where there is room, whether it fits here or not."""
        return self._probe.needed_bytes(batch_size, Shape(self.seq_len))

    def plan(self, target_batch_size: int, num_devices: int = 1) -> AccumulationPlan:
        """Micro-batches that fit, for a target per optimizer step on all devices together.

        Raises:
            OutOfMemory: a single sample does not fit.
        """
        if not self.batch_size:
            takes, has = format_bytes(self.reserved_bytes(1)), format_bytes(self.usable_bytes)
            raise OutOfMemory(1, f"it takes {takes}, and {self.gpu} has {has} for it")
        return plan_accumulation(target_batch_size, self.batch_size, num_devices)

    def on(self, gpu: str) -> SimulatedTraining:
        """The same on another GPU; recorded anew only where its kernels are others.

        Raises:
            UnknownName: no such GPU.
        """
        return SimulatedTraining(self._recordings, device_for(find_gpu(gpu)), self.seq_len, self._max_batch_size)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, sizes in bytes."""
        return {
            "model": self._recordings.name,
            "gpu": self.gpu,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "usable_bytes": self.usable_bytes,
            "seconds": self.seconds,
            "unmodelled": list(self.unmodelled),
        }

    def _rows(self) -> dict[str, str]:
        peak = "-" if self.peak_reserved_bytes is None else format_bytes(self.peak_reserved_bytes)
        length = {} if self.seq_len is None else {"sequence length": str(self.seq_len)}
        return {
            "model": self._recordings.name,
            "GPU": self.gpu,
            **length,
            "largest batch size": str(self.batch_size),
            "peak reserved": f"{peak} of {format_bytes(self.usable_bytes)}",
        }

    def __repr__(self) -> str:
        return f"<{', '.join(f'{name}: {value}' for name, value in self._rows().items())}>"

    def _repr_html_(self) -> str:
        cells = {escape(name): escape(value) for name, value in self._rows().items()}
        return f"<table>{''.join(f'<tr><th>{name}</th><td>{cells[name]}</td></tr>' for name in cells)}</table>"


class _Recordings:
    """Recordings of one workload, each in a fork of this process, so that nothing of it changes here.

    Attributes:
        name: of the model.
        communicators: of NCCL that the GPU takes part in.
        confirm: whether to record the largest size itself, whose batch is made for that.
    """

    def __init__(
        self,
        make: Callable[[], Workload],
        name: str,
        how: StepConfig,
        communicators: int,
        *,
        seconds: float,
        confirm: bool,
        is_built: bool,
    ) -> None:
        self._make, self.name, self._how, self._seconds, self.confirm = make, name, how, seconds, confirm
        self.communicators, self._is_built = communicators, is_built
        self._sources: dict[tuple[tuple[int, int], Multiprocessors, int | None], TraceSource] = {}
        self._recorded: dict[tuple[tuple[int, int], int, int | None], Trace] = {}

    def source(self, device: Device, seq_len: int | None) -> TraceSource:
        """Traces at any batch size on GPUs of a device's kind."""
        capability = device.compute_capability

        def record(batch_size: int) -> Trace:
            mode = fake_device.FakeDeviceMode(allow_non_fake_inputs=True) if self._is_built else None
            with mode or nullcontext():  # what is built here has no need of real weights
                workload = self._make()
            return record_step(workload, self._how, capability, batch_size, seq_len, mode)

        def submit(batch_size: int, _: int | None) -> Future[Trace]:
            size = capability, batch_size, seq_len
            future: Future[Trace] = Future()
            try:
                if size not in self._recorded:
                    made = record_in_forks(record, [batch_size], time.monotonic() + self._seconds)
                    self._recorded[size] = made[batch_size]
                future.set_result(self._recorded[size])
            except NotRecordable as error:
                future.set_exception(
                    RecordingFailed(f"{self.name} cannot be recorded at batch size {batch_size}: {error}")
                )
            return future

        key = capability, device.reduces_on, seq_len
        if key not in self._sources:
            self._sources[key] = TraceSource(submit, [seq_len], reduces_on=device.reduces_on)
        return self._sources[key]


def simulate(
    model: nn.Module | Workload | Trainer | PreTrainedConfig | str,
    *,
    gpu: str = "A100 80GB",
    batches: DataLoader[Any] | MakeBatch | None = None,
    seq_len: int | None = None,
    loss: Callable[[Any, Any], Any] | str | None = None,
    optimizer: str | OptimizerFactory | None = None,
    precision: str | None = None,
    mode: str = "train",
    accumulation: int | None = None,
    training_arguments: TrainingArguments | None = None,
    gpus: int = 1,
    strategy: str | None = None,
    max_batch_size: int | None = None,
    seconds: float = SECONDS,
    **options: Any,
) -> SimulatedTraining:
    """The largest batch size that trains on a GPU that is not here.

    A step of the model is recorded on a device without memory, in forks of this process: the model, the data and all
    random numbers stay as they are, and a class that was defined in a notebook will do. The recording is replayed
    through a model of PyTorch's caching allocator.

    Args:
        model: a LightningModule, whose own `training_step`, optimizer and `train_dataloader` are taken; a transformers
            `Trainer`, whose model, loss, optimizer, data, collator and arguments are taken, but for the batch size; a
            transformers model, or the config of one; any module; a `Workload`; or the name of a model, as
            `batchfinder estimate` takes it, such as `Qwen/Qwen3-4B`.
        gpu: a name of `batchfinder.devices`, such as `RTX 4090`.
        batches: a DataLoader, whose longest samples are taken, or `make_batch(batch_size, seq_len)` that returns a
            batch of CPU tensors; None for the LightningModule's or the Trainer's own, or random token ids and images as
            the model takes.
        seq_len: tokens per sample, for what makes batches of any length, and to cut or stretch data to.
        loss: `loss(output, batch)`, a scalar; None for the output's own. Of a model by its name or config also one of
            `LOSS_NAMES`, such as `liger`.
        optimizer: a name of `OPTIMIZER_NAMES` or another word for one (`training.synonyms`), or what makes one of the
            parameters; None for what the Trainer or the `training_arguments` say, else `adamw`. A LightningModule has
            its own.
        precision: likewise of `PRECISION_NAMES`; None for what the Trainer or the `training_arguments` say, else
            `fp32`. Of a LightningModule that of the Trainer that it will have.
        mode: one of `MODES`.
        accumulation: micro-batches per optimizer step; None for what the Trainer or the `training_arguments` say, else
            1.
        training_arguments: of transformers, whose precision, optimizer, checkpointing, accumulation, Liger kernels and
            compilation are taken; for a transformers model, or one by its name or config.
        gpus: how many train together, each with a batch of its own.
        strategy: how they do, one of `STRATEGIES`.
        max_batch_size: the largest of interest.
        seconds: the most that a recording may take.
        options: of a model by its name or config those of the command line, by their names in Python: `attention`,
            `gradient_checkpointing`, `lora`, `lora_targets`, `quantization`, `packed`, `compile`,
            `optimizer_in_backward`, `tensor_parallel`, `context_parallel`.

    Raises:
        InvalidValue: an argument cannot be used.
        UnknownName: no such GPU or model.
        HubFailed: the config.json of a model on the Hugging Face Hub cannot be had.
        RecordingFailed: the step cannot be recorded; what it raised is in the text.
        UserCodeFailed: the LightningModule's `train_dataloader`, or the data, raised.
    """
    device = device_for(find_gpu(gpu))
    if not hasattr(os, "fork"):
        raise InvalidValue("simulate", os.name, "a system that can fork; batchfinder estimate does without")
    trainer: Any = model if is_trainer(model) else None
    if trainer is not None:
        check_trainer(trainer)
    trains_itself = isinstance(model, nn.Module) and has_training_step(model)
    arguments: Any = training_arguments if trainer is None else trainer.args
    if training_arguments is not None and (trainer is not None or trains_itself or isinstance(model, Workload)):
        expected = f"none beside a {type(model).__name__}, which says itself how it trains"
        raise InvalidValue("training_arguments", type(training_arguments).__name__, expected)
    if arguments is not None:
        asked_for = mixed_precision_of(arguments) if trainer is None else str(trainer.accelerator.mixed_precision)
        precision = precision or precision_of(asked_for)
        accumulation = accumulation or int(arguments.gradient_accumulation_steps)
    if optimizer is None and training_arguments is not None:
        optimizer = optimizer_of(arguments, model if isinstance(model, nn.Module) else None)
    usual = OPTIMIZER_NAMES[0] if trainer is None else optimizer_name(arguments)
    by_name = isinstance(model, str) or is_config(model)
    how = _step_options(
        by_name,
        mode=mode,
        precision=precision or PRECISION_NAMES[0],
        optimizer=optimizer if isinstance(optimizer, str) else usual,
        loss=loss if isinstance(loss, str) else LOSS_NAMES[0],
        gpus=gpus,
        strategy=strategy,
        **options,
    )
    brings_its_own = isinstance(model, Workload) and model.parallelize is not None
    if gpus > 1 and strategy is None and not brings_its_own:
        raise InvalidValue("strategy", None, f"one of {', '.join(STRATEGIES)}: how {gpus} GPUs train together")
    micro_batches = accumulation or 1
    name = model if isinstance(model, str) else type(model if trainer is None else trainer.model).__name__
    if isinstance(model, str):
        check_model_name(model)
    before = ProcessState()
    try:
        make_batch = _batches(model, batches, name, seq_len)
    finally:
        before.restore()
    if not by_name and not trains_itself and trainer is None and make_batch is None:
        workload_from_object(model, name)  # to say what is wrong with it
    mixed = how.precision.endswith("-mixed")

    def make() -> Workload:
        """In a fork, where it may change the model."""
        if by_name:
            made = build_workload(**{**how.workload(name).arguments, "spec": model})
        elif trainer is not None:
            assert make_batch is not None  # of its data
            made = workload_from_trainer(trainer, make_batch, mixed, micro_batches)
        elif isinstance(model, nn.Module) and trains_itself:
            if make_batch is not None:
                model.make_batch = make_batch  # type: ignore[assignment]
            made = workload_from_training_step(model, name, run_user_code)
        elif isinstance(model, nn.Module) and make_batch is not None:
            made = Workload(model, make_batch)
        else:
            made = workload_from_object(model, name)
        if training_arguments is not None:
            made = prepare_workload(made, training_arguments, mixed)
        changed: dict[str, Any] = {"loss": loss} if callable(loss) else {}
        if by_name and make_batch is not None:
            changed["make_batch"] = make_batch
        if callable(optimizer):
            changed["optimizer"] = optimizer
        elif optimizer is not None and trainer is not None:
            changed["optimizer"] = None  # that of the step's options
        return replace(made, **changed)

    from_data = make_batch is not None and not callable(batches)
    recordings = _Recordings(
        make,
        name,
        how.step(min(micro_batches, PEAK_MICRO_BATCHES)),
        how.communicators,
        seconds=seconds,
        confirm=not from_data,  # so many samples may fill the host's memory
        is_built=by_name,
    )
    return SimulatedTraining(recordings, device, seq_len, max_batch_size)


def _step_options(by_name: bool, **given: Any) -> StepOptions:
    """Options that are known, and go together.

    Raises:
        InvalidValue: they do not, or are for models by their name.
    """
    of_names = StepWords.__annotations__.keys() - {"mode", "precision", "optimizer", "strategy"}
    for name, value in given.items():
        if not by_name and name in of_names and not (name == "loss" and value == LOSS_NAMES[0]):
            raise InvalidValue(name, value, "left out but for a model by its name or config")
    return StepOptions.checked(**given)


def _batches(
    model: object, batches: DataLoader[Any] | MakeBatch | None, name: str, seq_len: int | None
) -> MakeBatch | None:
    """What makes batches, of data that is read before anything is recorded; None to leave it to the model."""
    own = getattr(model, "train_dataloader", None)
    if batches is None and is_trainer(model):
        batches = _loader(model)
    elif batches is None and isinstance(model, nn.Module) and has_training_step(model) and callable(own):
        if callable(getattr(model, "make_batch", None)):
            return None
        batches = run_user_code(f"{name}.train_dataloader", own)
    if isinstance(batches, Mapping | list | tuple):
        raise InvalidValue("batches", type(batches).__name__, "one DataLoader, or a function that makes a batch")
    if batches is None or not isinstance(batches, DataLoader):
        return batches
    made = batches_of(batches)

    def read() -> SequenceDims | str | None:
        try:
            made.batch(1)
            return None if seq_len is None else find_sequence(*made.extremes(longest=False))
        except UnreadableData as error:
            expected = "data that can be read more than once, or batches=, a function of (batch_size, seq_len)"
            raise InvalidValue("the data", type(batches.dataset).__name__, expected) from error

    found = run_user_code(f"{name}'s data", read)
    if isinstance(found, str):
        expected = f"None, since it cannot be seen which dimension is the sequence: {found}"
        raise InvalidValue("seq_len", seq_len, expected)
    if found is None:
        return lambda batch_size, _: made.batch(batch_size)
    return lambda batch_size, length: found.stretch(made.batch(batch_size, longest=False), length)


def _loader(trainer: Any) -> Any:
    """The loader that training would read; the trainer is as it was."""
    data = [each for each in (trainer.train_dataset, trainer.eval_dataset) if each is not None]
    before = TrainingState.capture(trainer, left_alone=[torch.Tensor, *data])
    try:
        return run_user_code("get_train_dataloader", trainer.get_train_dataloader)
    finally:
        before.restore()
