"""The modules of a model: which of them is at work, and which are compiled."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


def compiled_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that `torch.compile` has marked, or a method of theirs, by their dotted paths."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or any(hasattr(value, "_torchdynamo_orig_callable") for value in vars(module).values())
    }


def graphs_compiled() -> int:
    """How many graphs Dynamo has given to a compiler in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class ModuleTracker:
    """Knows, while it is entered, the dotted path of the module at work.

    In the forward it keeps a stack by hooks. In the backward it asks the autograd node that is running for its sequence
    number: nodes are numbered as the forward makes them, so the number says inside which module's forward the node was
    made. Unlike `torch.utils.module_tracker` this adds no node to the graph, which would change the memory.

    All that compiled code does is its outermost compiled module's: Dynamo would compile hooks inside it along with it.
    Where a function is compiled that is no module, all hooks go, and what follows is nobody's.

    Args:
        model: the root; its own path is empty.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._in_compiled = 0

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Install the hooks, and remove them at the end."""
        names = {module: name for name, module in self._model.named_modules()}
        compiled = list(compiled_modules(self._model).values())
        inside = {part for module in compiled for part in module.modules() if part is not module}

        def start_range() -> None:
            # From the next autograd node on, nodes belong to the module on top of the stack.
            self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._owners.append(self._stack[-1] if self._stack else "")

        def push(module: nn.Module, args: Any) -> None:
            self._stack.append(names[module])
            start_range()

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
                start_range()

        def around(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                push(module, args)
                self._in_compiled += 1
                try:
                    return call(*args, **kwargs)
                finally:
                    self._in_compiled -= 1
                    pop(module, args, None)

            return called

        with ExitStack() as installed:

            def forget(_: Any) -> None:
                if not self._in_compiled:
                    installed.close()
                    self._stack.clear()
                    start_range()

            if callbacks := sys.modules.get("torch._dynamo.callback"):
                callbacks.callback_handler.register_start_callback(forget)
                installed.callback(callbacks.callback_handler.remove_start_callback, forget)
            for module in names:
                call = getattr(module, "_compiled_call_impl", None)
                if module in inside:
                    continue
                if call is not None:  # nn.Module.compile
                    installed.callback(setattr, module, "_compiled_call_impl", call)
                    module._compiled_call_impl = around(module, call)
                else:
                    installed.callback(module.register_forward_pre_hook(push).remove)
                    installed.callback(module.register_forward_hook(pop, always_call=True).remove)
            yield

    def current(self) -> str:
        """The dotted path of the module at work; empty outside the model."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[place] if place >= 0 else ""
