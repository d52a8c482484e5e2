"""`torch.compile` on the fake GPU: the memory of the code that Inductor generates for a card.

Dynamo and AOTAutograd trace the user's code on the fake GPU, whose operators are those of CUDA. Before Inductor's own
passes see a graph its tensors are renamed to `cuda:0`: by that name Inductor decides about padding, reductions and
fusion, and by the card's properties how far it splits them. So what it generates is what it generates for the card, and
that code runs, on the fake GPU: its allocations come here, and launching a kernel does nothing. Nothing is autotuned,
as there is nothing to measure: `assumptions` says what was decided without.

What is replaced is private in PyTorch; each place names the file of torch 2.13.0 that it is in.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch._dynamo import device_interface, trace_rules
from torch._higher_order_ops import triton_kernel_wrap
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import Library
from torch.utils import _pytree as pytree

from batchfinder.devices import resident_threads, typical_gpu
from batchfinder.errors import MissingExtra, RecordingFailed
from batchfinder.recording.fake_device import DEVICE_TYPE
from batchfinder.recording.recorder import AllocationRecorder

LEAST_CAPABILITY = (7, 0)
"""Triton's oldest cards: `GPUTooOldForTriton` in
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/scheduler.py."""

_CUDA = torch.device("cuda", 0)
_CUDA_TYPE, _META_TYPE = 1, 14  # c10::DeviceType::CUDA and Meta
# What would be measured, or would run CUDA graphs: `list_mode_options` in torch/_inductor/__init__.py has the modes.
_NOT_HERE = {
    "triton.cudagraphs": "CUDA graphs' private memory pool",
    "max_autotune": "Inductor's autotuning: matrix products are taken to stay with cuBLAS",
    "max_autotune_gemm": "Inductor's autotuning: matrix products are taken to stay with cuBLAS",
    "max_autotune_pointwise": "",
    "coordinate_descent_tuning": "",
}


class _NoKernel:
    """A compiled kernel, or a function that is one: launching it does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> _NoKernel:
        return self


