"""The largest batch size, predicted by recording the user's own step on the fake GPU, as the start of a search.

The step is recorded in forks of this process, which have the module, the optimizer and the batches already. A
prediction saves a few probes and no more: where it fails, the search does without, and the log says why at level INFO.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils import _pytree as pytree

from batchfinder.data.batch import map_leaves, tensors
from batchfinder.devices import Device
from batchfinder.devices.catalog import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.distributed.agreement import leave_groups
from batchfinder.find import find_max_batch_size
from batchfinder.lightning.batch_size import set_attribute
from batchfinder.lightning.compat import class_for, datamodule_of, is_a, is_lightnings_own
from batchfinder.lightning.dry_run import TrialConfig, capture_data
from batchfinder.lightning.schedule import NO_SCHEDULE, Schedule
from batchfinder.measure.device_memory import Memory
from batchfinder.models.lightning_module import call_step
from batchfinder.probe import FunctionProbe
from batchfinder.recording import fake_device
from batchfinder.recording.forked import NotRecordable, record_in_forks
from batchfinder.recording.simulation import predict_full_card
from batchfinder.results import Shape
from batchfinder.search import Prediction, Secant
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import NO_SCRATCH, TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import PEAK_MICRO_BATCHES, StepConfig
from batchfinder.training.step import Workload

SECONDS = 60.0
"""How long all recordings may take. BERT-large takes two seconds; a fork that waits for a lock would take for ever."""

HOST_SHARE = 0.8
"""What remains of an answer on a CPU, whose kernels take scratch memory of which nothing is known here.

Measured with a transformer and with a convolutional net: the plain answer is 20 % and 12 % too high.
"""

_RECORDED = (7, 13, 11, 1)
"""The sizes that `TraceSource` asks for where a step's memory is a polynomial of the batch size."""

_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_PRECISIONS = {
    "32-true": ("fp32", torch.float32),
    "16-mixed": ("16-mixed", torch.float32),
    "bf16-mixed": ("bf16-mixed", torch.float32),
    # The weights and the batches are of the type already.
    "16-true": ("fp32", torch.float16),
    "bf16-true": ("fp32", torch.bfloat16),
    "64-true": ("fp32", torch.float64),
}
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOGGING = ("log", "log_dict", "print")
_BLOCK_BYTES = 512
_NO_FUSED_ATTENTION = (3, 7)
"""A CPU has a fused attention as well, but not with dropout; where it runs, the prediction is too low."""

log = logging.getLogger(__name__)


