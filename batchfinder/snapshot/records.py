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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from batchfinder.snapshot.tensors import TensorRecord

# Returns what stands for an object in a record: its TensorRecord for a tensor, else the object itself.
Visit = Callable[[Any], Any]


class Record(Protocol):
    """The contents of one object."""

    nbytes: int

    def restore(self) -> None:
        """Put the contents back into the object."""
        ...


class MappingRecord:
    """The items of a dictionary, in their order."""

    nbytes = 0

    def __init__(self, mapping: dict[Any, Any], visit: Visit) -> None:
        self._mapping = mapping
        # An OrderedDict keeps an order of its own, which the methods of dict neither see nor update.
        self._base: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict
        self._items = [(visit(key), visit(value)) for key, value in self._base.items(mapping)]

    def restore(self) -> None:
        mapping, base = self._mapping, self._base
        then = [(_resolve(key), _resolve(value)) for key, value in self._items]
        now = list(base.items(mapping))
        if _same([key for key, _ in now], [key for key, _ in then]):
            changed = [new for old, new in zip(now, then, strict=True) if old[1] is not new[1]]
        else:
            base.clear(mapping)
            changed = then
        for key, value in changed:
            base.__setitem__(mapping, key, value)


class ListRecord:
    """The items of a list."""

    nbytes = 0

    def __init__(self, items: list[Any], visit: Visit) -> None:
        self._list = items
        self._items = [visit(item) for item in list.__iter__(items)]

    def restore(self) -> None:
        then = _resolve_all(self._items)
        if not _same(list(list.__iter__(self._list)), then):
            list.__setitem__(self._list, slice(None), then)


class SetRecord:
    """The elements of a set."""

    nbytes = 0

    def __init__(self, elements: set[Any], visit: Visit) -> None:
        self._set = elements
        self._elements = [visit(element) for element in set.__iter__(elements)]

    def restore(self) -> None:
        then = _resolve_all(self._elements)
        if {id(element) for element in set.__iter__(self._set)} != {id(element) for element in then}:
            set.clear(self._set)
            set.update(self._set, then)


class DequeRecord:
    """The items of a deque."""

    nbytes = 0

    def __init__(self, items: deque[Any], visit: Visit) -> None:
        self._deque = items
        self._items = [visit(item) for item in deque.__iter__(items)]

    def restore(self) -> None:
        then = _resolve_all(self._items)
        if not _same(list(deque.__iter__(self._deque)), then):
            deque.clear(self._deque)
            deque.extend(self._deque, then)


class BytesRecord:
    """The bytes of a bytearray or an `array.array`."""

    def __init__(self, buffer: bytearray | array.array[Any], visit: Visit) -> None:
        self._buffer = buffer
        self._copy = buffer[:]
        self.nbytes = len(memoryview(buffer).cast("B"))

    def restore(self) -> None:
        buffer: Any = self._buffer
        if bytes(memoryview(buffer)) != bytes(memoryview(self._copy)):
            buffer[:] = self._copy


class ArrayRecord:
    """The elements of a NumPy array."""

    def __init__(self, elements: Any, visit: Visit) -> None:
        self._array = elements
        self._copy = elements.copy() if elements.flags.writeable else None
        self.nbytes = 0 if self._copy is None else self._copy.nbytes
        self._objects = [visit(element) for element in elements.flat] if elements.dtype.hasobject else []

    def restore(self) -> None:
        if self._copy is None:
            return
        if self._array.shape != self._copy.shape:
            self._array.resize(self._copy.shape, refcheck=False)
        self._array[...] = self._copy


class RandomRecord:
    """The state of a generator of random numbers."""

    nbytes = 0

    def __init__(self, generator: Any, visit: Visit) -> None:
        self._get, self._set = _random_accessors(generator)
        self._state = self._get()

    def restore(self) -> None:
        self._set(self._state)


