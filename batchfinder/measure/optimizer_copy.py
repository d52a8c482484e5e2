"""All that an optimizer's step changes, copied, and put back bit for bit."""

from __future__ import annotations

import tempfile
from collections import deque
from contextlib import suppress
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

# The optimizer's attributes that a step does not change: hooks, defaults, and the wrapped step itself.
_NOT_STATE = ("step", "defaults", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerCopy:
    """What an optimizer's step changes, as it was: parameters, gradients, state, groups and its own attributes.

    Dicts, lists and deques get back what they held; what a step added to them is gone, such as the state that Adam
    makes in its first step. So do optimizers within this one. Tensors get back their bits, and the memory they were in.
    Numbers and other objects come back by reference.

    Args:
        optimizer: between two steps.
        contents: whether tensors are copied. Without, it is only known afterwards whether one has changed.
        host: whether the copies are on the host rather than beside their tensors.

    Attributes:
        nbytes: what the copies take.
    """

    def __init__(self, optimizer: Optimizer, *, contents: bool = True, host: bool = False) -> None:
        self._attributes: list[tuple[Optimizer, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: dict[int, _TensorCopy] = {}
        self._file: IO[bytes] | None = None
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        with torch.inference_mode(False), torch.no_grad():
            self._write_down(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._gradients.append((parameter, parameter.grad))
                    self._write_down(parameter.grad)
            if contents:
                for tensor in self._tensors.values():
                    tensor.copy(host)
            self._bits = None if contents else self._read_bits()
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values()) if contents else 0

    def make_room(self) -> None:
        """Free what the copies take: to the host if they are on a device, else to a file that is gone when this is.

        Where the file cannot be written they stay in memory.
        """
        copies = [tensor.copied for tensor in self._tensors.values()]
        if any(copy is not None and copy.device.type != "cpu" for copy in copies):
            for tensor in self._tensors.values():
                tensor.move_to_host()
            return
        with suppress(OSError):
            file = tempfile.TemporaryFile()  # noqa: SIM115  # closed when nobody holds it any more
            torch.save(copies, file)
            self._file = file
            for tensor in self._tensors.values():
                tensor.copied = None

    def restore(self) -> bool:
        """Put everything back. May be called any number of times.

        Returns:
            Whether everything is as it was; without copies, False if a tensor has changed.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self._bits is not None:
                bits = self._read_bits()
                if not all(bool(bits[address] == before) for address, before in self._bits.items()):
                    return False
            self._read_file()
            for optimizer, held in self._attributes:
                now = vars(optimizer)
                for name in [name for name in now if name not in held and name not in _NOT_STATE]:
                    del now[name]
                now.update(held)
            for container, contents in self._containers:
                container.clear()
                container.update(contents) if isinstance(container, dict) else container.extend(contents)
            for tensor in self._tensors.values():
                tensor.restore()
            for parameter, gradient in self._gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient  # of the shape that the parameter has again
        return True

    def _read_file(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            for tensor, copy in zip(self._tensors.values(), torch.load(self._file, weights_only=True), strict=True):
                tensor.copied = copy
            self._file = None

    def _read_bits(self) -> dict[int, Tensor]:
        """Of the memory of all tensors, by address. Nothing is waited for."""
        found: dict[int, Tensor] = {}
        for tensor in self._tensors.values():
            memory = memory_of(tensor.alias)
            if memory.data_ptr() not in found:
                found[memory.data_ptr()] = bits_of(memory)
        return found

    def _write_down(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = _TensorCopy(value)
        elif isinstance(value, Optimizer):
            held = {name: child for name, child in vars(value).items() if name not in _NOT_STATE}
            if all(value is not known for known, _ in self._attributes):
                self._attributes.append((value, held))
                for child in held.values():
                    self._write_down(child)
        elif isinstance(value, dict):
            self._containers.append((value, dict(value)))
            for child in value.values():
                self._write_down(child)
        elif isinstance(value, list | deque):
            self._containers.append((value, list(value)))
            for child in value:
                self._write_down(child)
        elif isinstance(value, tuple):
            for child in value:
                self._write_down(child)


class _TensorCopy:
    """A tensor and its bits. The alias keeps the memory it was in, for optimizers that assign to `.data`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.alias = tensor.detach()
        self.copied: Tensor | None = None

    @property
    def nbytes(self) -> int:
        if self.copied is None:
            return 0
        parts = (self.copied._values(), self.copied._indices()) if self.copied.is_sparse else (self.copied,)
        return sum(part.nbytes for part in parts)

    def copy(self, host: bool) -> None:
        self.copied = self.alias.to("cpu", copy=True) if host else self.alias.clone()

    def move_to_host(self) -> None:
        if self.copied is not None:
            self.copied = self.copied.to("cpu")

    def restore(self) -> None:
        plain = type(self.tensor) in (Tensor, Parameter) and self.tensor.layout is torch.strided
        if plain and (self.tensor.data_ptr(), self.tensor.shape) != (self.alias.data_ptr(), self.alias.shape):
            self.tensor.data = self.alias
        if self.copied is not None:
            self.alias.copy_(self.copied)


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of the memory that a tensor lies in, a view.

    Args:
        tensor: strided or sparse.
    """
    storage = (tensor._values() if tensor.is_sparse else tensor).untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def bits_of(memory: Tensor) -> Tensor:
    """A sum over bytes that changes if they do. It takes no memory to speak of.

    Not `_version`: an operator on a list of tensors that fails half way has raised none of theirs, and `.data` has its
    own.

    Args:
        memory: from `memory_of`.
    """
    words = len(memory) // 8 * 8
    return memory[:words].view(torch.int64).sum() + memory[words:].sum(dtype=torch.int64)
