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
import importlib
import importlib.machinery
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._library import custom_ops
from torch._subclasses.fake_tensor import FakeTensor

from batchfinder.devices import typical_gpu
from batchfinder.errors import RecordingFailed
from batchfinder.recording.fake_device import DEVICE_TYPE
from batchfinder.training.child_process import line_of_user

# What launches a kernel, by Triton's modules: the `run` of each is what `kernel[grid](...)` ends in. The same since
# Triton 2.1, https://github.com/triton-lang/triton/blob/v3.4.0/python/triton/runtime/jit.py and autotuner.py.
_LAUNCHERS = {"triton.runtime.jit": ("JITFunction",), "triton.runtime.autotuner": ("Autotuner", "Heuristics")}

_ENOUGH_CHUNKS = 2

# Other modules that ask whether they are on CUDA, and allocate accordingly (torch 2.13, TRL 1.16).
_ASK_FOR_CUDA = frozenset(
    {"torch.nn.attention.flex_attention", "torch.nn.modules.linear_cross_entropy", "trl.trainer.utils"}
)

_launched: dict[str, None] = {}
_asked: dict[str, None] = {}
_capability_asked: dict[tuple[int, int], None] = {}
_BUILT_IN = frozenset(
    {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor", "quantized"}
)


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

    count = typical_gpu(capability).multiprocessors
    properties = SimpleNamespace(
        name="simulated", major=capability[0], minor=capability[1], multi_processor_count=count, warp_size=32
    )

    def get_properties(*_: Any) -> SimpleNamespace:
        _asked[f"code that asks how many multiprocessors the GPU has is told {count}"] = None
        return properties

    def get_capability(*_: Any) -> tuple[int, int]:
        _capability_asked[capability] = None
        return capability

    torch.cuda.get_device_properties = get_properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = get_capability  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = nullcontext  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda *_: None
    _autocast_as_on_cuda()
    # PyTorch asks CUDA itself for the current device before an operator for `.to("cuda")` is seen.
    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.fake_device == cuda:  # while Inductor works on a graph
            return move(tensor, *args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = on_fake_device(kwargs["device"])
        return move(tensor, *map(on_fake_device, args), **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda tensor, *_, **__: to(tensor, cuda)  # type: ignore[method-assign]
    # torch 2.13 takes half types to fp32 here where `torch.cuda.is_available()`, from 7.0 on (8.0 for bf16):
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/linear_cross_entropy_options.py
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        _run_few_chunks()
        least = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
        options._resolve_auto_acc_dtype = staticmethod(
            lambda dtype, _: torch.float32 if get_capability() >= least.get(dtype, (99, 0)) else None
        )


def _run_few_chunks() -> None:
    """Let PyTorch's chunked loss go through two of its hundred or more chunks, which allocate alike.

    `_ChunkContext.chunks` of torch 2.13; the last chunk may be smaller than the others, never larger.
    """
    context = importlib.import_module("torch.nn.modules.linear_cross_entropy")._ChunkContext
    all_chunks = context.chunks

    def chunks(self: Any) -> Iterator[Any]:
        for number, chunk in enumerate(all_chunks(self)):
            if number == _ENOUGH_CHUNKS:
                return
            yield chunk

    context.chunks = chunks


def _autocast_as_on_cuda() -> None:
    """Let `torch.autocast("cuda")`, and code that asks whether that is on, mean the fake GPU's."""
    enter, enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def fake(device_type: str) -> str:
        return DEVICE_TYPE if device_type == "cuda" else device_type

    def init(context: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(context, fake(device_type), *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign, assignment]
    torch.is_autocast_enabled = lambda device_type="cuda": enabled(fake(device_type))
    torch.get_autocast_dtype = lambda device_type: dtype(fake(device_type))
    torch.get_autocast_gpu_dtype = lambda: dtype(DEVICE_TYPE)


def _uses_triton(names: dict[str, Any]) -> bool:
    module = names.get("__name__", "")
    return module in _ASK_FOR_CUDA or ("triton" in names and not module.startswith("torch."))


def on_fake_device(value: Any) -> Any:
    """An argument of an operator: CUDA's device is the fake GPU, once that is there."""
    named = value.type if isinstance(value, torch.device) else value
    if isinstance(named, str) and named.partition(":")[0] == "cuda":
        return torch.device(DEVICE_TYPE, 0)
    return value


def depends_on_card() -> bool:
    """Whether code has asked so far what the GPU is."""
    return bool(_asked or _capability_asked)


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


def not_compiled(name: str) -> RecordingFailed:
    """The error for an operator, such as `flex_attention`, that is meant for torch.compile and was called without."""
    line = line_of_user(traceback.extract_stack())
    return RecordingFailed(
        f"{name} is not recorded outside of torch.compile{f', {line}' if line else ''}\n"
        "Compile it, as it is meant to be (without, flex_attention computes all scores on a GPU), or call "
        "scaled_dot_product_attention or torch.nn.attention.varlen."
    )
