"""Which code is the user's own, and what stands for code: the text of the user's files, the versions of the rest."""

from __future__ import annotations

import csv
import functools
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, distributions, packages_distributions, version
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

# Their versions are in every key beside the fingerprint.
_IN_KEYS = frozenset({"batchfinder", "torch", "pytorch_lightning", "lightning_fabric"})
# Libraries wherever their files are, and distributions of the same names.
_NAMED_ALIKE = frozenset({"transformers", "lightning"})
KNOWN = _IN_KEYS | _NAMED_ALIKE
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_users(name: str) -> bool:
    """Whether the module of this name is the user's: its file is in no library, or it was typed in and has none.

    Args:
        name: as in `sys.modules`.
    """
    top = name.partition(".")[0]
    if name == "__main__":
        file = _file(sys.modules.get(name))
        return not file or _is_outside(file)
    if not top or top in KNOWN or top in sys.builtin_module_names:
        return False
    module = sys.modules.get(name)
    if module is None:
        # Taken out of sys.modules, or never in it: nothing but its name tells.
        return top not in sys.stdlib_module_names
    file = _file(module)
    return _is_outside(file) if file else top not in sys.stdlib_module_names


def is_standard(name: str) -> bool:
    """Whether the module of this name is the standard library's.

    Args:
        name: as in `sys.modules`.
    """
    return name.partition(".")[0] in sys.stdlib_module_names and not is_users(name)


def users_modules() -> dict[str, ModuleType]:
    """Return all modules that have been imported from files of the user's, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in KNOWN and _is_outside(_file(module)):
            found[name] = module
    return found


def texts(modules: dict[str, ModuleType]) -> list[list[str]]:
    """Return each module's name with the SHA-256 of its file, in order of names.

    Args:
        modules: by name; a file that is gone is left out.
    """
    hashed = []
    for name, module in sorted(modules.items()):
        try:
            with open(_file(module), "rb") as file:
                hashed.append([name, hashlib.sha256(file.read()).hexdigest()])
        except OSError:
            continue
    return hashed


def imported(modules: Iterable[ModuleType]) -> Iterator[str]:
    """Yield the names of the modules that others import from, by the modules, classes and functions they hold.

    Args:
        modules: those that import.
    """
    for module in modules:
        for value in list(vars(module).values()):
            if issubclass(type(value), ModuleType):
                yield str(vars(value).get("__name__", ""))
            elif issubclass(type(value), type | FunctionType | BuiltinFunctionType):
                yield str(getattr(value, "__module__", None) or "")


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages that modules belong to, by distribution.

    Args:
        names: of modules; the standard library's, those whose versions are in every key, and the user's, for which
            their texts stand, are left out.
    """
    tops = {name.partition(".")[0] for name in names} - _IN_KEYS - sys.stdlib_module_names - {"", "__main__"}
    libraries = {top for top in tops if not (top in sys.modules and is_users(top))}
    return {made: found for top in libraries for made in _made_by(top) if (found := _version(made))}


def _made_by(top: str) -> list[str]:
    # Reading what all distributions hold takes 25 ms for 60 of them, and is spared where one of the name holds it.
    return [top] if top in _NAMED_ALIKE or _holds(top, top) else _distributions().get(top, [])


def _holds(made: str, top: str) -> bool:
    try:
        files = distribution(made).read_text("RECORD") or ""
    except PackageNotFoundError:
        return False
    return any(line.startswith((f"{top}/", f"{top}.")) for line in files.splitlines())


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {top: sorted(set(made)) for top, made in packages_distributions().items()}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _file(module: Any) -> str:
    # Not `module.__file__`: a module may import on being asked.
    file = vars(module).get("__file__") if issubclass(type(module), ModuleType) else None
    return file if isinstance(file, str) and os.path.isabs(file) else ""


def _is_outside(file: str) -> bool:
    inside = _library_folders()
    if not file or file.startswith(inside) or any(part in file for part in _INSTALLED):
        return False
    return not os.path.realpath(file).startswith(inside) and not _is_recorded(file)


def _is_recorded(file: str) -> bool:
    """Whether a file came with a package, installed into any folder of the search path, as `pip install -t` does."""
    folders = map(os.path.abspath, sys.path)
    return any(file in _recorded(folder) for folder in folders if file.startswith(os.path.join(folder, "")))


@functools.cache
def _recorded(folder: str) -> frozenset[str]:
    """The files in a folder that installers list there. What is installed editable is not listed, nor a checkout."""
    records = [(made.read_text("RECORD") or "").splitlines() for made in distributions(path=[folder])]
    return frozenset(
        os.path.join(folder, *row[0].split("/")) for record in records for row in csv.reader(record) if row
    )


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    named = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [*named, *site.getsitepackages(), site.getusersitepackages(), ours, os.path.dirname(os.__file__)]
    return tuple({each + os.sep for folder in folders for each in (folder, os.path.realpath(folder))})
