"""What a cache key says of a model and its optimizers: what changes how much memory a step takes, and nothing else.

Weights' values, learning rates, paths, times and collections that a model holds change nothing, and nothing that a
model may hold makes a fingerprint fail. Code of the user's that is called from elsewhere is not seen: a cached result
that was measured is tried once before it is used.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from batchfinder.cache.key import Json
from batchfinder.training.step import Workload

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = ("torch", "transformers", "batchfinder")
# Attributes of a module that say what it is doing, not what it is: nn.Module's, transformers', torchmetrics'.
_RUNNING = frozenset({
    "training", "_is_full_backward_hook", "_is_hf_initialized", "max_seq_len_cached",
    "_update_count", "_update_called", "_is_synced", "_to_sync", "_should_unsync",
})  # fmt: skip
# Switches of a LightningModule that are Lightning's own.
_LIGHTNINGS = frozenset({"prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"})
# Fields of a transformers config that only say where it comes from.
_ORIGIN = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def fingerprint_module(module: nn.Module, *code: Any) -> str:
    """Return the SHA-256 of a module and of the code that trains it, as hexadecimal digits.

    It covers each submodule's name, class, numbers, switches and functions (of a LightningModule switches alone: it
    holds learning rates, batch sizes and counters); transformers configs; names, shapes, dtypes, requires_grad and
    sharing of parameters and buffers; and for every class and function the version of its library, or its source where
    it is the user's own. It is the same in every process, and for real and fake tensors.

    Args:
        module: what is trained.
        code: functions, classes and objects whose code a step runs besides the module's.
    """
    parts: list[Json] = []
    configs: dict[int, Any] = {}
    kinds: list[Any] = []
    for name, part in module.named_modules():
        kind = type(part)
        kinds.append(kind)
        settings: dict[str, Json] = {}
        if any(base.__name__ == "LightningModule" for base in kind.__mro__):
            given = vars(part).get("_hparams")
            named = {f"hparams.{name}": value for name, value in given.items()} if isinstance(given, dict) else {}
            for attribute, value in {**vars(part), **named}.items():
                said = str(attribute)
                if type(value) is bool and not said.startswith("_") and said not in _RUNNING | _LIGHTNINGS:
                    settings[said] = value
        else:
            # Text in a user's module may be a path, or the name of a run.
            text_counts = _is_library(kind.__module__)
            described = {str(name): _setting(value) for name, value in vars(part).items() if name not in _RUNNING}
            for attribute, value in described.items():
                if value is not None and (text_counts or type(value) is not str):
                    settings[attribute] = value
        parts.append([name, _qualified(kind), settings])
        config = vars(part).get("config")
        if any(base.__module__.startswith("transformers.") for base in type(config).__mro__):
            configs[id(config)] = config

    written: list[Json] = []
    for config in configs.values():
        try:
            figures = {name: value for name, value in config.to_dict().items() if name not in _ORIGIN}
            text = json.dumps(figures, sort_keys=True, default=lambda other: _qualified(type(other)))
        except Exception:  # a kind of the user's own that cannot be written
            text = ""
        written.append([_qualified(type(config)), text, str(getattr(config, "_attn_implementation", None))])

    # What holds the code of a function, a class, a partial, a bound method or an object that can be called.
    for each in code:
        while isinstance(each, functools.partial | MethodType):
            each = each.func if isinstance(each, functools.partial) else each.__func__
        kinds.append(each if isinstance(each, type | FunctionType) else type(each))

    # A library's name and version for a class or function of its, the hash of the source of a user's own.
    origins: set[str] = set()
    libraries: set[str] = set()
    for base in (base for kind in kinds for base in (kind.__mro__ if isinstance(kind, type) else [kind])):
        of = str(getattr(base, "__module__", ""))
        if _is_library(of):
            libraries.add(of.partition(".")[0])
            continue
        try:
            origins.add(hashlib.sha256(inspect.getsource(base).encode("utf-8", "surrogatepass")).hexdigest())
        except Exception:  # it was typed in, or its file is gone or cannot be parsed
            origins.add(_qualified(base))
    for top in libraries:
        try:
            origins.add(f"{top} {version(top)}")
        except PackageNotFoundError:  # the standard library, or a package of another name
            origins.add(top)

    tensors = [*module.named_parameters(), *module.named_buffers()]
    whole = [
        parts,
        written,
        [[name, None if is_lazy(t) else list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors],
        sorted(origins),
    ]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def fingerprint_workload(workload: Workload, *built_by: str) -> str:
    """Return the SHA-256 of a workload, in the process that built it.

    Where the user's own code built it, this covers, besides `fingerprint_module`, the files of all modules that have
    been imported from the folder that this code was imported from.

    Args:
        workload: what is trained.
        built_by: `module:function` that built it; other text is passed over.
    """
    files: set[str] = set()
    for module in (name.partition(":")[0] for name in built_by if ":" in name):
        file = _file_of(module)
        if not file or file.startswith(_OURS):
            continue
        # All that was imported from the folder that the module's top package is in.
        parents = Path(file).parents
        depth = module.count(".") + (os.path.basename(file) == "__init__.py")
        folder = os.path.join(parents[min(depth, len(parents) - 1)], "")
        imported = {other for name in list(sys.modules) if (other := _file_of(name)).startswith(folder)}
        files |= {file, *(other for other in imported if not other.startswith(_OURS) and not _is_installed(other))}
    code = [workload.make_batch, workload.loss, workload.optimizer]
    code += [workload.parallelize] if workload.parallelize is not None else []
    model = fingerprint_module(workload.model, *code)
    return hashlib.sha256("\n".join([model, *sorted(map(fingerprint_file, files))]).encode()).hexdigest()


def fingerprint_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Json]:
    """Return an optimizer's class, and each parameter group's size with the options that can change its memory.

    Of a float it is only said whether it is zero: momentum 0.9 and 0.8 take the same memory, momentum 0 takes none.
    Learning rates are left out.
    """
    return {
        # transformers' Trainer and accelerate have optimizers in a wrapper of accelerate's.
        "class": _qualified(type(getattr(optimizer, "optimizer", optimizer))),
        "groups": [
            {
                "parameters": len(group["params"]),
                "options": {
                    str(name): _setting(value)
                    for name, value in group.items()
                    if name not in ("params", "param_names") and not str(name).endswith("lr")
                },
            }
            for group in optimizer.param_groups
        ],
    }


def fingerprint_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal digits; an empty text where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _file_of(module: str) -> str:
    # Not `module.__file__`: a module may import on being asked.
    found = sys.modules.get(module)
    file = vars(found).get("__file__") if isinstance(found, ModuleType) else None
    return os.path.abspath(file) if isinstance(file, str) else ""


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STANDARD)


def _is_library(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in _LIBRARIES or _is_installed(_file_of(module))


def _setting(value: Any) -> Json:
    """A value in terms of JSON where it may change memory, None for all others."""
    kind = type(value)
    if kind in (bool, int, str):
        plain: Json = value
        return plain
    if kind is float:
        return bool(value)
    if kind is tuple and all(type(item) in (bool, int, float) for item in value):
        return [_setting(item) for item in value]
    if kind is torch.dtype:
        return [str(value)]
    if kind in (FunctionType, BuiltinFunctionType):
        return [_qualified(value)]
    return None


def _qualified(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
