"""Records each allocation and release that code makes on the fake GPU."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.errors import BatchFinderError
from batchfinder.recording import fake_values, kernel_memory, operands, user_kernels
from batchfinder.recording.fake_device import (
    DEVICE_TYPE,
    Stream,
    clock,
    current_stream,
    local_part,
    parts_of,
    plain_parts_of,
)
from batchfinder.recording.kernel_memory import aten
from batchfinder.recording.reductions import reductions_of
from batchfinder.recording.value_reads import is_asserted, plausible_scalar
from batchfinder.simulator.reductions import Reduction, Scratch
from batchfinder.simulator.trace import StageMark, TraceStructure, tensor_in_words

_ITEM = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
# Operators of derivatives, by what is in the name of their nodes.
_DERIVES_IN_PLACE = {
    aten.scatter.src: "",
    aten.sub.Tensor: "BinaryCrossEntropyWithLogits",
    aten.mul.Tensor: "BinaryCrossEntropyWithLogits",
}
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__  # what calls the autograd engine, in torch 2.13


def _scratch_sizes(scratch: kernel_memory.Scratch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """The scratch of a kernel on another compute capability; None where that has no kernel for these arguments."""
    try:
        return scratch(*args, **kwargs)
    except BatchFinderError:
        return None


def sums_gradients_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an addition is the autograd engine's, to be done in the memory of its first gradient.

    A tensor that several operators have read gets a gradient from each. The engine adds the second to the first in
    place, where nothing else has that or shares its memory; of fake tensors it always makes a new one. It is told from
    other callers by the frame that its operators come from (a derivative that adds tensors itself, such as that of
    `var_mean`, comes from there too), and whether it has the last reference by the counts of torch 2.13: beside the
    engine's, a tensor has three for this call, and its storage one for the object that Python makes of it here.

    Source: `can_accumulate_inplace` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/input_buffer.cpp.
    """
    if func is not aten.add.Tensor or torch.is_grad_enabled() or not _called_by_engine():
        return False
    first, second = args[:2]
    return (
        type(first) is type(second) is FakeTensor
        and first.device.type == DEVICE_TYPE
        and first.layout is second.layout is torch.strided
        and first.shape == second.shape
        and first.dtype == second.dtype
        and torch.ops.aten.is_non_overlapping_and_dense(first)
        and first._use_count() == 4  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(first.untyped_storage()._cdata) == 2
    )


def derives_in_place(func: Any) -> bool:
    """Whether a derivative goes on in the tensor that it has just made, where it makes another one of fake tensors.

    That of `sort`, `topk` and `max` along a dimension puts gradients in their places among zeros, and that of binary
    cross-entropy subtracts the target from the sigmoid. Sources: `value_selecting_reduction_backward_symint` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/ReduceOps.cpp, and
    `binary_cross_entropy_with_logits_backward` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/FunctionsManual.cpp.
    """
    if func not in _DERIVES_IN_PLACE or torch.is_grad_enabled() or not _called_by_engine():
        return False
    node = torch._C._current_autograd_node()
    return node is not None and _DERIVES_IN_PLACE[func] in node.name()


def _called_by_engine() -> bool:
    """Whether C++ code of a backward has called the operator for which the recorder asks, and no Python code has."""
    caller: FrameType | None = sys._getframe(3)
    while caller is not None and caller.f_globals["__name__"].startswith(("torch._compile", "torch._dynamo.")):
        caller = caller.f_back  # which PyTorch has put around the method of a mode
    return caller is not None and caller.f_code is _RUN_BACKWARD


