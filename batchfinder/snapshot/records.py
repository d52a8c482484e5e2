"""The contents of containers and objects, recorded and put back in place.

Each record reads and writes with the methods of the built-in base class: no code of the user's runs, except hashing
where a dictionary or set has to be refilled. Where nothing changed, nothing is written, so a container that is being
iterated over may be restored.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import logging
import multiprocessing.process
import operator
import pathlib
import random
import re
import socket
import subprocess
import sys
import threading
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from batchfinder.snapshot.tensors import TensorRecord

# Returns what stands for an object in a record: its TensorRecord for a tensor, else the object itself.
Visit = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of one object.

    Attributes:
        restore: puts the contents back into the object.
        nbytes: host memory of a copy that the record holds.
    """

    restore: Callable[[], None]
    nbytes: int = 0


def record_mapping(mapping: dict[Any, Any], visit: Visit) -> Record:
    """The items of a dictionary, in their order."""
    # An OrderedDict keeps an order of its own, which the methods of dict neither see nor update.
    base: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict
    items = [(visit(key), visit(value)) for key, value in base.items(mapping)]

    def restore() -> None:
        then = [(_resolve(key), _resolve(value)) for key, value in items]
        now = list(base.items(mapping))
        if _same([key for key, _ in now], [key for key, _ in then]):
            changed = [new for old, new in zip(now, then, strict=True) if old[1] is not new[1]]
        else:
            base.clear(mapping)
            changed = then
        for key, value in changed:
            base.__setitem__(mapping, key, value)

    return Record(restore)


def record_items(container: Any, visit: Visit) -> Record:
    """The items of a list, a set or a deque."""
    base: Any = next(base for base in (list, set, deque) if issubclass(type(container), base))
    items = [visit(item) for item in base.__iter__(container)]

    def restore() -> None:
        then = [_resolve(item) for item in items]
        now = list(base.__iter__(container))
        if {id(item) for item in now} != {id(item) for item in then} if base is set else not _same(now, then):
            base.clear(container)
            (base.update if base is set else base.extend)(container, then)

    return Record(restore)


def record_buffer(buffer: Any, visit: Visit) -> Record:
    """The bytes of a bytearray or an `array.array`, or the elements of a NumPy array."""
    if isinstance(buffer, bytearray | array.array):
        copy: Any = buffer[:]

        def restore() -> None:
            if bytes(memoryview(buffer)) != bytes(memoryview(copy)):
                buffer[:] = copy

        return Record(restore, len(memoryview(buffer).cast("B")))

    if buffer.dtype.hasobject:
        for element in buffer.flat:
            visit(element)
    if not buffer.flags.writeable:
        return Record(lambda: None)
    elements = buffer.copy()

    def restore_elements() -> None:
        if buffer.shape != elements.shape:
            buffer.resize(elements.shape, refcheck=False)
        buffer[...] = elements

    return Record(restore_elements, elements.nbytes)


def record_generator(generator: Any, visit: Visit) -> Record:
    """The state of a generator of random numbers: torch's, Python's or NumPy's."""
    if isinstance(generator, torch.Generator):
        return Record(partial(generator.set_state, generator.get_state()))  # type: ignore[arg-type]
    if isinstance(generator, random.Random):
        return Record(partial(generator.setstate, generator.getstate()))
    numpy = sys.modules["numpy"]
    if isinstance(generator, numpy.random.RandomState):
        return Record(partial(generator.set_state, generator.get_state(legacy=False)))
    bits = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
    return Record(partial(setattr, bits, "state", bits.state))


def record_cell(cell: types.CellType, visit: Visit) -> Record:
    """The variable of a closure, which has a value."""
    contents = visit(cell.cell_contents)

    def restore() -> None:
        cell.cell_contents = _resolve(contents)

    return Record(restore)


def record_object(owner: Any, visit: Visit) -> Record:
    """The class, the attributes and the slots of an object."""
    cls = type(owner)
    attributes = attributes_of(owner)
    attributes_record = None if attributes is None else record_mapping(attributes, visit)
    declaring = (vars(base) for base in cls.__mro__ if "__slots__" in vars(base))
    members = [member for names in declaring for member in names.values() if type(member) is types.MemberDescriptorType]
    slots = [(slot, value if (value := _read(slot, owner)) is _UNSET else visit(value)) for slot in members]

    def restore() -> None:
        if type(owner) is not cls:  # as lazy modules change theirs in the first forward
            object.__setattr__(owner, "__class__", cls)
        if attributes_record is not None:
            if attributes_of(owner) is not attributes:
                object.__setattr__(owner, "__dict__", attributes)
            attributes_record.restore()
        for slot, then in slots:
            now, value = _read(slot, owner), _resolve(then)
            if now is not value and value is _UNSET:
                slot.__delete__(owner)
            elif now is not value:
                slot.__set__(owner, value)

    return Record(restore)


_UNSET = object()


