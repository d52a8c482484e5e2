"""`simulate`: the largest batch size of a model at hand, or of one by its name, on a GPU that is not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from html import escape
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.data.longest_samples import batches_of
from batchfinder.devices import Device, device_for, find_gpu
from batchfinder.errors import InvalidValue, OutOfMemory, RecordingFailed
from batchfinder.models.build import build_workload, run_user_code, workload_from_object
from batchfinder.models.catalog import check_model_name
from batchfinder.models.lightning_module import has_training_step, workload_from_training_step
from batchfinder.recording import fake_device
from batchfinder.recording.forked import NotRecordable, record_in_forks
from batchfinder.recording.record_step import record_step
from batchfinder.recording.simulation import search_simulated
from batchfinder.results import SearchResult, Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.snapshot.training_state import ProcessState
from batchfinder.training.optimizers import OptimizerFactory
from batchfinder.training.spec import MODES, OPTIMIZER_NAMES, PEAK_MICRO_BATCHES, PRECISION_NAMES, StepConfig
from batchfinder.training.step import Workload
from batchfinder.training.synonyms import one_of
from batchfinder.units import format_bytes

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
        result: of the search, with each size that was looked at.

    Example:
        >>> simulated = simulate("bert-base", gpu="RTX 4090", seq_len=128, precision="16-mixed")  # doctest: +SKIP
        >>> simulated.batch_size, simulated.on("T4").batch_size, str(simulated.plan(1024))  # doctest: +SKIP
        (440, 265, '341 x 3 = 1023 (1 fewer than the target of 1024)')
    """

    def __init__(
        self, recordings: _Recordings, device: Device, seq_len: int | None, max_batch_size: int | None
    ) -> None:
        self._recordings, self._max_batch_size = recordings, max_batch_size
        self.gpu, self.seq_len, self.usable_bytes = device.name, seq_len, device.usable_bytes
        memory = DeviceMemory(device.total_bytes, device.usable_bytes)
        source = recordings.source(device.compute_capability, seq_len)
        self._probe = SimulatedProbe(source, memory, AllocatorSettings.from_environment())
        confirm = recordings.confirm
        self.result: SearchResult = search_simulated(self._probe, Shape(seq_len), max_batch_size, confirm=confirm)
        seen = self.result.measurement if self.result.max_batch_size else None
        self.batch_size = self.result.max_batch_size
        self.peak_allocated_bytes = None if seen is None else seen.peak_allocated_bytes
        self.peak_reserved_bytes = None if seen is None else seen.peak_reserved_bytes

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
        confirm: whether to record the largest size itself, whose batch is made for that.
    """

    def __init__(
        self, make: Callable[[], Workload], name: str, how: StepConfig, *, seconds: float, confirm: bool, is_built: bool
    ) -> None:
        self._make, self.name, self._how, self._seconds, self.confirm = make, name, how, seconds, confirm
        self._is_built = is_built
        self._sources: dict[tuple[tuple[int, int], int | None], TraceSource] = {}

    def source(self, capability: tuple[int, int], seq_len: int | None) -> TraceSource:
        """Traces at any batch size on GPUs of a compute capability."""

        def record(batch_size: int) -> Trace:
            mode = fake_device.FakeDeviceMode(allow_non_fake_inputs=True) if self._is_built else None
            with mode or nullcontext():  # what is built here has no need of real weights
                workload = self._make()
            return record_step(workload, self._how, capability, batch_size, seq_len, mode)

        def submit(batch_size: int, _: int | None) -> Future[Trace]:
            future: Future[Trace] = Future()
            try:
                recorded = record_in_forks(record, [batch_size], time.monotonic() + self._seconds)
                future.set_result(recorded[batch_size])
            except NotRecordable as error:
                future.set_exception(
                    RecordingFailed(f"{self.name} cannot be recorded at batch size {batch_size}: {error}")
                )
            return future

        key = capability, seq_len
        if key not in self._sources:
            self._sources[key] = TraceSource(submit, [seq_len])
        return self._sources[key]


def simulate(
    model: nn.Module | Workload | str,
    *,
    gpu: str = "A100 80GB",
    batches: DataLoader[Any] | MakeBatch | None = None,
    seq_len: int | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: str | OptimizerFactory = "adamw",
    precision: str = "fp32",
    mode: str = "train",
    accumulation: int = 1,
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
            model; any module; a `Workload`; or the name of a model, as `batchfinder estimate` takes it.
        gpu: a name of `batchfinder.devices`, such as `RTX 4090`.
        batches: a DataLoader, whose longest samples are taken, or `make_batch(batch_size, seq_len)` that returns a
            batch of CPU tensors; None for the LightningModule's own, or random token ids and images as the model takes.
        seq_len: tokens per sample, for what makes batches of any length.
        loss: `loss(output, batch)`, a scalar; None for the output's own.
        optimizer: a name of `OPTIMIZER_NAMES` or another word for one (`training.synonyms`), or what makes one of the
            parameters; a LightningModule has its own.
        precision: likewise of `PRECISION_NAMES`; of a LightningModule that of the Trainer that it will have.
        mode: one of `MODES`.
        accumulation: micro-batches per optimizer step.
        max_batch_size: the largest of interest.
        seconds: the most that a recording may take.
        options: of a model by its name: `attention`, `gradient_checkpointing`, `lora`, ... of `build_workload`.

    Raises:
        InvalidValue: an argument cannot be used.
        UnknownName: no such GPU or model.
        RecordingFailed: the step cannot be recorded; what it raised is in the text.
        UserCodeFailed: the LightningModule's `train_dataloader`, or the data, raised.
    """
    device = device_for(find_gpu(gpu))
    precision, mode = one_of("precision", precision, PRECISION_NAMES), one_of("mode", mode, MODES)
    if isinstance(optimizer, str):
        optimizer = one_of("optimizer", optimizer, OPTIMIZER_NAMES)
    if options and not isinstance(model, str):
        raise InvalidValue(next(iter(options)), next(iter(options.values())), "left out but for a model by its name")
    if not hasattr(os, "fork"):
        raise InvalidValue("simulate", os.name, "a system that can fork; batchfinder estimate does without")
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):
        check_model_name(model)
    before = ProcessState()
    try:
        make_batch = _batches(model, batches, name)
    finally:
        before.restore()
    trains_itself = isinstance(model, nn.Module) and has_training_step(model)
    if not isinstance(model, str) and not trains_itself and make_batch is None:
        workload_from_object(model, name)  # to say what is wrong with it

    def make() -> Workload:
        """In a fork, where it may change the model."""
        if isinstance(model, str):
            made = build_workload(model, precision=precision, **options)
        elif isinstance(model, nn.Module) and trains_itself:
            if make_batch is not None:
                model.make_batch = make_batch  # type: ignore[assignment]
            made = workload_from_training_step(model, name, run_user_code)
        elif isinstance(model, nn.Module) and make_batch is not None:
            made = Workload(model, make_batch)
        else:
            made = workload_from_object(model, name)
        changed: dict[str, Any] = {} if loss is None else {"loss": loss}
        if not isinstance(optimizer, str):
            changed["optimizer"] = optimizer
        return replace(made, **changed)

    kind = optimizer if isinstance(optimizer, str) else OPTIMIZER_NAMES[0]
    how = StepConfig(mode, precision, kind, micro_batches=min(accumulation, PEAK_MICRO_BATCHES))
    from_data = make_batch is not None and not callable(batches)
    recordings = _Recordings(
        make,
        name,
        how,
        seconds=seconds,
        confirm=not from_data,  # so many samples may fill the host's memory
        is_built=isinstance(model, str),
    )
    return SimulatedTraining(recordings, device, seq_len, max_batch_size)


def _batches(model: object, batches: DataLoader[Any] | MakeBatch | None, name: str) -> MakeBatch | None:
    """What makes batches, of data that is read before anything is recorded; None to leave it to the model."""
    own = getattr(model, "train_dataloader", None)
    if batches is None and isinstance(model, nn.Module) and has_training_step(model) and callable(own):
        if callable(getattr(model, "make_batch", None)):
            return None
        batches = run_user_code(f"{name}.train_dataloader", own)
    if isinstance(batches, Mapping | list | tuple):
        raise InvalidValue("batches", type(batches).__name__, "one DataLoader, or a function that makes a batch")
    if batches is None or not isinstance(batches, DataLoader):
        return batches
    made = batches_of(batches)
    run_user_code(f"{name}'s data", made.batch, 1)  # reads the samples
    return lambda batch_size, _: made.batch(batch_size)