def predict_batch_size(
    trainer: Trainer,
    finder: Callback,
    config: TrialConfig,
    make_batch: Callable[[int], Any],
    device: Device,
    cap: int | None = None,
    seconds: float = SECONDS,
    schedule: Schedule = NO_SCHEDULE,
    later: Callable[[int], Sequence[int | None]] = lambda batch_size: (),
) -> Prediction | None:
    """Predict the largest batch size. Nothing of the user's is changed, and no process is left behind.

    Args:
        trainer: set up, with its model on the device.
        finder: the callback that asks.
        config: what is tried.
        make_batch: makes a batch of a size on the host.
        device: from `simulated_device`.
        cap: the largest size of use; None for none.
        seconds: the time limit of all recordings together.
        schedule: of the fit; where it unfreezes layers, all are recorded as trained.
        later: what a trial takes after its first two steps, for a batch size (`Schedule.later_steps`).

    Returns:
        The largest size that gives no cached memory back; a rough guess above `cap` where far more than that fits. None
        where the step cannot be recorded.
    """
    try:
        from batchfinder.recording.record_step import record_step  # an older PyTorch lacks operators that it knows

        module, plugin, datamodule = trainer.lightning_module, trainer.precision_plugin, datamodule_of(trainer)
        if not hasattr(os, "fork"):
            raise NotRecordable("this system cannot fork")
        if not is_a(trainer.strategy, "SingleDeviceStrategy", "DDPStrategy") or not is_lightnings_own(trainer.strategy):
            raise NotRecordable(f"strategy {type(trainer.strategy).__name__}")
        if not is_lightnings_own(plugin) or trainer.precision not in _PRECISIONS:
            raise NotRecordable(f"precision plugin {type(plugin).__name__}")
        if config.train is not None:
            raise NotRecordable("validation during a fit")
        hooks = [module.transfer_batch_to_device]
        hooks += [] if datamodule is None else [getattr(datamodule, name) for name in _TRANSFERS]
        if not all(is_lightnings_own(hook) for hook in hooks):
            raise NotRecordable("transfer_batch_to_device is overridden, or a transfer hook of the datamodule")
        if config.stage == "fit":
            if not module.automatic_optimization:
                raise NotRecordable("manual optimization")
            if len(trainer.optimizers) != 1 or is_a(trainer.optimizers[0], "_MockOptimizer"):
                raise NotRecordable(f"{len(trainer.optimizers)} optimizers, or none that steps")
        precision, dtype = _PRECISIONS[trainer.precision]
        untouched = capture_data(trainer, finder)
        try:
            batches = {size: plugin.convert_input(make_batch(size)) for size in _RECORDED}
        finally:
            untouched.restore()
        on_host = trainer.strategy.root_device.type == "cpu"
        mode = "train" if config.stage == "fit" else "inference"
        step_config = StepConfig(mode, precision, micro_batches=min(PEAK_MICRO_BATCHES, config.micro_batches(1)))
        deadline = time.monotonic() + seconds

        def record(batch_size: int) -> Trace:
            torch.set_default_dtype(dtype)
            leave_groups()
            if config.attribute is not None:
                set_attribute(module, config.attribute, batch_size)
            if schedule.unfreezes:
                _unfreeze(module, trainer.optimizers[0])
            step = RecordedStep(trainer, config.stage, batches[batch_size])
            workload = Workload(
                model=step,
                make_batch=step.make_batch,
                loss=lambda loss, batch: loss,
                optimizer=lambda parameters: step.optimizer,
                zero_grad_after_loss=True,
                sums_in_place=on_host,
            )
            return record_step(workload, step_config, device.compute_capability, batch_size, None)

        recorded = record_in_forks(record, _RECORDED[:2], deadline)

        def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
            if batch_size not in batches:
                raise NotRecordable("its memory is no polynomial of the batch size")
            if batch_size not in recorded:
                recorded.update(record_in_forks(record, [batch_size], deadline))
            future: Future[Trace] = Future()
            future.set_result(recorded[batch_size])
            return future

        memory = DeviceMemory(device.total_bytes, device.usable_bytes)
        traces = TraceSource(submit, [None], reduces_on=NO_SCRATCH if on_host else device.reduces_on)
        probe = SimulatedProbe(traces, memory, AllocatorSettings.from_environment())
        predicted = Prediction(largest_on_host(probe)) if on_host else largest_on_gpu(probe, cap, later)
    except Exception as error:
        reason = f"{error}" if isinstance(error, NotRecordable) else f"{type(error).__name__}: {error}"
        log.info("BatchFinder: no prediction from a simulated step: %s", reason)
        log.debug("BatchFinder: no prediction from a simulated step", exc_info=True)
        return None
    log.info("BatchFinder: predicted batch size from a simulated step: %d", predicted.batch_size)
    return predicted


def _unfreeze(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train all weights. What a finetuning callback does itself compares weights, for which a fork has no GPU."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [parameter for parameter in module.parameters() if id(parameter) not in trained]
    for parameter in frozen:
        parameter.requires_grad_()
    if frozen:
        optimizer.add_param_group({"params": frozen})


def simulated_device(device: torch.device, memory: Memory, max_peak_bytes: int, module: nn.Module) -> Device:
    """The device as the simulation counts its memory: with the module on it, and without what else the process holds.

    `max_peak_bytes` is what a peak may come to. Peaks count all that the process holds, among it the module and what
    training will not use.
    """
    storages = (tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers()))
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == device.type}
    own = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes.values())
    usable = max(0, max_peak_bytes - max(0, memory.held_bytes() - own))
    if device.type == "cuda":
        nvidia = torch.version.hip is None
        capability = torch.cuda.get_device_capability(device) if nvidia else DEFAULT_COMPUTE_CAPABILITY
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        capability, multiprocessors = _NO_FUSED_ATTENTION, 0
    total = max(usable, memory.total_bytes)
    return Device(memory.name, total, usable, capability, multiprocessors=multiprocessors)


def largest_on_gpu(
    probe: SimulatedProbe,
    cap: int | None = None,
    later: Callable[[int], Sequence[int | None]] = lambda batch_size: (),
) -> Prediction:
    """The largest size at which no cached memory is given back, in the first steps nor in `later` ones.

    `cap` is the largest of use; where a line through two peaks ends at twice that, and it runs, the line is answer
    enough. It runs through small sizes, whose peak may be the optimizer's step, which is the same at each.
    """
    line = predict_max_batch_size(probe, Shape())
    if cap is not None and line > 2 * cap and probe(max(2, cap), Shape()).fits:
        return Prediction(line)
    # Batches of a few sizes are there to be recorded, so the answer is not confirmed at its own: real trials do that.
    return predict_full_card(probe, Shape(), later=later)