class AllocationRecorder(TorchDispatchMode):
    """Watches every operator; a storage seen for the first time on the fake GPU is an allocation.

    The release is noticed when the storage object dies, which on CPython is the moment its last reference goes, as it
    is on a GPU.

    Args:
        capability: the simulated GPU's compute capability, for the kernels' own memory.
        module: names the module at work.
        on_operator: called with each operator's name before it runs.
        sums_in_place: whether autograd sums gradients as `sums_gradients_in_place` says, or anew each time.
        others: compute capabilities on which the recording may turn out to be the same.

    Attributes:
        sharded: the class of tensors that are spread over several GPUs, once there are any.
        paused: while not 0, what runs takes no memory on a GPU: PyTorch works out shapes.
        alike: for each other compute capability, the size there of each block that differs, by the block. One whose
            kernels take another number of blocks is dropped.
        reductions: as of a `Trace`.
    """

    # Else PyTorch would say of `flex_attention` that it knows no rule for this class.
    supports_higher_order_operators = True

    def __init__(
        self,
        capability: tuple[int, int],
        module: Callable[[], str],
        on_operator: Callable[[str], None] = lambda name: None,
        sums_in_place: bool = False,
        others: Iterable[tuple[int, int]] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums_in_place = sums_in_place
        self._workspace_bytes = kernel_memory.cublas_workspace_bytes(capability)
        self._scratch_on = {
            other: kernel_memory.attention_scratch(other) | operands.convolution_scratch(other) for other in others
        }
        self.alike: dict[tuple[int, int], dict[int, int]] = {other: {} for other in others}
        self._module = module
        self._on_operator = on_operator
        self.sharded: type | None = None
        self.paused = 0
        self._names: dict[Any, str] = {}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._emptied: dict[int, weakref.ref[Any]] = {}  # storages that have given back their memory and live on
        self._constants: dict[int, float] = {}
        self._workspaces: set[bool] = set()
        self.order: list[int] = []
        self.marks: list[StageMark] = []
        self.sizes: list[int] = []
        self.operators: list[str] = []
        self.modules: list[str] = []
        self.kinds: list[str] = []
        self.streams: list[int] = []
        self._used_by_others: set[int] = set()  # blocks that record_stream was called of
        self._pending: dict[int, int] = {}  # those that are released, and the clock's moment then
        self._free_completed: list[tuple[int, int]] = []
        self._shapes: list[tuple[torch.dtype, tuple[int, ...]] | None] = []
        self.reductions: list[tuple[int, Reduction]] = []
        self.unmodelled: dict[str, None] = {}
        self.flops = 0
        self.values = fake_values.KnownValues()

    @property
    def blocks(self) -> int:
        """How many have been allocated so far."""
        return len(self.sizes)

    def mark(self, step: int, stage: str, micro_batch: int = 0) -> None:
        """A stage starts here."""
        self.marks.append(StageMark(len(self.order), step, stage, micro_batch))

    def structure(self) -> TraceStructure:
        """All that was seen, but for the sizes."""
        never = [(len(self.order), block) for block in self._pending]
        return TraceStructure(
            tuple(self.order),
            tuple(self.marks),
            tuple(self.operators),
            tuple(self.modules),
            tuple(self.kinds),
            tuple(self.streams) if any(self.streams) else (),
            tuple(sorted([*self._free_completed, *never])),
        )

    def shapes(self) -> tuple[str, ...]:
        """For each block its first tensor's type and dimensions, as in `Trace.shapes`."""
        words: dict[tuple[torch.dtype, tuple[int, ...]] | None, str] = {None: ""}
        for shape in self._shapes:
            if shape is not None and shape not in words:
                words[shape] = tensor_in_words(*shape)
        return tuple([words[shape] for shape in self._shapes])

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str, module: str) -> None:
        """Say what the storages of these tensors are for and which module holds them.

        Those on other devices are passed over. Of a tensor that wraps others (torchao's quantized ones) it is theirs.
        """
        for tensor in tensors:
            if tensor is None or tensor.device.type != DEVICE_TYPE:
                continue
            for part in plain_parts_of(tensor):
                block = self._block_of(part)
                if block >= 0:
                    self.kinds[block] = kind
                    self.modules[block] = module

    def note(self, tensors: Iterable[torch.Tensor], name: str) -> None:
        """Take these tensors as allocated now by `name`, where they have not been seen yet."""
        for tensor in map(local_part, tensors):
            if tensor.device.type == DEVICE_TYPE:
                self._note_storage(tensor, aten.empty_strided.default, name, ())

    @contextmanager
    def watching_storages(self) -> Iterator[None]:
        """See what no operator does: storages give back their memory and take it again; `record_stream`.

        FSDP does both with gathered parameters. `resize_` of a CUDA storage takes the new memory on the current stream
        before it gives back the old,
        https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Resize.cpp (`resize_bytes_cuda`).
        """
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            identity = storage._cdata
            ours = identity in self._live or identity in self._emptied
            resize(storage, size)
            if ours:
                seen = self._live.pop(identity, None)
                if size:
                    self._emptied.pop(identity, None)
                    self._follow(storage, self._allocate(size, "UntypedStorage.resize_", "communication"))
                else:
                    self._emptied[identity] = weakref.ref(storage, lambda _: self._emptied.pop(identity, None))
                if seen is not None:
                    self._release(seen[0])
            return storage

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            block = self._block_of(tensor)
            if block >= 0 and stream.number != self.streams[block]:
                self._used_by_others.add(block)

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        FakeTensor.record_stream = record_stream  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            del FakeTensor.record_stream

    def label_alive(self, first: int, kind: str) -> None:
        """Say what the blocks from number `first` on that are still alive are for."""
        for block, _ in self._live.values():
            if block >= first and self.kinds[block] == "temporary":
                self.kinds[block] = kind

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile while this is active, which sees what the compiled code does, not the compiling."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Autograd asks for tensors' devices more often than for anything else.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs["device"] = user_kernels.on_fake_device(kwargs["device"])
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
            if isinstance(func, HigherOrderOperator):
                raise user_kernels.not_compiled(name)
        if self.sharded is not None and self.sharded in types:
            if not name.startswith(("aten._foreach_", "aten._fused_")) or "norm" in name:
                return NotImplemented  # it comes back here with what this rank has of it
            if kernel_memory.only_writes(func, args):
                return None
            return self._run_on_shards(func, args, kwargs)
        if self.paused:
            return func(*args, **kwargs)
        self._on_operator(name)
        if func is _ITEM:
            if args[0].device.type == DEVICE_TYPE:
                current_stream().synchronize()
            values = self.values.of(args[0]) if isinstance(args[0], FakeTensor) else None
            if values is not None:
                with no_dispatch():
                    return values.item()
            if args[0].device.type == DEVICE_TYPE:
                block = self._block_of(args[0])
                made_by = self.operators[block] if block >= 0 else ""
                value = plausible_scalar(args[0], made_by, self._constants.get(block))
                if not value and args[0].dtype is torch.bool and is_asserted():
                    value = True
                origin = made_by or "an unknown operator"
                counted = block in self._constants and made_by == "aten.sum.default"  # a number for each size
                said = "that of all elements" if counted else value
                self.unmodelled[f"a value read from a tensor made by {origin} is taken to be {said}"] = None
                return value
            known = fake_values.known_element(args[0])
            if known is not None:
                return known
        if func is aten.equal.default and args[0].device.type == DEVICE_TYPE:
            equal = fake_values.are_equal(args[0], args[1], self._constant_of)
            if equal is None:
                self.unmodelled["two tensors that are compared by torch.equal are taken to be equal"] = None
            return equal is not False
        if kernel_memory.only_writes(func, args):
            self.values.forget(func, args, kwargs)
            return None
        if (self._sums_in_place and sums_gradients_in_place(func, args)) or derives_in_place(func):
            self.values.forget(func, args, kwargs)
            return args[0]
        of_values = fake_values.output_of_values(func, args, kwargs, self.values)
        if of_values is not None:
            output, known_values, places = of_values
            if places and args[0].device.type == DEVICE_TYPE:
                self.order.append(~self._allocate(places, name, "temporary"))
            if not known_values:
                self.unmodelled[f"{name}: its output is taken to be as large as it can get"] = None
        elif user_kernels.is_custom(func):
            output = self._run_custom(func, name, args, kwargs)
        else:
            output = kernel_memory.REPLACED.get(func, func)(*args, **kwargs)
        on_device = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == DEVICE_TYPE
        scratch = kernel_memory.SCRATCH.get(func) if on_device else None
        sizes = [] if scratch is None else scratch(*args, **kwargs)
        blocks: list[int] = []
        if func in kernel_memory.SCRATCH_FIRST:
            blocks = [self._allocate(size, name, "temporary") for size in sizes]
        made = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        for tensor in reversed(made) if func is aten.native_dropout.default else made:  # the mask comes first
            if isinstance(tensor, torch.Tensor):
                self._note_storage(tensor, func, name, args)
        if func in kernel_memory.MATRIX_PRODUCTS and args[0].device.type == DEVICE_TYPE:
            in_backward = torch._C._current_autograd_node() is not None
            if in_backward not in self._workspaces:
                self._workspaces.add(in_backward)
                block = self._allocate(self._workspace_bytes, name, "workspace")
                for other, different in self.alike.items():
                    different[block] = kernel_memory.cublas_workspace_bytes(other)
        self.values.follow(func, args, kwargs, output)
        self.flops += kernel_memory.product_flops(func, args, kwargs, output)
        written = args[0] if func._schema.is_mutable and args else None
        if isinstance(written, torch.Tensor) and written.device.type == DEVICE_TYPE:
            # It holds no constant any more, unless it was filled with one.
            block = self._block_of(written)
            self._constants.pop(block, None)
            if func is aten.zero_.default:
                self._constants[block] = 0.0
            elif func is aten.fill_.Scalar and isinstance(args[1], (bool, int, float)):
                self._constants[block] = float(args[1])
        if scratch is not None:
            if func not in kernel_memory.SCRATCH_FIRST:
                blocks = [self._allocate(size, name, "temporary") for size in sizes]
            self.order.extend(~block for block in reversed(blocks))
            for other in list(self.alike):
                on_other = self._scratch_on[other].get(func, scratch)
                taken = None if on_other is scratch else _scratch_sizes(on_other, args, kwargs)
                if on_other is not scratch and (taken is None or len(taken) > len(blocks)):
                    del self.alike[other]
                elif taken is not None:  # what is not allocated there takes nothing
                    self.alike[other].update(itertools.zip_longest(blocks, taken, fillvalue=0))
        for reduction in reductions_of(func, args, kwargs) if on_device else ():
            own = [self._allocate(0, name, "temporary") for _ in Scratch._fields]
            self.reductions.append((own[0], reduction))
            self.order.extend(~block for block in reversed(own))
        return output

    def _run_on_shards(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer's operator on lists of shards, element by element.

        DTensor would do the same, after it has worked out for every tensor that there is nothing to send, which takes
        longer than the rest of a recording.
        """
        with self:
            made = func(*pytree.tree_map(local_part, args), **pytree.tree_map(local_part, kwargs))
        kind: Any = self.sharded
        return [
            kind(local, whole._spec, requires_grad=False) if isinstance(whole, kind) else local
            for local, whole in zip(made or (), args[0], strict=True)
        ]

    def _run_custom(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A custom operator: its kernel where that is Python's and needs no values, else its fake kernel."""
        kernel = user_kernels.python_kernel(func)
        if kernel is not None:
            position, first, workspaces = len(self.order), len(self.sizes), set(self._workspaces)
            try:
                with self:
                    return kernel(*args, **kwargs)
            except BatchFinderError:
                raise
            except Exception:  # it needs values, or calls something compiled; its frames go before the block does
                pass
            if all(block < first for block, _ in self._live.values()):
                # What it allocated until then is forgotten.
                self.order[position:] = [event for event in self.order[position:] if event < 0 and ~event < first]
                for column in (self.sizes, self.operators, self.modules, self.kinds, self.streams, self._shapes):
                    del column[first:]
                self._workspaces = workspaces
                self.reductions = [(block, reduction) for block, reduction in self.reductions if block < first]
                self.alike = {
                    other: {block: size for block, size in sizes.items() if block < first}
                    for other, sizes in self.alike.items()
                }
        self.unmodelled[f"{name}: what its kernel takes besides its outputs"] = None
        try:
            return kernel_memory.REPLACED.get(func, func)(*args, **kwargs)
        except Exception as error:
            raise user_kernels.without_fake_kernel(name, error, self._module()) from None

    def _allocate(self, size: int, name: str, kind: str) -> int:
        for block, moment in list(self._pending.items()):
            if moment <= clock.host_waited_for:
                del self._pending[block]
                self._free_completed.append((len(self.order), block))
        block = len(self.sizes)
        self.sizes.append(size)
        self.operators.append(name)
        self.modules.append(self._module())
        self.kinds.append(kind)
        self.streams.append(current_stream().number)
        self._shapes.append(None)
        self.order.append(block)
        return block

    def _note_storage(self, tensor: torch.Tensor, func: Any, name: str, args: tuple[Any, ...]) -> None:
        if tensor.device.type != DEVICE_TYPE:
            return
        if tensor.layout is torch.sparse_coo:
            for part in parts_of(tensor):
                self._note_storage(part, func, name, args)
            return
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._live:
            return
        # What is on a stream of its own is sent or received.
        block = self._allocate(storage.nbytes(), name, "communication" if current_stream().number else "temporary")
        self._shapes[block] = (tensor.dtype, tuple(tensor.shape))
        constant = fake_values.constant_of(func, args, self._constant_of)
        if constant is not None:
            self._constants[block] = constant

        self._follow(storage, block)

    def _follow(self, storage: torch.UntypedStorage, block: int) -> None:
        """Note the release of a block when its storage dies."""
        identity = storage._cdata

        def released(_: Any, identity: int = identity, block: int = block) -> None:
            del self._live[identity]
            self._release(block)

        self._live[identity] = (block, weakref.ref(storage, released))

    def _release(self, block: int) -> None:
        self.order.append(~block)
        if block in self._used_by_others:
            self._pending[block] = clock.now()

    def _block_of(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided:
            return -1
        live = self._live.get(tensor.untyped_storage()._cdata)
        return live[0] if live else -1

    def _constant_of(self, tensor: torch.Tensor) -> float | None:
        """What every element of a tensor's storage is known to be."""
        if tensor.device.type == DEVICE_TYPE:
            return self._constants.get(self._block_of(tensor))
        # A number that is on its way to the fake GPU, or takes part in an operator there.
        real = type(tensor) is torch.Tensor and tensor.numel() == 1 and not tensor.is_complex()
        return float(tensor) if real else None