class CellRecord:
    """The variable of a closure."""

    nbytes = 0

    def __init__(self, cell: types.CellType, visit: Visit) -> None:
        self._cell = cell
        self._contents = visit(cell.cell_contents)

    def restore(self) -> None:
        self._cell.cell_contents = _resolve(self._contents)


class ObjectRecord:
    """The class, the attributes and the slots of an object."""

    nbytes = 0

    def __init__(self, owner: Any, visit: Visit) -> None:
        self._object = owner
        self._class = type(owner)
        self._attributes = attributes_of(owner)
        self._attributes_record = None if self._attributes is None else MappingRecord(self._attributes, visit)
        self._slots = [(slot, _read(slot, owner)) for slot in _slots_of(type(owner))]
        self._slots = [(slot, value if value is _UNSET else visit(value)) for slot, value in self._slots]

    def restore(self) -> None:
        owner = self._object
        if type(owner) is not self._class:  # as lazy modules change theirs in the first forward
            object.__setattr__(owner, "__class__", self._class)
        if self._attributes_record is not None:
            if attributes_of(owner) is not self._attributes:
                object.__setattr__(owner, "__dict__", self._attributes)
            self._attributes_record.restore()
        for slot, then in self._slots:
            now, value = _read(slot, owner), _resolve(then)
            if now is not value and value is _UNSET:
                slot.__delete__(owner)
            elif now is not value:
                slot.__set__(owner, value)


_UNSET = object()


def attributes_of(owner: Any) -> dict[str, Any] | None:
    """The instance dictionary of an object, past any property of that name."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def _slots_of(cls: type) -> list[Any]:
    """The descriptors of the slots that a class and its bases declare."""
    declaring = (vars(base) for base in cls.__mro__ if "__slots__" in vars(base))
    return [member for names in declaring for member in names.values() if type(member) is types.MemberDescriptorType]


def _read(slot: Any, owner: Any) -> Any:
    """The value of a slot; `_UNSET` for none."""
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _UNSET


def _random_accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to read and write the state of a generator of random numbers."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    numpy = sys.modules["numpy"]
    if isinstance(generator, numpy.random.RandomState):
        return lambda: generator.get_state(legacy=False), generator.set_state
    bits = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _resolve(item: Any) -> Any:
    """The object that a record's item stands for."""
    return item.held if type(item) is TensorRecord else item


def _resolve_all(items: Iterable[Any]) -> list[Any]:
    return [_resolve(item) for item in items]


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(these) == len(those) and all(map(_is, these, those))


def _is(this: Any, that: Any) -> bool:
    return this is that


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

_TORCH_INTERNALS = re.compile(
    r"torch\.(_|fx|jit|distributed|autograd|cuda|xpu|mps|multiprocessing|package|export|library|onnx|overrides|profiler"
    r"|utils\.(_|hooks|weak|checkpoint|tensorboard)|utils\.data\.(_utils|dataloader))"
)


def kind_of(cls: type) -> Kind:
    """How objects of a class are captured."""
    for family, kind in _families():
        if issubclass(cls, family):
            return kind
    return _kind_of_module(cls)


def has_state_of_its_own(cls: type) -> bool:
    """Whether objects of a container class may have attributes as well."""
    return cls.__module__ not in ("builtins", "collections", "array", "random", "numpy", "torch._C")


def _families() -> list[tuple[type | tuple[type, ...], Kind]]:
    """Base classes and how their descendants are captured; the first that matches decides."""
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
    return [*families, (Iterator, Kind.LEFT_OUT), (_STANDARD_OBJECTS, Kind.UNGUARDED)]


def _kind_of_module(cls: type) -> Kind:
    """For a class of no known family: by the modules that define it and its bases."""
    if any(base.__module__.partition(".")[0] in _EXTERNAL_STATE_MODULES for base in cls.__mro__):
        return Kind.LEFT_OUT
    package = cls.__module__.partition(".")[0]
    if package in sys.stdlib_module_names or package == "numpy" or _TORCH_INTERNALS.match(f"{cls.__module__}."):
        return Kind.IMMUTABLE
    return Kind.UNGUARDED
