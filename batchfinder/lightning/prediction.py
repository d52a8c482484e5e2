"""The simulated step's answer, to start a search on a real device from.

The step's structure is written to a file, recorded in a process that sees no GPU, and replayed on a card with the
memory that there is. A hint is worth a few probes and no more: whatever goes wrong, there is none, and a line in the
log at level INFO says why.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from batchfinder.devices import Device
from batchfinder.devices.device import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.lightning.compat import is_a, is_lightnings_own, is_overridden
from batchfinder.lightning.dry_run import Batches, Setting
from batchfinder.lightning.dry_run_scope import capture_data
from batchfinder.lightning.portable_pickle import NotPortable, write
from batchfinder.lightning.rebuild_step import Parts
from batchfinder.measure.device_memory import Memory
from batchfinder.recording.simulation import StepConfig
from batchfinder.results import Shape
from batchfinder.training.child_process import Child
from batchfinder.training.spec import WorkloadSpec

SECONDS = 120.0
"""How long to wait for a hint: what a slow import, two recordings and some replays take, several times over."""

RECORDED = (1, 7, 13, 11)
"""The sizes that `simulator/source.py` records. A step that none of them scales to others gets no hint."""

_FAR_END = "batchfinder.lightning.prediction_server"
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_PRECISIONS = {
    "32-true": ("fp32", torch.float32),
    "16-mixed": ("16-mixed", torch.float32),
    "bf16-mixed": ("bf16-mixed", torch.float32),
    # The weights, and the batches here, are of the type already.
    "16-true": ("fp32", torch.float16),
    "bf16-true": ("fp32", torch.bfloat16),
    "64-true": ("fp32", torch.float64),
}
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BLOCK_BYTES = 512
_NO_FUSED_ATTENTION = (3, 7)
"""A CPU has a fused attention as well, but not with dropout; where it runs, the hint is too low and no try fails."""

log = logging.getLogger(__name__)


def hint(
    trainer: Any,
    finder: Any,
    setting: Setting,
    batches: Batches,
    shape: Shape,
    device: Device,
    host: bool,
    cap: int | None = None,
    seconds: float = SECONDS,
) -> int | None:
    """Ask the simulated step for the largest size. Nothing of the user's is changed, and nothing is left behind.

    Args:
        trainer: set up, with its model on the device.
        finder: the callback that asks.
        setting: what is tried.
        batches: where batches come from.
        shape: one sample's shape.
        device: from `simulated_device`.
        host: whether it is the host's memory, which is given out in bytes, and no GPU's.
        cap: the largest size of use; None for none.
        seconds: how long to wait.

    Returns:
        The largest size, 0 if nothing fits; a guess above `cap` where far more than that fits. None without a hint.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="batchfinder-") as folder:
            path = Path(folder) / "parts"
            precision = _write_parts(trainer, finder, setting, batches, shape, host, path)
            spec = WorkloadSpec(
                "batchfinder.lightning.rebuild_step:build",
                {"path": str(path), "search_path": [entry or os.getcwd() for entry in sys.path]},
            )
            mode = "train" if setting.stage == "fit" else "inference"
            how = StepConfig(mode=mode, precision=precision, micro_batches=setting.micro_batches(1))
            request = {
                "workload": asdict(spec),
                "how": asdict(how),
                "device": asdict(device),
                "host": host,
                "cap": cap,
            }
            with Child(_FAR_END, [folder, str(seconds)], _NO_GPU) as child:
                answer = child.ask(request)
        if "error" in answer:
            words = answer["error"].get("traceback") or answer["error"]["message"]
            raise NotPortable(words.strip().splitlines()[-1])
    except Exception as error:
        log.info("BatchFinder: no hint from the simulated step: %s: %s", type(error).__name__, error)
        log.debug("BatchFinder: no hint from the simulated step", exc_info=True)
        return None
    predicted = int(answer["batch_size"])
    log.info("BatchFinder: the simulated step runs at batch size %d", predicted)
    return predicted


def simulated_device(device: torch.device, memory: Memory, max_peak_bytes: int, module: torch.nn.Module) -> Device:
    """The device that training has, as the simulation counts its memory: with the module, and with nothing else.

    Args:
        device: where the module is.
        memory: its memory.
        room_bytes: what a peak may come to. On a GPU peaks count all live blocks, among them the module and what
            training will not use; on a CPU they count what comes on top of what the process has, the module included.
        module: what is trained, on the device.
    """
    own = _bytes_on(device, (*module.parameters(), *module.buffers()))
    if device.type == "cuda":
        usable = max_peak_bytes - max(0, memory.held_bytes() - own)
        nvidia = torch.version.hip is None
        capability = torch.cuda.get_device_capability(device) if nvidia else DEFAULT_COMPUTE_CAPABILITY
    else:
        usable, capability = max_peak_bytes + own, _NO_FUSED_ATTENTION
    usable = max(0, usable)
    return Device(memory.name, max(usable, memory.total_bytes), usable, capability)


def _bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """What tensors take on a device, each storage once and in whole blocks."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes.values())


def _write_parts(
    trainer: Any, finder: Any, setting: Setting, batches: Batches, shape: Shape, host: bool, path: Path
) -> str:
    """Write what the step is made of; returns the precision it runs in.

    Raises:
        NotPortable: the step is one that cannot be rebuilt.
    """
    precision, dtype = _check(trainer, setting)
    trains = setting.stage == "fit"
    optimizer = trainer.optimizers[0] if trains else None
    groups = [] if optimizer is None else [dict(group) for group in optimizer.param_groups]
    untouched = capture_data(trainer, finder)
    try:
        convert = trainer.precision_plugin.convert_input
        parts = Parts(
            module=trainer.lightning_module,
            trainer=trainer,
            step=_STEPS[setting.stage],
            batches={size: convert(batches.batch(size, shape.seq_len)) for size in RECORDED},
            default_dtype=dtype,
            optimizer=None if optimizer is None else type(optimizer),
            defaults={} if optimizer is None else dict(optimizer.defaults),
            groups=groups,
            foreach=not host,
        )
        module = trainer.lightning_module
        write(parts, path, trainer.strategy.root_device, (*module.parameters(), *module.buffers()))
    finally:
        untouched.restore()
    return precision


def _check(trainer: Any, setting: Setting) -> tuple[str, torch.dtype]:
    """The precision, by the simulation's name, and the type of tensors that no type is named for.

    Raises:
        NotPortable: the step is one that cannot be rebuilt.
    """
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    if not is_a(trainer.strategy, "SingleDeviceStrategy", "DDPStrategy") or not is_lightnings_own(trainer.strategy):
        raise NotPortable(f"a step under {type(trainer.strategy).__name__}")
    if not is_lightnings_own(plugin) or trainer.precision not in _PRECISIONS:
        raise NotPortable(f"a step in the precision of {type(plugin).__name__}")
    if setting.train is not None:
        raise NotPortable("a validation in the middle of training")
    data = [] if trainer.datamodule is None else [(trainer.datamodule, name) for name in _TRANSFERS]
    if any(is_overridden(name, thing) for thing, name in [(module, "transfer_batch_to_device"), *data]):
        raise NotPortable("batches that are moved to the device in a way of their own")
    if setting.stage == "fit":
        if not module.automatic_optimization:
            raise NotPortable("manual optimization")
        if len(trainer.optimizers) != 1 or is_a(trainer.optimizers[0], "_MockOptimizer"):
            raise NotPortable(f"{len(trainer.optimizers)} optimizers, or none that steps")
    return _PRECISIONS[trainer.precision]
