"""Objects of any kind in terms of JSON, the same in every process. No code of the user's runs."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import nn

from batchfinder.zoo import sources
from batchfinder.zoo.held import attributes, given, with_lookups

# Attributes that say how something was made or what it is doing, not what it is.
_PASSING = frozenset({
    *vars(nn.Module()), "name_or_path", "_name_or_path", "warnings_issued", "_is_hf_initialized",
    "transformers_version", "_commit_hash", "_original_object_hash",
    # Lightning's
    "_trainer", "_fabric", "_fabric_optimizers", "_device_mesh", "_current_fx_name", "_param_requires_grad_state",
    "_metric_attributes", "_device",
    # torchmetrics'
    "_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync",
})  # fmt: skip
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (type(None), bool, int, float, str)
_WRITTEN = (complex, range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format)
# Of the standard library's own classes, those whose objects are nothing but what they hold.
_HOLDERS = (SimpleNamespace, argparse.Namespace, enum.Enum, collections.UserDict, collections.UserList)
# Objects of these are known by their class: what they hold is the state of a run.
_RUNNING = ("pytorch_lightning", "lightning", "lightning_fabric")
_ROOM, _DEPTH, _LONG = 50_000, 16, 1000


class Description:
    """Describes values in terms of JSON, without anything that differs from one process to the next.

    Each value has room for so many others inside it, shared evenly among them, so that what is left out where there is
    too much does not depend on the order of a set.

    Args:
        tree: identities of the modules that are described in full elsewhere.
    """

    def __init__(self, tree: set[int]) -> None:
        self.origins: set[str] = set()
        self._tree = tree
        self._known: dict[tuple[int, int, int], tuple[Any, str]] = {}
        self._open: set[int] = set()

    def module(self, module: nn.Module) -> list[Any]:
        """Describe a module without its tensors and submodules."""
        kind = type(module)
        written = "" if sources.is_users(kind.extra_repr.__module__) else module.extra_repr()
        return [self._class(kind), written, self._named(attributes(module), _DEPTH, _ROOM)]

    def methods(self, kinds: Iterable[type]) -> list[Any]:
        """Describe what the methods of the user's classes refer to."""
        bases = {base for kind in kinds for base in kind.__mro__ if sources.is_users(base.__module__)}
        return [
            [name, self.value(function)]
            for base in sorted(bases, key=_qualified)
            for name, held in sorted(vars(base).items())
            if type(function := _unwrapped(held)) is FunctionType
        ]

    def value(self, value: Any, depth: int = _DEPTH, room: int = _ROOM) -> Any:
        """Describe anything."""
        kind = type(value)
        if kind in _PLAIN:
            return _shortened(value) if kind is str else value
        if kind in _WRITTEN:
            return repr(value)
        if issubclass(kind, torch.Tensor):
            return ["tensor", list(value.shape), str(value.dtype), value.device.type]
        if id(value) in self._open or depth < 0 or room < 1:
            return self._class(kind)
        key = (id(value), depth, room)
        if key not in self._known:
            self._open.add(id(value))
            # The value is kept, so that nothing else gets its identity.
            self._known[key] = (value, digest(self._inside(value, kind, depth - 1, room)))
            self._open.discard(id(value))
        return self._known[key][1]

    def _inside(self, value: Any, kind: type, depth: int, room: int) -> Any:
        if issubclass(kind, type):
            return ["class", *map(self._class, type.__dict__["__mro__"].__get__(value))]
        if issubclass(kind, ModuleType):
            return ["module", self._origin(str(vars(value).get("__name__", "")))]
        if issubclass(kind, FunctionType):
            return self._function(value, depth, room)
        if issubclass(kind, MethodType):
            return ["method", self.value(value.__func__, depth, room), self.value(value.__self__, depth, room)]
        if issubclass(kind, BuiltinFunctionType):
            owner = None if isinstance(value.__self__, ModuleType) else self.value(value.__self__, depth, room)
            return ["builtin", str(value.__module__), value.__qualname__, owner]
        if issubclass(kind, functools.partial):
            return [self._class(kind), self._items([value.func, *value.args, value.keywords], depth, room)]
        if issubclass(kind, nn.Module):
            return self._class(kind) if id(value) in self._tree else self._foreign_module(value, depth, room)
        if issubclass(kind, torch.optim.Optimizer):
            return [self._class(kind), self.value(value.defaults, depth, room)]
        return [self._class(kind), self._content(value, kind, depth, room), self._state(value, kind, depth, room)]

    def _content(self, value: Any, kind: type, depth: int, room: int) -> Any:
        """Describe what a builtin kind holds, through the builtin's own methods: a subclass may have others."""
        if issubclass(kind, dict):
            return self._pairs(list(dict.items(value)), depth, room)
        if kind is MappingProxyType:
            return self._pairs(list(value.items()), depth, room)
        for sequence in (list, tuple, collections.deque):
            if issubclass(kind, sequence):
                return self._items(list(sequence.__iter__(value)), depth, room)
        for collection in (set, frozenset):
            if issubclass(kind, collection):
                items = list(collection.__iter__(value))
                return sorted(map(_json, self._items(items, depth, room))) if len(items) <= room else len(items)
        for plain in (int, float, str):
            if issubclass(kind, plain):
                return _shortened(plain.__repr__(value))
        if issubclass(kind, bytes | bytearray):
            return hashlib.sha256(value).hexdigest()
        if issubclass(kind, PurePath):
            return PurePath.__str__(value)
        if kind is re.Pattern:
            return [_shortened(str(value.pattern)), value.flags]
        if kind.__module__ == "numpy":
            shape = getattr(value, "shape", None)
            return [list(shape), str(value.dtype)] if shape else _ADDRESS.sub("", repr(value))[:_LONG]
        return None

    def _state(self, value: Any, kind: type, depth: int, room: int) -> Any:
        """Describe the attributes of an object, unless its class is one whose objects are the state of a run."""
        top = kind.__module__.partition(".")[0]
        if top in _RUNNING or issubclass(kind, PurePath | torch.optim.lr_scheduler.LRScheduler):
            return None
        if sources.is_standard(kind.__module__) and not issubclass(kind, _HOLDERS):
            return None
        held = dict(attributes(value))
        if top == "torch":
            held = {name: item for name, item in held.items() if not name.startswith("_")}
        return self._named(held.items(), depth, room)

    def _foreign_module(self, module: nn.Module, depth: int, room: int) -> Any:
        held = [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]
        return [*self.module(module), self._items(held, depth, room)]

    def _function(self, function: FunctionType, depth: int, room: int) -> Any:
        described: list[Any] = ["function", self._origin(str(function.__module__)), function.__qualname__]
        if sources.is_standard(described[1]):
            return described
        held = given(function)
        if sources.is_users(described[1]):
            described.append(self._code(function.__code__, depth, room))
            held = with_lookups(function, held)
        return [*described, self._named(held.items(), depth, room)]

    def _code(self, code: CodeType, depth: int, room: int) -> Any:
        constants = [
            self._code(item, depth, room) if isinstance(item, CodeType) else self.value(item, depth, room)
            for item in code.co_consts
        ]
        return [code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]

    def _named(self, named: Iterable[tuple[str, Any]], depth: int, room: int) -> dict[str, Any]:
        # None is as good as absent, and the results of a step, which some modules keep, are no settings.
        kept = {n: v for n, v in named if n not in _PASSING and v is not None and not _is_result(v)}
        return dict(zip(kept, self._items([*kept.values()], depth, room), strict=True))

    def _pairs(self, pairs: list[tuple[Any, Any]], depth: int, room: int) -> Any:
        flat = [item for pair in pairs for item in pair]
        if len(flat) > room:
            return [len(pairs), self._items(flat[: room // 2 * 2], depth, room)]
        described = self._items(flat, depth, room)
        return sorted([_json(k), _json(v)] for k, v in zip(described[::2], described[1::2], strict=True))

    def _items(self, items: list[Any], depth: int, room: int) -> list[Any]:
        kept = [item for item in items if not _is_result(item)] if len(items) <= room else items[:room]
        each = room // max(1, len(kept))
        described = [self.value(item, depth, each) for item in kept]
        return described if len(items) <= room else [*described, len(items)]

    def _class(self, kind: type) -> str:
        self._origin(str(kind.__module__))
        return _qualified(kind)

    def _origin(self, name: str) -> str:
        self.origins.add(name)
        return name


def _unwrapped(held: Any) -> Any:
    if type(held) is property:
        return held.fget
    return held.__func__ if type(held) in (staticmethod, classmethod) else held


def _is_result(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and (value.dim() == 0 or value.grad_fn is not None)


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONG else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value in terms of JSON, as hexadecimal digits."""
    return hashlib.sha256(_json(value).encode()).hexdigest()
