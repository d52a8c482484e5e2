"""The state of training in this process: everything reachable from some objects, captured and put back in place."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from batchfinder.snapshot.records import (
    SHARED_TYPES,
    Kind,
    Record,
    Visit,
    attributes_of,
    kind_of,
    record_buffer,
    record_cell,
    record_generator,
    record_items,
    record_mapping,
    record_object,
)
from batchfinder.snapshot.tensors import PLAIN, StorageRecord, TensorRecord

_RECORDS: dict[Kind, Callable[[Any, Visit], Record]] = {
    Kind.MAPPING: record_mapping,
    Kind.LIST: record_items,
    Kind.SET: record_items,
    Kind.DEQUE: record_items,
    Kind.BYTES: record_buffer,
    Kind.ARRAY: record_buffer,
    Kind.RANDOM: record_generator,
    Kind.CELL: record_cell,
    Kind.OBJECT: record_object,
}
_FOLLOWED_FROM_A_DATASET = (Kind.OBJECT, Kind.UNGUARDED, Kind.DATASET, Kind.RANDOM)
_CONTAINERS: dict[Kind, Callable[[Any], Iterator[Any]]] = {
    Kind.LIST: list.__iter__,
    Kind.TUPLE: lambda item: (tuple if isinstance(item, tuple) else frozenset).__iter__(item),
    Kind.MAPPING: lambda item: iter(dict.values(item)),
}
_FEW = 256  # items: transforms or datasets; a longer container in a dataset is taken to hold its samples
_PLAIN_CONTAINERS = ("builtins", "collections", "array", "random", "numpy", "torch._C")
_LIBRARIES = ("torch.", "numpy.", "functools", "contextlib")


class Walk:
    """One walk over the graph of objects, which records each of them once.

    Args:
        roots: where to start. They are captured by value whatever their class.
        left_alone: objects to leave as they are, and classes whose objects to leave.

    Attributes:
        records: of containers and objects; objects first, so that an element has its hash again before a set is
            refilled.
        left_out: classes of the objects that may change and cannot be put back.
        reached: identities of the objects whose attributes were recorded, and which the records keep alive.
    """

    def __init__(self, roots: Iterable[Any], left_alone: Iterable[Any]) -> None:
        self.tensors: list[TensorRecord] = []
        self.left_out: set[str] = set()
        self.reached: set[int] = set()
        self.storages: dict[int, StorageRecord] = {}
        self._objects: list[Record] = []
        self._containers: list[Record] = []
        self._tensors: dict[int, TensorRecord] = {}
        self._kinds: dict[type, Kind] = {}
        left_alone = list(left_alone)
        self._classes = tuple(item for item in left_alone if isinstance(item, type))
        # Held so that no id is given to another object before the walk is over.
        self._seen: dict[int, Any] = {id(item): item for item in left_alone}
        self._glanced: dict[int, Any] = {}  # containers in datasets, of which some items were visited
        self._pending: list[tuple[Kind, Any]] = []
        for root in roots:
            if self._kind(root) in (Kind.UNGUARDED, Kind.LEFT_OUT) and id(root) not in self._seen:
                self._seen[id(root)] = root
                self._pending.append((Kind.OBJECT, root))
            else:
                self.visit(root)
        while self._pending:
            self._record(*self._pending.pop())
        self.records = [*self._objects, *self._containers]

    def visit(self, item: Any) -> Any:
        """Record an object, if it was not seen before; returns what stands for it in another record."""
        kind = self._kind(item)
        if kind is Kind.IMMUTABLE:
            return item
        if kind is Kind.TENSOR:
            record = self._tensors.get(id(item))
            if record is None:
                self._seen[id(item)] = item
                # Known before its attributes are followed: a tensor may be its own attribute.
                record = self._tensors[id(item)] = TensorRecord.__new__(TensorRecord)
                record.__init__(item, self.visit, self.storages)  # type: ignore[misc]
                self.tensors.append(record)
                if type(item) not in PLAIN:
                    self._objects.append(record_object(item, self.visit))
            return record
        if id(item) not in self._seen:
            self._seen[id(item)] = item
            self._pending.append((kind, item))
        return item

    def _kind(self, item: Any) -> Kind:
        cls = type(item)
        kind = self._kinds.get(cls)
        if kind is None:
            kind = self._kinds[cls] = Kind.IMMUTABLE if issubclass(cls, self._classes) else kind_of(cls)
        return kind

    def _record(self, kind: Kind, item: Any) -> None:
        """Record one object that was not seen before."""
        if kind is Kind.UNGUARDED:
            guarded = any(issubclass(type(value), SHARED_TYPES) for value in (attributes_of(item) or {}).values())
            kind = Kind.LEFT_OUT if guarded else Kind.OBJECT
        if kind is Kind.LEFT_OUT:
            self.left_out.add(f"{type(item).__module__}.{type(item).__qualname__}")
        elif kind is Kind.DATASET:
            self._objects.append(record_object(item, self._visit_unless_bulk))
        elif kind in _RECORDS:
            if kind is Kind.CELL:
                try:
                    item.cell_contents  # noqa: B018
                except ValueError:  # the variable has no value yet
                    return
            record = _RECORDS[kind](item, self.visit)
            if kind is Kind.OBJECT:
                self._objects.append(record)
                self.reached.add(id(item))
            else:
                self._containers.append(record)
                # Subclasses of these may have attributes as well.
                if kind is not Kind.CELL and type(item).__module__ not in _PLAIN_CONTAINERS:
                    self._objects.append(record_object(item, self.visit))
        else:  # followed, but not captured itself
            if kind is Kind.TUPLE:
                base: Any = tuple if isinstance(item, tuple) else frozenset
                parts = base.__iter__(item)
            elif kind is Kind.PARTIAL:
                parts = (item.func, item.args, item.keywords)
            elif kind is Kind.METHOD:
                parts = (item.__func__, item.__self__)
            else:
                parts = () if (item.__module__ or "").startswith(_LIBRARIES) else item.__closure__ or ()
            for part in parts:
                self.visit(part)
        if kind is Kind.OBJECT and issubclass(type(item), torch.jit.ScriptModule):
            self.left_out.add("torch.jit.ScriptModule")
            for tensor in (*item.parameters(), *item.buffers()):
                self.visit(tensor)

    def _visit_unless_bulk(self, item: Any) -> Any:
        kind = self._kind(item)
        if kind in _FOLLOWED_FROM_A_DATASET:
            return self.visit(item)
        if kind in _CONTAINERS and len(item) <= _FEW and id(item) not in self._glanced:
            self._glanced[id(item)] = item
            for part in _CONTAINERS[kind](item):
                self._visit_unless_bulk(part)
        return item


class TrainingState:
    """Everything that real training steps change, as it was when captured.

    The roots, and whatever can be reached from them through attributes, slots, containers, closures, bound methods
    and partials, is put back *in place*: the same objects hold the same things again, down to the bits of a storage.

    - By value: modules, optimizers, schedulers, scalers, loaders and samplers, and every other object whose class is
      written in Python (attributes, slots and class); dict, list, set, deque, bytearray, array and their subclasses;
      NumPy arrays; generators of random numbers (Python's, NumPy's, torch's); the variables of closures; tensors, with
      shape, type, storage, flags, gradient, hooks and version.
    - Through, without being captured: tuples, frozensets, partials, bound methods, functions (to their closures).
    - A `torch.utils.data.Dataset` is data: its own attributes come back, and the generators and objects among them;
      what its containers, arrays and tensors hold is left alone.
    - By reference: numbers, strings and other constants, enums, classes, modules of code, weak references, locks;
      objects of classes of the standard library, of NumPy and of torch's internals.
    - By reference, and named in `left_out`: iterators (a loader's among them), files, weak collections,
      handlers of loggers, processes, threads, sockets, and any other object that is not a root
      and holds a lock, a thread, a process or a socket in an attribute: others use it at the same time.

    The process's own state comes back too (`ProcessState`).

    Not restored: class attributes and module-level variables; defaults and attributes of functions; files, and whatever
    left the process; state kept in C++ without a handle in Python (DDP's reducer, a ScriptModule's attributes, hooks on
    `AccumulateGrad`, cuDNN's choices, the caching allocator's segments); the order in which a set that changed is
    iterated; the graph of a tensor that had one and was written to, or of a view that a step gave one; the type of a
    NumPy array that changed it in place.

    Copies are on the host; the device holds nothing for them. A plain tensor and its storage are held weakly: if a step
    frees it, it is free, and a new one takes its place. Views, tensors with a graph or hooks, and tensors in tuples are
    held. Objects are expected to be used by this thread alone between the capture and the last restoration.

    Attributes:
        nbytes: host memory that the copies of tensors, arrays and bytes take; small Python objects are not counted.
        left_out: names of the classes whose objects were reached, may change, and are not put back.
    """

    def __init__(self, roots: Iterable[Any], left_alone: Iterable[Any] = ()) -> None:
        self._process = ProcessState()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            _synchronize_all()
            # The dictionaries of hooks that are called for every module and every optimizer.
            shared = [item for owner in (modules, optimizers) for item in vars(owner).items()]
            hooks = [value for name, value in shared if name.startswith("_global_") and value is not None]
            walk = Walk([*roots, *hooks], [*left_alone, TrainingState])
        self._records, self._tensors, self._storages = walk.records, walk.tensors, list(walk.storages.values())
        self.nbytes = (
            sum(record.nbytes for record in self._records)
            + sum(tensor.nbytes for tensor in self._tensors)
            + sum(storage.nbytes for storage in self._storages)
        )
        self.left_out = tuple(sorted(walk.left_out))
        self._reached = walk.reached

    @classmethod
    def capture(cls, *roots: Any, left_alone: Iterable[Any] = ()) -> TrainingState:
        """Capture the state of everything that can be reached.

        Args:
            roots: modules, optimizers, schedulers, scalers and whatever else holds state. They are captured by value
                whatever their class.
            left_alone: objects to leave as they are, and classes whose objects to leave; nothing is reached through
                them.
        """
        return cls(roots, left_alone)

    def reaches(self, item: object) -> bool:
        """Whether a module, an optimizer or another object of a class written in Python is put back by this."""
        return id(item) in self._reached

    def restore(self) -> None:
        """Put everything back. May be called any number of times.

        After a failure, call it outside the `except` block: the failed step's tensors live as long as its traceback.
        What the step made is released before anything is allocated; devices are synchronized before they are written.
        """
        with uninterrupted():
            self._restore()

    def _restore(self) -> None:
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            _synchronize_all()
            try:
                for tensor in self._tensors:
                    tensor.hold()
                for tensor in self._tensors:
                    tensor.clear()
                for record in self._records:
                    record.restore()
                for tensor in self._tensors:
                    tensor.restore_data()
                for storage in self._storages:
                    storage.restore()
                for tensor in self._tensors:
                    tensor.restore_flags()
            finally:
                # Hold only what the next restoration needs.
                for tensor in self._tensors:
                    tensor.held = None
                for storage in self._storages:
                    storage.held = None
            _synchronize_all()
        self._process.restore()


@contextmanager
def restore_on_exit(*roots: Any, left_alone: Iterable[Any] = ()) -> Iterator[TrainingState]:
    """Put everything reachable from the roots back on exit, however it ends.

    Yields:
        The state, for restoring it in between as well. Catch a failure inside, and it can be restored at a time when
        the failed step's tensors are gone.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> before = model.weight.item()
        >>> with restore_on_exit(model):
        ...     _ = torch.nn.init.zeros_(model.weight)
        >>> model.weight.item() == before
        True
    """
    state = TrainingState.capture(*roots, left_alone=left_alone)
    try:
        yield state
    finally:
        state.restore()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the end, where it does what it would have done."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():  # not Python's to put back
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def _synchronize_all() -> None:
    """Wait for every device in use: a kernel still running may read what is copied, or write what is restored."""
    for name in ("cuda", "xpu"):
        device = getattr(torch, name)
        if device.is_initialized():
            for index in range(device.device_count()):
                device.synchronize(index)
    if torch.backends.mps.is_available():
        torch.mps.synchronize()


ReadWrite = tuple[Callable[[], Any], Callable[[Any], Any]]
_ACCELERATORS = ("cuda", "xpu")  # the devices that have generators of their own and start when first used


class ProcessState:
    """Random numbers and settings of the process. Nothing is initialised to read them.

    A device that was not started when the state was captured and is when it is restored gets the generators that it
    started with: their seed, from the beginning.
    """

    def __init__(self) -> None:
        # How to read and write every setting of the process that a step may change.
        c: Any = torch._C
        numpy: Any = sys.modules.get("numpy")
        settings: list[ReadWrite] = [
            (torch.get_default_dtype, torch.set_default_dtype),
            (torch.is_grad_enabled, c._set_grad_enabled),
            (torch.get_num_threads, torch.set_num_threads),
            (c._is_multithreading_enabled, c._set_multithreading_enabled),
            (
                lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
                lambda value: torch.set_anomaly_enabled(*value),
            ),
            (
                lambda: (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                ),
                lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
            ),
        ]
        for name in ("enabled", "benchmark", "deterministic"):
            settings.append((getattr(c, f"_get_cudnn_{name}"), getattr(c, f"_set_cudnn_{name}")))
        for name in ("flash", "math", "mem_efficient", "cudnn"):
            settings.append((getattr(c, f"_get_{name}_sdp_enabled"), getattr(c, f"_set_sdp_use_{name}")))
        # Two older settings, which set some of those below as well. Neither can be read while the new ones say
        # otherwise.
        settings += [
            (partial(_unless_mixed, torch.get_float32_matmul_precision), torch.set_float32_matmul_precision),
            (partial(_unless_mixed, c._get_cudnn_allow_tf32), c._set_cudnn_allow_tf32),
        ]
        matmul = torch.backends.cuda.matmul
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
            settings.append((partial(getattr, matmul, name), partial(setattr, matmul, name)))
        for which in _FLOAT32_PRECISIONS if hasattr(c, "_get_fp32_precision_getter") else ():  # since PyTorch 2.9
            reading = partial(c._get_fp32_precision_getter, *which)
            settings.append((reading, partial(c._set_fp32_precision_setter, *which)))
        for name in ("cpu", "cuda", "xpu", "mps"):
            settings += [
                (partial(torch.is_autocast_enabled, name), partial(torch.set_autocast_enabled, name)),
                (partial(torch.get_autocast_dtype, name), partial(torch.set_autocast_dtype, name)),
            ]
        settings.append((torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled))
        if numpy is not None:
            settings.append((numpy.geterr, lambda value: numpy.seterr(**value)))
        self._settings = [((read, write), read()) for read, write in settings]

        generators: list[ReadWrite] = [(random.getstate, random.setstate), (torch.get_rng_state, torch.set_rng_state)]
        if numpy is not None:
            generators.append((partial(numpy.random.get_state, legacy=False), numpy.random.set_state))
        for name in _ACCELERATORS:
            device = getattr(torch, name)
            if device.is_initialized():
                for index in range(device.device_count()):
                    generators.append(
                        (partial(device.get_rng_state, index), partial(device.set_rng_state, device=index))
                    )
        if torch.backends.mps.is_available():
            generators.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
        self._random = [(write, read()) for read, write in generators]
        self._started = [name for name in _ACCELERATORS if getattr(torch, name).is_initialized()]

    def restore(self) -> None:
        """Put them back; a setting that has not changed is not written."""
        for (read, write), value in self._settings:
            if value is not None and read() != value:  # None: torch refused to read it
                write(value)
        for write, value in self._random:
            write(value)
        for name in _ACCELERATORS:
            if name not in self._started and getattr(torch, name).is_initialized():
                for generator in getattr(torch, name).default_generators:
                    generator.manual_seed(generator.initial_seed())
        # A weight that autocast has cast stays in its cache while the outermost autocast lasts.
        torch.clear_autocast_cache()


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """An older setting of float32 precision; None where torch refuses to read it."""
    try:
        return read()
    except RuntimeError:
        return None


# From the general to the particular, as setting one sets those below it.
_FLOAT32_PRECISIONS = (
    ("generic", "all"),
    *(("cuda", operator) for operator in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operator) for operator in ("all", "matmul", "conv", "rnn")),
)
