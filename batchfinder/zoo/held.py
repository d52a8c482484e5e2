"""What objects and functions hold, read by no way that they could have a say in."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from batchfinder.zoo import sources


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return what an object holds in its `__dict__` and slots."""
    try:
        held = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        held = {}
    for base in type(value).__mro__:
        if base.__module__ == "builtins":
            continue
        for name, slot in vars(base).items():
            if type(slot) is MemberDescriptorType:
                try:
                    held.setdefault(name, slot.__get__(value))
                except AttributeError:
                    continue
    return [(str(name), item) for name, item in held.items()]


def given(function: FunctionType) -> dict[str, Any]:
    """Return what a function was made with: the variables it encloses and its defaults."""
    held: dict[str, Any] = {
        f"closure {name}": cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if _is_filled(cell)
    }
    return held | {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__}


def with_lookups(function: FunctionType, held: dict[str, Any]) -> dict[str, Any]:
    """Return `held` with what a function's code may look up: globals, what modules of the user's hold, its attributes.

    Args:
        function: any.
        held: what it was made with.
    """
    names = set(_names(function.__code__))
    held = held | {f"global {n}": function.__globals__[n] for n in sorted(names & function.__globals__.keys())}
    for name, value in [*held.items()]:
        # What is a module's own, as in `settings.width`, may have been set after it was imported.
        if type(value) is ModuleType and sources.is_users(value.__name__):
            held |= {f"{name}.{n}": vars(value)[n] for n in sorted(names & vars(value).keys())}
    return held | {"attributes": vars(function)}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
