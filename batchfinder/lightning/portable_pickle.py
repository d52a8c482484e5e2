"""Objects in a file without the data of their tensors, for a process that has no device to put them on.

A tensor is written as its shape, strides and type; nothing of it is read, on no device. The same tensor in two places,
such as a tied weight, is one tensor again when it is read. What belongs to the run and not to the step (datasets,
loggers, callbacks) is left out, and the trainer is written as a few of its plain attributes. Classes and functions of
`__main__` and of notebooks are written whole, others by their names (cloudpickle).
"""

from __future__ import annotations

import io
import pickle
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from batchfinder.lightning.compat import is_a
from batchfinder.units import MIB, format_bytes

MOST_BYTES = 64 * MIB
"""A module's structure takes kilobytes. What takes more than this holds data, which is not copied."""

_NOT_OF_THE_STEP = (
    *("Callback", "LightningDataModule", "LightningOptimizer", "Logger", "Profiler", "Strategy"),
    *("_DataConnector", "_Loop"),
)
_NOT_TO_BE_COPIED = (
    *(DataLoader, Dataset, io.IOBase, torch.Generator, torch.Stream, torch.Event, types.GeneratorType),
    *(type(threading.Lock()), type(threading.RLock())),
)
# Of the trainer: what a step may ask it for.
_PLAIN = (
    *("accumulate_grad_batches", "current_epoch", "fast_dev_run", "global_rank", "global_step", "gradient_clip_val"),
    *("is_global_zero", "local_rank", "log_every_n_steps", "max_epochs", "max_steps", "num_devices", "num_nodes"),
    *("num_training_batches", "precision", "predicting", "sanity_checking", "testing", "training", "validating"),
    "world_size",
)


class NotPortable(Exception):
    """Something that cannot be taken to another process. It stays inside this package."""


def write(thing: Any, path: Path, device: torch.device, moved_later: Iterable[torch.Tensor] = ()) -> None:
    """Write an object and all that it is made of.

    Args:
        thing: a module, an optimizer's options, batches, or containers of these.
        path: the file, which is made.
        device: where training is; tensors on it are told from those on the host.
        moved_later: tensors that belong there and are to be read as the host's: the reader moves them itself.

    Raises:
        NotPortable: it holds a tensor of an unusual kind, or too much data.
        Exception: whatever else pickling raises.
    """
    with path.open("wb") as file:
        _Writer(_Bounded(file), device, moved_later).dump(thing)


def read(path: Path, device: torch.device) -> Any:
    """Read what was written. The tensors hold nothing: inside a `FakeTensorMode` they take no memory either.

    Args:
        path: the file.
        device: where the tensors go that were on the device that trains.
    """
    with path.open("rb") as file:
        return _Reader(file, device).load()


class _Bounded:
    """A file that refuses to grow too large."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MOST_BYTES

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise NotPortable(f"it holds more than {format_bytes(MOST_BYTES)} of data beside its tensors")
        return int(self._file.write(data))


class _Writer(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
    def __init__(self, file: _Bounded, device: torch.device, moved_later: Iterable[torch.Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._device = device
        self._moved_later = {id(tensor) for tensor in moved_later}
        self._tensors: dict[int, torch.Tensor] = {}  # holds on to them, so that no number is used twice
        self._stands_for: dict[type, str] = {}

    def persistent_id(self, thing: Any) -> Any:
        """What stands for a thing that is not to be pickled; None for all others."""
        if isinstance(thing, torch.Tensor):
            return ("tensor", *self._described(thing))
        kind = type(thing)
        if kind not in self._stands_for:
            self._stands_for[kind] = _what_stands_for(thing)
        stands_for = self._stands_for[kind]
        if stands_for == "device" and thing.type != self._device.type:
            return None
        if stands_for == "trainer":
            return (stands_for, {name: getattr(thing, name) for name in _PLAIN})
        return (stands_for,) if stands_for else None

    def _described(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        kind = type(tensor)
        if kind not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            raise NotPortable(f"a tensor of type {kind.__name__}, {tensor.layout}, on {tensor.device}")
        self._tensors[id(tensor)] = tensor
        on_device = tensor.device.type == self._device.type and id(tensor) not in self._moved_later
        where = (tuple(tensor.shape), tensor.stride(), tensor.dtype, on_device)
        return (id(tensor), *where, kind is nn.Parameter, tensor.requires_grad)


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self._tensors: dict[int, torch.Tensor] = {}
        self._trainer: Any = None

    def persistent_load(self, identifier: Any) -> Any:
        """What a thing stands for that was not pickled."""
        kind, *rest = identifier
        if kind == "tensor":
            return self._tensor(*rest)
        if kind == "device":
            return self._device
        if kind == "trainer":
            self._trainer = self._trainer or types.SimpleNamespace(**rest[0])
            return self._trainer
        return None

    def _tensor(
        self,
        number: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        on_device: bool,
        is_parameter: bool,
        requires_grad: bool,
    ) -> torch.Tensor:
        if number not in self._tensors:
            device = self._device if on_device else torch.device("cpu")
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            self._tensors[number] = (
                nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            )
        return self._tensors[number]


def _what_stands_for(thing: Any) -> str:
    """By the type of a thing: `device`, `trainer`, `nothing`, or empty for what is pickled."""
    if isinstance(thing, torch.device):
        return "device"
    if is_a(thing, "Trainer"):
        return "trainer"
    return "nothing" if isinstance(thing, _NOT_TO_BE_COPIED) or is_a(thing, *_NOT_OF_THE_STEP) else ""
