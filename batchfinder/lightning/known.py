"""What is known from earlier runs: the key of an answer, whether it still holds, and lowering one that did not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.find import OutcomeSlot
from batchfinder.lightning.memory import Memory
from batchfinder.lightning.probe import Setting
from batchfinder.outcome import Measurement, Outcome, Shape, Stop, Trial, Verdict
from batchfinder.step.workload import Workload
from batchfinder.zoo.fingerprint import fingerprint

PLENTY = 0.8
"""Share of the free memory within which a known peak is far from it: a cap and not memory bounded the answer."""

SLACK = 0.01
"""Share of the memory that was free by which less may be free for an answer to be used as it is."""


@dataclass(frozen=True)
class Limits:
    """What bounds the search.

    Attributes:
        cap: the largest size of use; None for none.
        tolerance: share of the answer that may be left on the table.
        reserve_bytes: memory to keep free, in bytes.
        headroom: the same as it was asked for.
    """

    cap: int | None
    tolerance: float
    reserve_bytes: int
    headroom: float | int


def make_key(
    trainer: Any,
    setting: Setting,
    shape: Shape,
    sample: Any,
    memory: Memory,
    limits: Limits,
    callbacks: Iterable[Any],
) -> CacheKey:
    """Name everything that changes the answer.

    Args:
        trainer: set up.
        setting: what is tried.
        shape: one sample's shape.
        sample: a batch of one sample: the data's own shapes and types, which the model's code may not tell.
        memory: the device's memory.
        limits: what bounds the search.
        callbacks: those that take part.
    """
    module = trainer.lightning_module
    optimizers = [] if setting.alone else trainer.optimizers
    train = setting.train
    extra: dict[str, Json] = {
        "sample": _describe(sample),
        "stage": [setting.stage, setting.alone],
        "target": setting.target_batch_size,
        "train": None if train is None else [train[0], train[1].seq_len],
        "headroom": limits.headroom,
        "strategy": type(trainer.strategy).__name__,
        "automatic_optimization": module.automatic_optimization,
        "clip": [trainer.gradient_clip_val, str(trainer.gradient_clip_algorithm)],
        "detect_anomaly": trainer._detect_anomaly,
        "callbacks": sorted(type(callback).__qualname__ for callback in callbacks),
        "threads": torch.get_num_threads() if trainer.strategy.root_device.type == "cpu" else None,
        "compiled": module._compiler_ctx is not None,
    }
    return CacheKey(
        model=fingerprint(Workload(module, _no_batches)),
        gpu=memory.name,
        total_bytes=memory.total_bytes,
        usable_bytes=memory.allowance_bytes,
        seq_len=shape.seq_len,
        mode="train" if setting.stage == "fit" else "inference",
        precision=str(trainer.precision),
        optimizer=" + ".join(type(optimizer).__name__ for optimizer in optimizers),
        optimizer_options={str(index): _options(optimizer) for index, optimizer in enumerate(optimizers)},
        attention="",
        gradient_checkpointing=False,
        accumulation=setting.accumulation,
        allocator=_allocator(trainer.strategy.root_device),
        max_batch_size=limits.cap,
        floor=1,
        multiple_of=1,
        tolerance=limits.tolerance,
        headroom_bytes=limits.reserve_bytes if isinstance(limits.headroom, int) else 0,
        source="measured",
        versions=_versions(),
        extra=extra,
    )


def holds(outcome: Outcome, free_bytes: int) -> bool:
    """Whether an outcome can be used without trying it again: as much is free as then, or far more than it takes.

    Args:
        outcome: as it was kept.
        free_bytes: what is free now, less what is to stay free.
    """
    then, seen = outcome.free_bytes, outcome.measurement
    if seen is None and outcome.max_batch_size > 0:
        return False
    peak = None if seen is None else seen.peak_reserved_bytes
    if peak is not None and peak <= PLENTY * free_bytes:
        return True
    return then is not None and free_bytes >= then - int(SLACK * then)


def lower(slot: OutcomeSlot, batch_size: int, message: str) -> int:
    """Lower a record that training has proved wrong; the next start tries the new size before it uses it.

    Args:
        slot: where the record is.
        batch_size: the size that ran out of memory.
        message: the device's own words.

    Returns:
        The new size: 5 % less, and at least one sample less.
    """
    lowered = max(0, min(batch_size - 1, int(0.95 * batch_size)))
    known = slot.get()
    if known is not None and known.max_batch_size > lowered:
        failed = Trial(batch_size, known.shape, Measurement(Verdict.OUT_OF_MEMORY, message=message))
        slot.put(
            replace(
                known,
                max_batch_size=lowered,
                stop=Stop.TOLERANCE,
                measurement=None,
                trials=(*(trial for trial in known.trials if trial.batch_size < batch_size), failed),
            )
        )
    return lowered


def _no_batches(batch_size: int, seq_len: int | None) -> None:
    """Stands for the batches in a fingerprint; the key holds a sample's shape instead."""


def _describe(sample: Any) -> Json:
    """Shapes and types of a batch's tensors, by their places."""
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves_with_path(sample)
    return [
        [pytree.keystr(path), [*leaf.shape], str(leaf.dtype)] if isinstance(leaf, torch.Tensor) else pytree.keystr(path)
        for path, leaf in leaves
    ]


def _options(optimizer: Any) -> dict[str, Json]:
    return {name: value if _is_json(value) else repr(value) for name, value in optimizer.defaults.items()}


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and abs(value) < 1e300)


def _allocator(device: torch.device) -> dict[str, Json]:
    import os

    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if device.type == "cuda" else _MALLOC
    return {name: os.environ[name] for name in names if name in os.environ}


_MALLOC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def _versions() -> dict[str, Json]:
    found: dict[str, Json] = {"torch": torch.__version__}
    for name in ("batchfinder", "pytorch-lightning"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
