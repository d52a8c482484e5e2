"""The fake GPU: a device with no memory and no arithmetic, on which shapes and lifetimes are real.

It is a PrivateUse1 backend made of fake tensors. PyTorch treats that backend like CUDA in most places (bool dropout
masks, foreach optimizers, the autograd engine's device threads), works with CPU-only and CUDA builds alike, and, unlike
`FakeTensorMode` on "cuda", runs a backward without a GPU. Registering it makes it the accelerator of the whole
process and cannot be undone, so it belongs in a child process.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.library import Library
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

DEVICE_TYPE = "pretend"
_CUDA = 1  # c10::DeviceType::CUDA

SMALL_BYTES = 1 << 20
"""Up to this size a CPU tensor is real."""

SMALL_WHOLE_NUMBERS_BYTES = 16 << 20
"""The size up to which an integer or boolean CPU tensor is real: models branch on token ids, masks and indices."""

ONE_KERNEL_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
"""Operators that PyTorch composes of others for a backend without a kernel of its own, and that are one kernel on CUDA.

SiLU's backward then makes one tensor of the input's size, where the composition has six alive at one time. A test
compares the list with the dispatch entries of native_functions.yaml.
"""


class Stream:
    """A stream of the fake GPU: nothing runs on it, but memory belongs to the one that was current as it was allocated.

    Attributes:
        number: 0 for the default stream; the others count from 1 in the order in which they are made.
    """

    _numbers = itertools.count()

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.number = next(self._numbers)

    def record_event(self, event: Event | None = None) -> Event:
        """An event that stands for the work so far."""
        event = event or Event()
        event.record()
        return event

    def wait_stream(self, stream: object) -> None:
        """Return at once, as does everything else that lets a stream wait."""

    wait_event = wait_stream

    def synchronize(self, device: object = None) -> None:
        """Let the host wait for the work so far."""
        clock.host_waited_for = clock.now()

    def query(self) -> bool:
        """All work is done."""
        return True


class Clock:
    """How far the fake GPU is behind the host, which a block has to wait for that another stream has used.

    The host goes on as long as it does not wait itself, and the GPU does work in the order in which it is given it,
    whichever stream it is on.

    Attributes:
        host_waited_for: work of this moment and before is done.
    """

    def __init__(self) -> None:
        self.host_waited_for = 0
        self._moments = itertools.count(1)

    def now(self) -> int:
        """Later than all moments before."""
        return next(self._moments)


clock = Clock()


class Event(torch.Event):
    """An event on a stream of the fake GPU. Asked whether it has passed, it says yes.

    One of PyTorch's, since `fully_shard` gives it to the accelerator's own stream where a unit was gathered for a
    backward that does not come, as of frozen layers, and that stream takes what it gets for one, unchecked. As it was
    never recorded there, nothing waits for it.
    """

    moment = 0

    def __new__(cls, *args: object, **kwargs: object) -> Event:
        """Make one that belongs to the fake GPU."""
        return super().__new__(cls, DEVICE_TYPE)

    def record(self, stream: object = None) -> None:
        """Stand for the work so far."""
        self.moment = clock.now()

    def wait(self, stream: object = None) -> None:
        """Return at once, as does everything else that lets a stream wait."""

    def synchronize(self) -> None:
        """Let the host wait."""
        clock.host_waited_for = max(clock.host_waited_for, self.moment)

    def query(self) -> bool:
        """It has passed."""
        return True

    def elapsed_time(self, other: object) -> float:
        """Nothing takes time."""
        return 0.0


_current_streams = [Stream()]  # the default one, then one for each `with stream(...)` that is entered


def current_stream(device: object = None) -> Stream:
    """The stream that memory is allocated on now."""
    return _current_streams[-1]


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    _current_streams.append(stream or _current_streams[-1])
    try:
        yield
    finally:
        _current_streams.pop()


# What `torch.<DEVICE_TYPE>` must answer. Autocast and activation checkpointing ask for the supported types,
# `fully_shard` for all that has to do with streams.
_DEVICE_MODULE = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
    Stream=Stream,
    Event=Event,
    stream=_on_stream,
    current_stream=current_stream,
    default_stream=lambda device=None: _current_streams[0],
    set_device=lambda device: None,
    synchronize=_current_streams[0].synchronize,
    empty_cache=lambda: None,
)


_ITEM = torch.ops.aten._local_scalar_dense.default
_MAKES_SPARSE = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default


class FakeDeviceMode(FakeTensorMode):
    """Fake tensors on the fake GPU, and large ones on the CPU; small tensors on the CPU stay real.

    Models compute with small CPU tensors as they are built (`torch.linspace(0, rate, depth).tolist()`) and read what
    came out. Weights of any size that matters take no memory.
    """

    _composing = False

    @property
    def avoid_device_init(self) -> bool:
        """Never ask a real accelerator to wake up."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator for real where all that it reads and makes is small and on the CPU."""
        kwargs = kwargs or {}
        # An operator that PyTorch composes of others for fake tensors, as a copy to the CPU, comes back here for each.
        if func is torch.ops.aten.index.Tensor and not self._composing:
            args = (args[0], _without_masks(args[1]), *args[2:])
        if self._composing or any(type(arg) is FakeTensor for arg in args):
            return self._fake(func, types, args, kwargs)
        if func is _ITEM and type(args[0]) is torch.Tensor and args[0].device.type == "cpu":
            return func(*args)  # the count of steps, which optimizers keep for each parameter and read in each step
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" for tensor in tensors) or any(
            isinstance(leaf, torch.device) and leaf.type != "cpu" for leaf in leaves
        ):
            return self._fake(func, types, args, kwargs)
        # Fake ones could not be made of real sparse tensors, whose parts are real.
        sparse = func is _MAKES_SPARSE or any(tensor.layout is not torch.strided for tensor in tensors)
        if not sparse and (not tensors or not (func.is_view or func._schema.is_mutable)):
            try:
                fake = self._fake(func, types, args, kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException):
                pass  # it reads values, which are there
            else:
                made = [leaf for leaf in pytree.tree_leaves(fake) if isinstance(leaf, torch.Tensor)]
                if any(tensor.untyped_storage().nbytes() > _real_bytes(tensor) for tensor in made):
                    return fake
        return func(*args, **kwargs)

    def _prep_args_for_hash(self, result: list[object], args: Any, *more: Any) -> None:
        # Of FakeTensorMode in torch 2.13, which spells out 17 fields of every tensor: a quarter of a recording's time.
        key = _cache_key(args, self)
        if key is None:
            super()._prep_args_for_hash(result, args, *more)
        else:
            result.append(key)

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        composing, self._composing = self._composing, True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._composing = composing


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _cache_key(args: Any, mode: FakeTensorMode) -> tuple[object, ...] | None:
    """What an operator's fake outputs depend on, where its arguments are dense fake tensors and plain values."""
    parts: list[object] = [type(args)]
    if isinstance(args, dict):
        parts.append(tuple(args))
        args = args.values()
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.fake_mode is not mode or arg.constant is not None or arg.layout is not torch.strided:
                return None
            parts += arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.untyped_storage().nbytes()
            parts += arg.fake_device, arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference()
        elif kind in _PLAIN:
            parts += kind, arg  # 1 and 1.0 are equal, and make tensors of different types
        elif kind in (list, tuple, torch.Size):
            inner = _cache_key(arg, mode)
            if inner is None:
                return None
            parts.append(inner)
        else:
            return None
    return tuple(parts)


