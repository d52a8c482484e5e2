"""Records each allocation and release that PyTorch's caching allocator makes, on the stub.

The allocator's own history has the sizes and their order. Which operator an allocation is from it notes with each event
(its "user metadata", on whichever thread it runs), and the number of its allocations and releases so far says where in
the history a stage begins; and an operator, in older versions of PyTorch, whose events have no metadata.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from batchfinder.recording.cuda_build import values
from batchfinder.recording.fake_device import parts_of, plain_parts_of
from batchfinder.recording.kernel_memory import product_flops
from batchfinder.simulator.trace import StageMark, TraceStructure, tensor_in_words

_set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)
_Tensor = tuple[torch.dtype, tuple[int, ...]]
_NO_OPERATOR = "aten.empty_strided.default"
"""What makes a tensor outside of all operators that are followed: a factory, which PyTorch dispatches by itself."""
_RESIZE = "UntypedStorage.resize_"
"""What gives a gathered parameter of FSDP its memory."""


@dataclass(frozen=True, slots=True)
class _Label:
    """What is known at a position in the history: of the blocks at some addresses, or of all from number `first` on."""

    position: int
    kind: str
    tensors: Mapping[int, _Tensor] = field(default_factory=dict)  # by the addresses of their storages
    module: str = ""
    first: int | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator that ran: its name, the module at work, and its outputs by the addresses of their storages."""

    name: str
    module: str
    outputs: dict[int, _Tensor]


class AllocationHistory:
    """What the allocator of the current card does while this is watching.

    Args:
        module: names the module at work.
        on_operator: called with each operator's name before it runs.

    Attributes:
        flops: of matrix products, convolutions and attention so far.
    """

    def __init__(self, module: Callable[[], str], on_operator: Callable[[str], None] = lambda name: None) -> None:
        self._module = module
        self._on_operator = on_operator
        self._thread = threading.local()
        self._calls: list[_Call] = []
        self._labels: list[_Label] = []
        self._marks: list[StageMark] = []
        self._names: dict[Any, str] = {}
        self._called_at: dict[int, int] = {}  # positions in the history, and the calls they are of; without metadata
        self.flops = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the allocator and the operators. The card must have been used by nothing else before."""
        torch.cuda.init()
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=sys.maxsize)
        values.around = self._around
        resize = torch.UntypedStorage.resize_

        def gather(storage: torch.UntypedStorage, size: int) -> Any:
            return self._around(_RESIZE, resize, (storage, size), {})

        torch.UntypedStorage.resize_ = gather  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            values.around = None

    def _around(self, op: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; what it calls in turn is part of it."""
        if getattr(self._thread, "within", False):
            return run(*args, **kwargs)
        name = self._names.get(op)
        if name is None:
            name = self._names[op] = str(op)
        self._on_operator(name)
        outputs: dict[int, _Tensor] = {}
        number = len(self._calls)
        self._calls.append(_Call(name, self._module(), outputs))
        self._thread.within = True
        first = self._position() if _set_metadata is None else 0
        if _set_metadata is not None:
            _set_metadata(str(number))
        try:
            made = run(*args, **kwargs)
        finally:
            if _set_metadata is None:
                self._called_at.update(dict.fromkeys(range(first, self._position()), number))
            else:
                _set_metadata("")
            self._thread.within = False
        for each in values.leaves((made,)):
            if each.device.type == "cuda":
                outputs.update(
                    {part.untyped_storage().data_ptr(): (each.dtype, tuple(each.shape)) for part in parts_of(each)}
                )
        self.flops += product_flops(op, args, kwargs, made)
        return made

    # -- what it is told ---------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """How many have been allocated so far."""
        return int(torch.cuda.memory_stats_as_nested_dict()["allocation"]["all"]["allocated"])

    def _position(self) -> int:
        counts = torch.cuda.memory_stats_as_nested_dict()["allocation"]["all"]
        return int(counts["allocated"] + counts["freed"])

    def mark(self, step: int, stage: str, micro_batch: int = 0) -> None:
        """A stage starts here."""
        self._marks.append(StageMark(self._position(), step, stage, micro_batch))

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str, module: str) -> None:
        """Say what the storages of these tensors are for and which module holds them."""
        named: dict[int, _Tensor] = {}
        for tensor in tensors:
            if tensor is None or tensor.device.type != "cuda":
                continue
            for part in plain_parts_of(tensor):
                named[part.untyped_storage().data_ptr()] = part.dtype, tuple(part.shape)
        self._labels.append(_Label(self._position(), kind, named, module))

    def label_alive(self, first: int, kind: str) -> None:
        """Say what the blocks from number `first` on that are still alive are for."""
        self._labels.append(_Label(self._position(), kind, first=first))

    # -- what it has seen --------------------------------------------------------------------------------------------

    def collect(self) -> tuple[TraceStructure, tuple[int, ...], tuple[str, ...]]:
        """The history as a trace has it: all but sizes; for each block the bytes asked for; and its first tensor."""
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        order: list[int] = []
        sizes: list[int] = []
        operators: list[str] = []
        modules: list[str] = []
        kinds: list[str] = []
        shapes: list[str] = []
        streams: list[int] = []
        within: list[bool] = []  # whether a block is none of its operator's outputs
        live: dict[int, int] = {}
        waiting: dict[int, tuple[int, int]] = {}  # blocks that other streams use still: the block, and its release
        completed: list[tuple[int, int]] = []
        numbers = {0: 0}
        labels = iter(self._labels)
        label = next(labels, None)
        for event in itertools.chain(history, [None]):
            while label is not None and (event is None or label.position <= len(order)):
                if label.first is not None:
                    named = [block for block in live.values() if block >= label.first and kinds[block] == "temporary"]
                else:
                    named = [live[address] for address in label.tensors if address in live]
                    for address in label.tensors.keys() & live.keys():
                        shapes[live[address]] = shapes[live[address]] or tensor_in_words(*label.tensors[address])
                for block in named:
                    kinds[block] = label.kind
                    if label.first is None:
                        modules[block] = label.module
                label = next(labels, None)
            if event is None:
                break
            action, address = event["action"], event["addr"]
            if action == "alloc":
                number = self._called_at.get(len(order)) if _set_metadata is None else event["user_metadata"]
                call = None if number in (None, "") else self._calls[int(number)]
                block = live[address] = len(sizes)
                order.append(block)
                sizes.append(event["size"])
                operators.append(call.name if call else _NO_OPERATOR)
                modules.append(call.module if call else "")
                streams.append(numbers.setdefault(event["stream"], len(numbers)))
                # On several GPUs: on its way from shards or to them.
                gathered = streams[-1] or operators[-1] == _RESIZE
                kinds.append("communication" if gathered else "temporary")
                shape = call.outputs.get(address) if call else None
                shapes.append(tensor_in_words(*shape) if shape else "")
                within.append(call is not None and shape is None)
            elif action == "free_requested":
                block = live.pop(address)
                waiting[address] = block, len(order)
                order.append(~block)
            elif action == "free_completed":
                block, released = waiting.pop(address)
                if released + 1 < len(order):
                    completed.append((len(order), block))
        completed += [(len(order), block) for block, _ in waiting.values()]
        for block in live.values():
            if within[block] and kinds[block] in ("temporary", "activation", "input"):
                kinds[block] = "workspace"  # cuBLAS's, which stays
        structure = TraceStructure(
            tuple(order),
            tuple(self._marks),
            tuple(operators),
            tuple(modules),
            tuple(kinds),
            tuple(streams) if any(streams) else (),
            tuple(sorted(completed)),
        )
        return structure, tuple(sizes), tuple(shapes)
