"""`pytorch_lightning` and `lightning.pytorch`: the same classes twice. A trainer knows those of its own package alone.

This package imports `pytorch_lightning` alone. What a trainer is given to work with comes from the trainer's package,
and what it hands out is recognised by the names of classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PACKAGES = ("pytorch_lightning.", "lightning.pytorch.", "lightning_fabric.", "lightning.fabric.")


def is_a(thing: Any, *names: str) -> bool:
    """Whether an object's class is, or is derived from, one of Lightning's by that name, in either package.

    Args:
        thing: a callback, a strategy, ...
        names: names of classes.
    """
    return any(base.__name__ in names and base.__module__.startswith(_PACKAGES) for base in type(thing).__mro__)


def is_lightnings_own(thing: Any) -> bool:
    """Whether an object's class is defined in Lightning."""
    return type(thing).__module__.startswith(_PACKAGES)


def is_overridden(name: str, thing: Any) -> bool:
    """Whether a hook of a module or datamodule is the user's own.

    Args:
        name: the hook's.
        thing: the module or datamodule, of either package.
    """
    return not str(getattr(getattr(type(thing), name), "__module__", "")).startswith(_PACKAGES)


def package_of(trainer: Any) -> str:
    """The package that a trainer's class is from, or is derived from.

    Args:
        trainer: any trainer.
    """
    modules = [base.__module__ for base in type(trainer).__mro__]
    return (
        "lightning.pytorch" if any(name.startswith("lightning.pytorch.") for name in modules) else "pytorch_lightning"
    )


def twin(trainer: Any, module: str, name: str) -> Any:
    """A class of the trainer's own package.

    Args:
        trainer: any trainer.
        module: the class's module below the package, such as `profilers`.
        name: the class's name.
    """
    return getattr(import_module(f"{package_of(trainer)}.{module}"), name)