def _without_masks(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices in place of real masks: how many elements a mask selects cannot be asked of a fake one."""
    plain: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or isinstance(index, FakeTensor) or index.dtype is not torch.bool:
            plain.append(index)
        else:
            with no_dispatch():
                plain += index.nonzero().unbind(1)
    return plain


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with a storage that one consists of: its indices and values where it is sparse, else itself."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; any other tensor as it is."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def plain_parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of all that a tensor wraps: of this rank's share of a DTensor, of torchao's scales and values."""
    local = local_part(tensor)
    if not is_traceable_wrapper_subclass(local):
        return parts_of(local)
    names, _ = local.__tensor_flatten__()
    return tuple(part for name in names for part in plain_parts_of(getattr(local, name)))


def _real_bytes(tensor: torch.Tensor) -> int:
    weights = tensor.is_floating_point() or tensor.is_complex()
    return SMALL_BYTES if weights else SMALL_WHOLE_NUMBERS_BYTES


@functools.cache
def register() -> torch.device:
    """Make the fake GPU this process's accelerator, for good, and return the device to put models and batches on."""
    # PyTorch 2.6 has none, and this module is imported with it, too.
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename=DEVICE_TYPE, backend_module=_DEVICE_MODULE)

    def never_called(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel of the fake GPU was called outside of its fake mode")

    # These kernels never run, since the fake mode computes the outputs.
    library = Library("aten", "IMPL", "PrivateUse1")
    for name in ONE_KERNEL_ON_CUDA:
        library.impl(name, never_called)
    both = [Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1")]
    for each, name in itertools.product(both, ("softmax", "log_softmax")):
        each.impl(f"{name}.int", functools.partial(_softmax, getattr(torch.ops.aten, f"_{name}").default))
    _DEVICE_MODULE.kernels = [library, *both]  # the registrations last as long as this does
    # Optimizers choose their foreach variants by the exact type of the parameters: let them take fake ones too.
    for types in (_foreach_utils._foreach_supported_types, torch_optimizer._foreach_supported_types):
        if FakeTensor not in types:
            types.append(FakeTensor)
    return torch.device(DEVICE_TYPE, 0)


def _softmax(kernel: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """CUDA's kernel reads fp16 and writes fp32 in one; all other types are converted first.

    Source: `softmax` and `log_softmax` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/SoftMax.cpp.
    """
    at_once = x.dtype is torch.float16 and dtype is torch.float32
    output: torch.Tensor = kernel(x if at_once or dtype is None else x.to(dtype), dim, at_once)
    return output


def disable_cuda() -> None:
    """In a fork of a process that may use CUDA: let PyTorch see no CUDA backend, for good.

    A CUDA call in such a fork fails, and the autograd engine makes one at the first backward, in a thread for each
    device, which ends the process. It passes over a backend that is missing in this table of device guards, and an
    operator on a CUDA tensor then raises a RuntimeError.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/engine.cpp (set_device),
    https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/impl/DeviceGuardImplInterface.h
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        guards[_CUDA] = None
    torch.cuda.is_available = lambda: False  # else optimizers ask the current stream whether it captures a graph


def hide_from_transformers() -> None:
    """Tell transformers, if it is loaded, that no tensor is fake.

    It builds attention masks that it would skip on a GPU when it believes that it is being traced.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if module is not None and hasattr(module, "is_fake_tensor"):
        setattr(module, "is_fake_tensor", lambda tensor: False)  # noqa: B010


def fake_copy(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the same shape and strides on the fake GPU, where a fake mode is active; only metadata are read."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=device)


def move_module(
    module: nn.Module,
    move_tensor: Callable[[torch.Tensor, torch.dtype | None], torch.Tensor],
    dtype: torch.dtype | None = None,
    on_moved: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """What `module.to(device, dtype)` does, in the same order, for modules of real or fake CPU tensors.

    `move_tensor` makes the copy of one on the device, `fake_copy` as a rule; what it returns as it is stays. A `dtype`
    is for floating-point tensors only. Tied parameters and shared buffers stay shared. The order (children, then
    parameters, then buffers) is that of `torch.nn.Module._apply`,
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py. `on_moved` is called with each module
    whose tensors have been moved.
    """
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            copy = move_tensor(tensor, dtype if tensor.is_floating_point() else None)
            if isinstance(tensor, nn.Parameter) and copy is not tensor:
                copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = copy
        return moved[id(tensor)]

    seen: set[nn.Module] = set()

    def visit(current: nn.Module) -> None:
        # A module that several hold is moved once: as in PyTorch, where the second `to` finds nothing to do.
        if current in seen:
            return
        seen.add(current)
        for child in current.children():
            visit(child)
        for store in (current._parameters, current._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = move(tensor)  # type: ignore[assignment]
        on_moved(current)

    visit(module)
    moved.clear()  # `visit` refers to itself: what was moved would stay until a garbage collection
