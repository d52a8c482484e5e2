"""One number for all that can change how much memory a step of a workload takes; the weights' values cannot."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from batchfinder.step.workload import Workload

# Their code is known by their versions, which are a part of the key beside the fingerprint.
_LIBRARIES = frozenset({"batchfinder", "builtins", "lightning", "pytorch_lightning", "torch", "transformers"})
# Attributes that say how a module was made or what it is doing, not what it is.
_PASSING = frozenset({*vars(nn.Module()), "name_or_path", "warnings_issued", "_is_hf_initialized"})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprint(workload: Workload) -> str:
    """Return the SHA-256 of a workload, as hexadecimal digits.

    It covers the tree of modules with their classes, settings (attributes that are plain values, and `extra_repr`) and
    gradient checkpointing; names, shapes, types, trainability and sharing of parameters and buffers; configs; and for
    code that is in no library known by its version, the source file it is in. It is the same in every process, and for
    real and fake tensors.

    Args:
        workload: what is trained.
    """
    model = workload.model
    modules = list(model.named_modules(remove_duplicate=False))
    described = {
        "modules": [_module(name, module) for name, module in modules],
        "parameters": _tensors(model.named_parameters(remove_duplicate=False)),
        "buffers": _tensors(model.named_buffers(remove_duplicate=False)),
        "configs": sorted({_config(module.config) for _, module in modules if hasattr(module, "config")}),
        "callables": [_callable(f) for f in (workload.make_batch, workload.loss, workload.optimizer)],
        "sources": _sources(type(module) for _, module in modules),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _module(name: str, module: nn.Module) -> list[Any]:
    checkpointing = getattr(module, "_gradient_checkpointing_func", None)
    return [
        name,
        _qualified(type(module)),
        module.extra_repr(),
        {key: _plain(value) for key, value in vars(module).items() if key not in _PASSING and _is_plain(value)},
        _plain(getattr(checkpointing, "keywords", None)),
    ]


def _tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[Any]:
    first_name: dict[int, str] = {}
    return [
        [name, list(t.shape), str(t.dtype), t.requires_grad, first_name.setdefault(id(t), name)] for name, t in named
    ]


def _config(config: Any) -> str:
    if hasattr(config, "to_dict"):
        figures = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        figures["_attn_implementation"] = getattr(config, "_attn_implementation", None)
        return json.dumps(_plain(figures), sort_keys=True)
    return json.dumps(_plain(config if isinstance(config, dict) else getattr(config, "__dict__", {})), sort_keys=True)


def _callable(function: Any) -> Any:
    """Describe a callable: what it is called, the values it holds, and the file it is in."""
    if function is None:
        return None
    if isinstance(function, functools.partial):
        return ["partial", _callable(function.func), _plain(function.args), _plain(function.keywords)]
    if is_dataclass(function) and not isinstance(function, type):
        held = {f.name: getattr(function, f.name) for f in fields(function)}
        values = {
            k: _callable(v) if callable(v) and not isinstance(v, nn.Module) else _plain(v) for k, v in held.items()
        }
        return [_qualified(type(function)), values, _sources([type(function)])]
    code_of = getattr(function, "__func__", function)
    if not hasattr(code_of, "__qualname__"):
        plain = {k: _plain(v) for k, v in getattr(function, "__dict__", {}).items() if _is_plain(v)}
        return [_qualified(type(function)), plain, _sources([type(function)])]
    cells = getattr(code_of, "__closure__", None) or ()
    held_values = [_plain(c.cell_contents) for c in cells if _is_filled(c) and _is_plain(c.cell_contents)]
    return [_qualified(code_of), held_values, _plain(getattr(code_of, "__defaults__", None)), _sources([code_of])]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _sources(objects: Iterable[Any]) -> list[str]:
    """Return the text of the files that classes and functions are in, and of their base classes, libraries left out."""
    parts = {part for thing in set(objects) for part in _with_bases(thing)}
    return sorted({text for part in parts if (text := _source(part))})


def _with_bases(thing: Any) -> Iterator[Any]:
    yield from thing.__mro__ if isinstance(thing, type) else (thing,)


def _source(thing: Any) -> str:
    module_name = getattr(thing, "__module__", None) or ""
    if module_name.partition(".")[0] in _LIBRARIES | sys.stdlib_module_names - {"__main__"}:
        return ""
    # The whole file, since what a class does may be in a function beside it.
    parts: list[Any] = [sys.modules.get(module_name), thing]
    for part in parts:
        try:
            return inspect.getsource(part)
        except (OSError, TypeError):
            continue
    code = getattr(thing, "__code__", None)
    return "" if code is None else code.co_code.hex() + _ADDRESS.sub("", repr(code.co_consts))


def _qualified(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{thing.__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _plain(value: Any) -> Any:
    """Return the same in terms of JSON, without anything that differs from one process to the next."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_ADDRESS.sub("", repr(item)) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, nn.Module):
        return _qualified(type(value))
    return _ADDRESS.sub("", repr(value))