class InductorForCard:
    """What makes Inductor compile for a card of one compute capability in this process, which has no such card.

    Attributes:
        assumptions: what was taken to be so in the graphs compiled so far, in words.
    """

    def __init__(self, capability: tuple[int, int], device: torch.device) -> None:
        self._device = device
        self._capability = capability
        self._properties = _properties_of(capability)
        self.assumptions: dict[str, None] = {}
        prepare()
        self._describe_device()
        self._replace_kernels()
        self._allow_user_kernels()
        self._replace_allocations()
        self._rename_before_passes()

    def _describe_device(self) -> None:
        """Register the card by PyTorch's interface for devices of others, and code that selects no device."""
        from torch._inductor.codegen.common import (
            DeviceOpOverrides,
            get_device_op_overrides,
            register_device_op_overrides,
        )

        properties, capability = self._properties, self._capability

        class Card(device_interface.DeviceInterface):
            class Worker:
                set_device = staticmethod(lambda device: None)
                current_device = staticmethod(lambda: 0)
                get_device_properties = staticmethod(lambda device=None: properties)

            class device(contextlib.nullcontext):  # type: ignore[type-arg]
                pass

            current_device = staticmethod(lambda: 0)
            set_device = staticmethod(lambda device: None)
            device_count = staticmethod(lambda: 1)
            is_available = staticmethod(lambda: True)
            synchronize = staticmethod(lambda device=None: None)
            get_raw_stream = staticmethod(lambda device_idx: 0)
            exchange_device = maybe_exchange_device = staticmethod(lambda device: 0)
            get_device_properties = staticmethod(lambda device=None: properties)
            get_compute_capability = staticmethod(lambda device=None: 10 * capability[0] + capability[1])
            is_triton_capable = staticmethod(lambda device=None: True)
            raise_if_triton_unavailable = staticmethod(lambda device=None: None)
            is_bf16_supported = staticmethod(lambda including_emulation=False: capability >= (8, 0))
            is_dtype_supported = staticmethod(lambda dtype, including_emulation=False: True)

        class NoDevice(DeviceOpOverrides):
            def import_get_raw_stream_as(self, name: str) -> str:
                return f"{name} = lambda index: 0"

            def set_device(self, device_idx: int) -> str:
                return "None"

            def synchronize(self) -> str:
                return "None"

            def device_guard(self, device_idx: int) -> str:
                return "__import__('contextlib').nullcontext()"

        # torch/_dynamo/trace_rules.py: what eager parts of a compiled model call of this package is not compiled.
        trace_rules.add("batchfinder.recording")
        device_interface.get_registered_device_interfaces()  # PyTorch's own, which else replace these
        for name in (_CUDA.type, str(_CUDA), self._device.type, str(self._device)):
            device_interface.register_interface_for_device(name, Card)
        get_device_op_overrides(_CUDA.type)
        register_device_op_overrides(_CUDA.type, NoDevice())

    def _replace_kernels(self) -> None:
        """Compile no kernel, measure nothing, and read no file that another run has left."""
        from torch._inductor import async_compile
        from torch._inductor.fx_passes import pad_mm
        from torch.utils import _triton

        # torch/utils/_triton.py; it remembers what it was told before there was a card, and asks the driver for it
        _triton.has_triton.cache_clear()
        _triton.triton_hash_with_backend = lambda: ""  # type: ignore[assignment]
        for name in ("triton", "cpp", "cpp_pybinding"):  # torch/_inductor/async_compile.py
            setattr(async_compile.AsyncCompile, name, lambda *args, **kwargs: _NoKernel())

        def should_pad(match: Any, left: torch.Tensor, right: torch.Tensor, *_: Any) -> bool:
            # Tensor cores want rows of a multiple of 16 bytes. Rows are along the dimension that is dense in memory.
            aligned = pad_mm.get_alignment_size(left)
            rows = [stride for tensor in (left, right) for stride in tensor.stride() if stride != 1]
            pads = any(length % aligned for length in (*rows, right.size(-1)))
            what = "padded where rows are not aligned" if pads else "not padded where rows are aligned"
            self.assumptions[
                f"Inductor would measure whether padded matrix products are faster: taken to be {what}"
            ] = None
            return pads

        # torch/_inductor/fx_passes/pad_mm.py; times both on the card
        pad_mm._should_pad = should_pad  # type: ignore[assignment]

        # Where attention with dropout is computed again, its generator's state is kept, on the CPU.
        def save_state(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            with mode:
                return torch.empty(16, dtype=torch.uint8, device="cpu"), operator(*args, **kwargs)

        def with_state(mode: Any, state: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            with mode:
                return operator(*args, **kwargs)

        rng_prims.run_and_save_rng_state.py_impl(AllocationRecorder)(save_state)
        rng_prims.run_with_rng_state.py_impl(AllocationRecorder)(with_state)

    def _allow_user_kernels(self) -> None:
        """Let graphs hold Triton kernels of the user's, of which Inductor wants to know what they write into.

        It reads that from what Triton makes of a kernel for a card, which the driver is asked for.
        """
        import triton
        from triton.backends.compiler import GPUTarget

        major, minor = self._capability
        target = GPUTarget("cuda", 10 * major + minor, 32)
        triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
        # torch/_higher_order_ops/triton_kernel_wrap.py does the same for CUDA.
        autocast = DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
        triton_kernel_wrap.triton_kernel_wrapper_mutation.fallthrough(autocast)
        triton_kernel_wrap.triton_kernel_wrapper_functional.fallthrough(autocast)

    def _replace_allocations(self) -> None:
        """Send the generated code's allocations to the fake GPU, and constants of the card to the CPU."""
        guards: Any = torch._C._dynamo.guards  # what torch/_inductor/codegen/wrapper.py calls

        def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device=self._device)

        def reinterpret(
            tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
        ) -> torch.Tensor:
            return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

        guards._empty_strided_cuda = empty_strided
        guards._reinterpret_tensor = reinterpret  # the C++ one makes no fake tensor

    def _rename_before_passes(self) -> None:
        """Have graphs renamed to CUDA before the passes of torch/_inductor/compile_fx.py, and back after them."""
        from torch._inductor import compile_fx

        partition, inner, forward = compile_fx.partition_fn, compile_fx.compile_fx_inner, compile_fx.compile_fx_forward

        def partition_renamed(graph: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            with self._for_cuda(graph, joint_inputs):
                return partition(graph, joint_inputs, **kwargs)

        def compile_renamed(graph: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
            with self._for_cuda(graph, example_inputs):
                return inner(graph, example_inputs, **kwargs)

        # A graph that needs no backward is not split in two, and its passes run here.
        def forward_renamed(graph: fx.GraphModule, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with self._for_cuda(graph, example_inputs):
                return forward(graph, example_inputs, *args, **kwargs)

        compile_fx.partition_fn = partition_renamed  # type: ignore[assignment]
        compile_fx.compile_fx_forward = forward_renamed  # type: ignore[assignment]
        self._compile_inner = compile_renamed

    def compile(self, model: Any, inputs: Any, settings: Mapping[str, Any]) -> Any:
        """What torch.compile's backend does with a graph of Dynamo's, by the settings of Inductor that it was given."""
        from torch._inductor import compile_fx, config

        card = self._properties
        self.assumptions[
            f"Inductor splits reductions for the {card.multi_processor_count} multiprocessors of {card.name}"
        ] = None
        current = config.get_config_copy()
        for name, left_out in _NOT_HERE.items():
            if left_out and settings.get(name, current[name]):
                self.assumptions[left_out] = None
        settings = {**settings, **dict.fromkeys(_NOT_HERE, False)}
        return compile_fx.compile_fx(model, inputs, self._compile_inner, config_patches=settings)

    @contextlib.contextmanager
    def _for_cuda(self, graph: fx.GraphModule, inputs: Any) -> Iterator[None]:
        """While Inductor works on a graph: its tensors are on `cuda:0`, and that is what PyTorch says there is."""
        renamed: list[FakeTensor] = []

        def rename(value: Any) -> Any:
            if isinstance(value, FakeTensor) and value.fake_device == self._device:
                value.fake_device = _CUDA
                renamed.append(value)
            return _CUDA if isinstance(value, torch.device) and value.type == DEVICE_TYPE else value

        for module in graph.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                pytree.tree_map_(rename, node.meta.get("val"))
                node.args = fx.node.map_aggregate(node.args, rename)
                node.kwargs = fx.node.map_aggregate(node.kwargs, rename)
        pytree.tree_map_(rename, list(inputs))
        try:
            with _cuda_present(self._properties):
                yield
        finally:
            for tensor in renamed:
                tensor.fake_device = self._device


def _properties_of(capability: tuple[int, int]) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` says of the typical card of a compute capability."""
    card = typical_gpu(capability)
    return SimpleNamespace(
        name=card.name,
        gcnArchName=card.name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=card.multiprocessors,
        max_threads_per_multi_processor=resident_threads(capability),
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        total_memory=card.memory_bytes,
    )


@contextlib.contextmanager
def _cuda_present(properties: SimpleNamespace) -> Iterator[None]:
    """While Inductor decides: `torch.cuda` answers as if there were such a card."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "device": contextlib.nullcontext,
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    before = {name: getattr(torch.cuda, name) for name in answers}
    # PyTorch's table of device guards, by `c10::DeviceType`; indexing a tensor on CUDA asks for one.
    # https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/impl/DeviceGuardImplInterface.h
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META_TYPE + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    cuda_guard = guards[_CUDA_TYPE]
    try:
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
        guards[_CUDA_TYPE] = guards[_META_TYPE]  # one that does nothing
        yield
    finally:
        guards[_CUDA_TYPE] = cuda_guard
        for name, answer in before.items():
            setattr(torch.cuda, name, answer)


def _on_cpu(make: Callable[..., torch.Tensor], *sizes: Any, **how: Any) -> torch.Tensor:
    options = {name: how[name] for name in ("dtype", "memory_format") if how.get(name) is not None}
    return make(*sizes, **options, device="cpu")


def device_guards() -> Any:
    """PyTorch's table of device guards, by `c10::DeviceType`; as an array of pointers that can be written.

    https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/impl/DeviceGuardImplInterface.h
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * (_META_TYPE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


@functools.cache
def prepare() -> Library:
    """What takes Inductor seconds and is the same for all cards: for the process that forks for each recording.

    The library returned must be held.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    config.compile_threads = 1  # before the import of what starts processes to compile in
    config.fx_graph_cache = functorch_config.enable_autograd_cache = False
    # An exception in the backward ends the process; and a CUDA generator's state cannot be kept here.
    functorch_config.force_non_lazy_backward_lowering = True
    functorch_config.graphsafe_rng_functionalization = False
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.fx_passes import joint_graph, post_grad

    # Inductor folds constants by computing them where they are: in torch/_inductor/fx_passes/joint_graph.py.
    library = Library("aten", "IMPL", "CUDA")
    library.impl("empty.memory_format", lambda size, **how: _on_cpu(torch.empty, size, **how))
    library.impl("empty_strided", lambda size, stride, **how: _on_cpu(torch.empty_strided, size, stride, **how))
    # torch/_subclasses/fake_tensor.py: no fake tensor of Inductor's patterns is to wake up a device.
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[method-assign, assignment]
    init_backend_registration()
    with _cuda_present(_properties_of((8, 0))):
        joint_graph.lazy_init(_CUDA)
        post_grad.lazy_init()
    return library


_for_card = functools.cache(InductorForCard)


def register(capability: tuple[int, int], device: torch.device, assumptions: dict[str, None]) -> InductorForCard:
    """Let `torch.compile` work on the fake GPU, for good, as on a card of this compute capability.

    What is taken to be so in the graphs compiled from now on is added to `assumptions`, in words.

    Raises:
        MissingExtra: Triton is not installed.
        RecordingFailed: Triton does not know cards as old as this one.
    """
    try:
        import triton  # noqa: F401
    except ImportError:
        raise MissingExtra("triton", "compile", "recording a compiled model") from None
    if capability < LEAST_CAPABILITY:
        raise RecordingFailed(
            f"torch.compile needs compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer, for Triton; "
            f"this is {capability[0]}.{capability[1]}. Ask for a newer --gpu, or for the model as it is, not compiled."
        )
    compiler = _for_card(capability, device)
    compiler.assumptions = assumptions
    return compiler
