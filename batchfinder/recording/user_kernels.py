"""Kernels that PyTorch does not bring: Triton's, and those behind custom operators.

A Triton kernel only writes into tensors that Python code has allocated, so a step that launches some is recorded by
launching nothing, and no GPU or compiler is needed. Code that launches kernels asks about its device first (whether it
is CUDA's, how many multiprocessors it has) and allocates accordingly: in a module that uses Triton the fake GPU answers
as CUDA would, and everywhere `device="cuda"` is the fake GPU.

A custom operator whose kernel is written in Python (`torch.library.custom_op`) is recorded by running that, so that
what it allocates inside is seen too. Of one whose kernel is compiled, its fake kernel tells the outputs.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._library import custom_ops
from torch._subclasses.fake_tensor import FakeTensor

from batchfinder.errors import RecordingFailed
from batchfinder.recording.fake_device import DEVICE_TYPE
from batchfinder.training.child_process import line_of_user

# What launches a kernel, by Triton's modules: the `run` of each is what `kernel[grid](...)` ends in. The same since
# Triton 2.1, https://github.com/triton-lang/triton/blob/v3.4.0/python/triton/runtime/jit.py and autotuner.py.
_LAUNCHERS = {"triton.runtime.jit": ("JITFunction",), "triton.runtime.autotuner": ("Autotuner", "Heuristics")}

MULTIPROCESSORS = {
    (7, 0): 80,
    (7, 5): 72,
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 142,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 188,
}
"""Of the largest card of each compute capability: V100, Titan RTX, A100, A40, L40S, H100 SXM, B200, RTX PRO 6000.

Source: NVIDIA's architecture whitepapers and data sheets of these cards.
"""
_USUAL_MULTIPROCESSORS = 108

_launched: dict[str, None] = {}
_asked: dict[str, None] = {}
_BUILT_IN = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor", "quantized"})


class _TritonFinder:
    """Finds Triton's modules as the import system does, and replaces what launches kernels once they are executed."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _LAUNCHERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _launch_nothing(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def skip_triton_launches() -> None:
    """Let launches of Triton kernels do nothing in this process, for good, whether Triton is imported yet or not.

    Autotuning is not done either, since it is done when a kernel is launched.
    """
    if not any(isinstance(finder, _TritonFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TritonFinder())
    for name in _LAUNCHERS:
        if name in sys.modules:
            _launch_nothing(sys.modules[name])


def _launch_nothing(module: ModuleType) -> None:
    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        while not isinstance(kernel, ModuleType) and hasattr(kernel, "fn"):
            kernel = kernel.fn
        _launched[getattr(kernel, "__name__", "a kernel")] = None

    for name in _LAUNCHERS[module.__name__]:
        if hasattr(module, name):
            getattr(module, name).run = run


@functools.cache
def register(capability: tuple[int, int]) -> None:
    """Let code that launches kernels find the GPU it was written for: in this process, for good."""
    skip_triton_launches()
    cuda = torch.device("cuda", 0)

    def device(tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        known = tensor.fake_device
        return cuda if known.type == DEVICE_TYPE and _uses_triton(sys._getframe(1).f_globals) else known

    def is_cuda(tensor: FakeTensor) -> bool:
        return tensor.fake_device.type == DEVICE_TYPE and _uses_triton(sys._getframe(1).f_globals)

    # As FakeTensor.device of torch 2.13 otherwise. Its `is_cuda` is C++'s, which tells what a fake GPU is.
    FakeTensor.device = property(device)  # type: ignore[assignment, method-assign]
    FakeTensor.is_cuda = property(is_cuda)  # type: ignore[assignment]

    count = MULTIPROCESSORS.get(capability, _USUAL_MULTIPROCESSORS)
    properties = SimpleNamespace(
        name="simulated", major=capability[0], minor=capability[1], multi_processor_count=count, warp_size=32
    )

    def get_properties(*_: Any) -> SimpleNamespace:
        _asked[f"code that asks how many multiprocessors the GPU has is told {count}"] = None
        return properties

    torch.cuda.get_device_properties = get_properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = nullcontext  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda *_: None


def _uses_triton(names: dict[str, Any]) -> bool:
    return "triton" in names and not names.get("__name__", "").startswith("torch.")


def on_fake_device(value: Any) -> Any:
    """An argument of an operator: CUDA's device is the fake GPU, once that is there."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device(DEVICE_TYPE, 0)
    return value


def unmodelled() -> Iterable[str]:
    """What a recording leaves out for the kernels that were launched so far, in words."""
    if _launched:
        kernels = f"{len(_launched)} Triton kernel{'s' if len(_launched) > 1 else ''}"
        yield f"{kernels} (such as {next(iter(_launched))}): neither run nor tuned, and scratch memory of their own"
    yield from _asked


@functools.cache
def is_custom(func: Any) -> bool:
    """Whether an operator is not one of PyTorch's own."""
    return getattr(func, "namespace", "aten") not in _BUILT_IN


@functools.cache
def python_kernel(func: Any) -> Callable[..., Any] | None:
    """The kernel that a custom operator would run on CUDA, where it is written in Python; None for others."""
    if not is_custom(func):
        return None
    definition = custom_ops.OPDEFS.get(func._schema.name)
    # By device type, None for all: `CustomOpDef._backend_fns` of torch 2.13.
    kernels = getattr(definition, "_backend_fns", {})
    kernel: Callable[..., Any] | None = kernels.get("cuda", kernels.get(None))
    return kernel


def without_fake_kernel(name: str, error: BaseException, module: str) -> RecordingFailed:
    """The error for a custom operator of whose outputs nothing is known without a GPU."""
    line = line_of_user(traceback.extract_stack())
    where = line or (f"in the backward of the module {module}" if module else "outside of all modules")
    operator = name.rpartition(".")[0] or name
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RecordingFailed(
        f"the custom operator {operator} cannot be recorded, {where}\n"
        f"Its kernel does not run on tensors without values, and it has no fake kernel that does: {said}\n"
        f'Tell the shapes of its outputs with @torch.library.register_fake("{operator.replace(".", "::")}"): a '
        "function of the same arguments that returns empty tensors."
    )