def attributes_of(owner: Any) -> dict[str, Any] | None:
    """The instance dictionary of an object, past any property of that name."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def _read(slot: Any, owner: Any) -> Any:
    """The value of a slot; `_UNSET` for none."""
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _UNSET


def _resolve(item: Any) -> Any:
    """The object that a record's item stands for."""
    return item.held if type(item) is TensorRecord else item


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


class Kind(enum.Enum):
    """How an object is captured."""

    IMMUTABLE = "by reference: nothing in it changes in a step"
    LEFT_OUT = "by reference: it may change, and cannot be put back"
    TENSOR = "shape, type, flags, gradient and storage"
    MAPPING = "its keys and values, in order"
    LIST = "its items"
    SET = "its members"
    DEQUE = "its items, as a deque"
    BYTES = "its bytes"
    ARRAY = "its elements"
    RANDOM = "the state of the generator"
    TUPLE = "by reference; its items are followed"
    PARTIAL = "by reference; what it binds is followed"
    METHOD = "by reference; its object is followed"
    FUNCTION = "by reference; what its closure holds is followed"
    CELL = "its contents"
    OBJECT = "its attributes"
    UNGUARDED = "its attributes, unless it holds a lock or a thread"
    DATASET = "its attributes, but not the bulk data in them"


# Part of the training loop whatever module defines it.
_ALWAYS_OBJECTS = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader, Sampler)

_IMMUTABLE_TYPES: tuple[type, ...] = (
    *(int, float, complex, str, bytes, types.NoneType, types.EllipsisType, type, range, slice, enum.Enum, re.Pattern),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, uuid.UUID),
    *(decimal.Decimal, fractions.Fraction, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.CodeType, logging.Logger),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)

_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)

# An object that holds one of these shares itself with another thread, another process or the outside.
SHARED_TYPES: tuple[type, ...] = (
    *_LOCKS,
    threading.Event,
    threading.Thread,
    threading.local,
    multiprocessing.process.BaseProcess,
    subprocess.Popen,
    socket.socket,
)

# Of the standard library, only these are plain holders of data.
_STANDARD_OBJECTS = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)

# Files, and weak collections: to write back what they held would be wrong.
_EXTERNAL_STATE_MODULES = frozenset(
    ("_io", "io", "weakref", "_weakrefset", "tempfile", "mmap", "sqlite3", "logging", "asyncio", "concurrent", "queue")
)

# What FSDP keeps of a module (which parameters are gathered, what is under way) changes in a step, and stays as it was
# where a step fails: all of torch.distributed is internal but for fsdp and the composable APIs.
_TORCH_INTERNALS = re.compile(
    r"torch\.(_|fx|jit|distributed(?!\.(fsdp|_composable))|autograd|cuda|xpu|mps|multiprocessing|package|export|library|onnx|overrides|profiler"
    r"|utils\.(_|hooks|weak|checkpoint|tensorboard)|utils\.data\.(_utils|dataloader))"
)


def kind_of(cls: type) -> Kind:
    """Choose how objects of a class are captured: by the first base class listed here, else by the class's module."""
    families: list[tuple[type | tuple[type, ...], Kind]] = [
        (torch.Tensor, Kind.TENSOR),
        (_ALWAYS_OBJECTS, Kind.OBJECT),
        (Dataset, Kind.DATASET),
        (_IMMUTABLE_TYPES, Kind.IMMUTABLE),
        (_LOCKS, Kind.IMMUTABLE),
        (SHARED_TYPES, Kind.LEFT_OUT),
        (dict, Kind.MAPPING),
        (list, Kind.LIST),
        (set, Kind.SET),
        (collections.deque, Kind.DEQUE),
        ((bytearray, array.array), Kind.BYTES),
        ((tuple, frozenset), Kind.TUPLE),
        (functools.partial, Kind.PARTIAL),
        (types.MethodType, Kind.METHOD),
        (types.FunctionType, Kind.FUNCTION),
        (types.CellType, Kind.CELL),
        (random.SystemRandom, Kind.IMMUTABLE),
        ((torch.Generator, random.Random), Kind.RANDOM),
    ]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        generators = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
        families += [
            ((numpy.generic, numpy.dtype), Kind.IMMUTABLE),
            (numpy.memmap, Kind.LEFT_OUT),
            (numpy.ndarray, Kind.ARRAY),
            (generators, Kind.RANDOM),
        ]
    families += [(Iterator, Kind.LEFT_OUT), (_STANDARD_OBJECTS, Kind.UNGUARDED)]
    for family, kind in families:
        if issubclass(cls, family):
            return kind

    if any(base.__module__.partition(".")[0] in _EXTERNAL_STATE_MODULES for base in cls.__mro__):
        return Kind.LEFT_OUT
    package = cls.__module__.partition(".")[0]
    if package in sys.stdlib_module_names or package == "numpy" or _TORCH_INTERNALS.match(f"{cls.__module__}."):
        return Kind.IMMUTABLE
    return Kind.UNGUARDED