def largest_on_host(probe: SimulatedProbe) -> int:
    """A share of the largest size whose live bytes, not rounded and without a GPU's workspaces, fit."""
    usable = probe.memory.capacity_bytes
    function = FunctionProbe(lambda batch_size, shape: live_bytes(probe.trace(batch_size, shape)), usable)
    search = Secant(limit_bytes=usable, tolerance=0.0, predicted=predict_max_batch_size(probe, Shape()))
    return int(HOST_SHARE * find_max_batch_size(function, Shape(), search=search).max_batch_size)


def live_bytes(trace: Trace) -> int:
    """The most bytes of a trace that are live at one time, as they were requested."""
    sizes = [0 if kind == "workspace" else size for kind, size in zip(trace.structure.kinds, trace.sizes, strict=True)]
    most = live = 0
    for event in trace.structure.order:
        live += sizes[event] if event >= 0 else -sizes[~event]
        most = max(most, live)
    return most


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, under each of their names."""
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


class RecordedStep(nn.Module):
    """A module whose forward is a trainer's step on a batch, given as the batch's tensors. Only for a forked child.

    The trainer and all that it holds are left on the fake GPU; the batch is on the host.
    """

    def __init__(self, trainer: Trainer, stage: str, batch: Any) -> None:
        super().__init__()
        self.module = trainer.lightning_module
        self._step = getattr(self.module, _STEPS[stage])
        self._host_batch = self._batch = batch
        self._root: torch.device = trainer.strategy.root_device
        self.optimizer: Any = trainer.optimizers[0] if stage == "fit" else None
        self._before = named_tensors(self.module)
        trainer.loggers = [class_for(trainer, "loggers.logger", "DummyLogger")()] if trainer.loggers else []
        for part in self.module.modules():
            if is_a(part, "LightningModule"):
                vars(part).update(dict.fromkeys(_LOGGING, lambda *args, **kwargs: None))

    def train(self, mode: bool = True) -> RecordedStep:
        """Called once the parameters are on the fake GPU: the optimizer and the module's plain attributes follow.

        Training keeps each part's own mode, as Lightning does; evaluation sets all of them.
        """
        fake_gpu = fake_device.register()
        after = named_tensors(self.module)
        # By name, not by place: layers of 4 or 8 bits have scales among their buffers since they were moved.
        moved = {id(old): (old, after[name]) for name, old in self._before.items() if name in after}

        def move(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return fake_gpu if leaf.type == self._root.type else leaf
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != self._root.type:
                return leaf
            if id(leaf) not in moved:
                copy = fake_device.fake_copy(leaf, fake_gpu)
                moved[id(leaf)] = leaf, nn.Parameter(copy) if isinstance(leaf, nn.Parameter) else copy
            return moved[id(leaf)][1]

        for part in self.module.modules():
            for name, value in vars(part).items():
                own = name not in ("_parameters", "_buffers", "_modules")
                if own and any(isinstance(leaf, torch.Tensor | torch.device) for leaf in pytree.tree_leaves(value)):
                    vars(part)[name] = pytree.tree_map(move, value)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["params"] = [move(parameter) for parameter in group["params"]]
                if self._root.type == "cpu" and group.get("foreach", 0) is None:
                    group["foreach"] = False
            state = self.optimizer.state.items()
            moved_state = {
                move(parameter): pytree.tree_map(
                    lambda leaf: (
                        torch.tensor(leaf.numpy().item(), dtype=leaf.dtype)  # a count of steps: it is read
                        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dim() == 0
                        else move(leaf)
                    ),
                    own,
                )
                for parameter, own in state
            }
            self.optimizer.state = defaultdict(dict, moved_state)
        return self if mode else super().train(False)

    def make_batch(self, batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, ...]:
        """The tensors of the batch, after the module's first hook on it."""
        self._batch = self.module.on_before_batch_transfer(self._host_batch, 0)
        return tuple(tensor for _, tensor in tensors(self._batch))

    def forward(self, *moved: torch.Tensor) -> Any:
        """Take the step on the batch's tensors, which are on the fake GPU; the loss, or what an evaluation returns."""
        left = iter(moved)
        batch = map_leaves(lambda path, leaf: next(left) if isinstance(leaf, torch.Tensor) else leaf, self._batch)
        with torch.autocast(fake_device.DEVICE_TYPE, enabled=False):
            batch = self.module.on_after_batch_transfer(batch, 0)
        output = call_step(self._step, batch)
        if self.optimizer is None:
            return output
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise NotRecordable(f"the step returned {type(loss).__name__} and no loss")
        return loss
