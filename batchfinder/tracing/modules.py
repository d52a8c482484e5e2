"""Which module made an allocation, in the forward and in the backward."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module


class ModuleTracker:
    """Knows, while it is entered, the dotted path of the module at work.

    In the forward it keeps a stack by global hooks. In the backward it asks the autograd node that is running for its
    sequence number: nodes are numbered as the forward makes them, so the number says inside which module's forward the
    node was made. Unlike `torch.utils.module_tracker` this adds no node to the graph, which would change the memory.

    Args:
        model: the root; its own path is empty.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Install the hooks, and remove them at the end."""
        handles = (
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self) -> None:
        """From the next autograd node on, nodes belong to the module on top of the stack."""
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._owners.append(self._stack[-1] if self._stack else "")

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        self._note()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._note()

    def current(self) -> str:
        """The dotted path of the module at work; empty outside the model."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[place] if place >= 0 else ""
