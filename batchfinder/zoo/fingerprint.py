"""One number for all that can change how much memory a step of a workload takes; the weights' values cannot."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch

from batchfinder.step.workload import Workload
from batchfinder.zoo import sources
from batchfinder.zoo.description import Description, digest


def fingerprint(workload: Workload) -> str:
    """Return the SHA-256 of a workload, as hexadecimal digits.

    It covers the tree of modules with their classes, settings (attributes, and `extra_repr`) and gradient
    checkpointing; names, shapes, types, trainability and sharing of parameters and buffers; the callables with all they
    refer to; and, if any of this is the user's own code, the files of all modules of the user's that have been imported
    and the versions of the packages they use. It is the same in every process that has imported the same, and for real
    and fake tensors. No code of the user's runs.

    Args:
        workload: what is trained.
    """
    model = workload.model
    modules = list(model.named_modules(remove_duplicate=False))
    callables = (workload.make_batch, workload.loss, workload.optimizer)
    owners = [function.__self__ for function in callables if type(function) is MethodType]
    describe = Description({id(module) for _, module in modules})
    described: dict[str, Any] = {
        "modules": [[name, describe.module(module)] for name, module in modules],
        "parameters": _tensors(model.named_parameters(remove_duplicate=False)),
        "buffers": _tensors(model.named_buffers(remove_duplicate=False)),
        "callables": [describe.value(function) for function in callables],
        "classes": describe.methods({type(part) for part in (*(m for _, m in modules), *callables, *owners)}),
    }
    # Read last: by now all names of modules that code or objects come from have been seen.
    seen = {str(base.__module__) for _, module in modules for base in type(module).__mro__} | describe.origins
    if any(map(sources.is_users, seen)):
        users = sources.users_modules()
        described["sources"] = sources.texts(users)
        seen |= set(sources.imported([*users.values()]))
    described["versions"] = sources.versions(seen)
    return digest(described)


def _tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[Any]:
    first_name: dict[int, str] = {}
    return [
        [name, list(t.shape), str(t.dtype), t.requires_grad, first_name.setdefault(id(t), name)] for name, t in named
    ]
