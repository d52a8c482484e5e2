"""How objects of each class are captured: by value, or left as they are. `TrainingState` states the rule in words."""

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
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler


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
