"""What a batch's forward and backward change besides gradients, as it was before, for running the batch again."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from batchfinder.probing.snapshot_process import ProcessState

_PLAIN = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set, tuple})
"""What most attributes of a module are; with hundreds of modules a look at each of them would be felt."""


class BatchStart:
    """The state at the start of a batch: cheap enough to note for each one.

    Noted are the random numbers of Python, NumPy, torch and the devices, and of generators that a module holds in an
    attribute; buffers, with copies where they are; the states of torchmetrics; and the attributes of each module, by
    reference, lists by their length as well. What a step changes in other containers of the user's, or in callbacks,
    stays as the step left it. Gradients are noted by `gradients_zeroed`.

    Args:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._process = ProcessState()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        self._lists: list[tuple[list[Any], int]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] | None = None
        with torch.no_grad():
            for part in module.modules():
                self._note(part)

    def gradients_zeroed(self) -> None:
        """Note the gradients as `zero_grad` has left them, which is done once for each batch."""
        with torch.no_grad():
            self._gradients = [
                (parameter, None if parameter.grad is None else parameter.grad.clone())
                for parameter in self._module.parameters()
            ]

    def restore(self) -> None:
        """Put all of it back. Call it outside the `except` block of what failed."""
        with torch.no_grad():
            for part, attributes in self._attributes:
                vars(part).clear()
                vars(part).update(attributes)
            for held, buffers in self._buffers:
                held.clear()
                held.update(buffers)
            for value, copy in self._values:
                value.copy_(copy)
            for parameter, gradient in self._gradients or ():
                parameter.grad = None if gradient is None else gradient.clone()
        for items, length in self._lists:
            del items[length:]
        for generator, state in self._generators:
            _write(generator, state)
        self._process.restore()

    def _note(self, part: nn.Module) -> None:
        attributes = dict(vars(part))
        self._attributes.append((part, attributes))
        self._buffers.append((part._buffers, dict(part._buffers)))
        self._copy(part._buffers.values())
        for value in attributes.values():
            if type(value) in _PLAIN:
                continue
            if isinstance(value, list):
                self._lists.append((value, len(value)))
            elif (state := _read(value)) is not None:
                self._generators.append((value, state))
        if isinstance(part, Metric):
            states = [attributes.get(name) for name in part._defaults]
            self._copy(state for state in states if isinstance(state, Tensor))

    def _copy(self, values: Iterable[Tensor | None]) -> None:
        self._values.extend((value, value.clone()) for value in values if value is not None)


def _read(value: Any) -> Any:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else None


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
