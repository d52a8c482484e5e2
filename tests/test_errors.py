"""The exception tree is the one that is drawn, and each error is what it says it is."""

from __future__ import annotations

import inspect

from batchfinder import errors
from batchfinder.errors import BatchFinderError

INDENT = 4


def _drawn() -> list[tuple[int, str]]:
    """Depth and name of each line of the drawing in the module's docstring."""
    assert errors.__doc__ is not None
    found = []
    for line in errors.__doc__.splitlines():
        bare = line.removeprefix(" " * INDENT).lstrip("│├└─ ")
        if line.startswith(" " * INDENT) and bare:
            found.append(((len(line) - len(bare)) // INDENT - 1, bare.split()[0]))
    return found


def _children(kind: type[BaseException]) -> list[type[BaseException]]:
    """Those derived from a class in this module, in the order they are written."""
    return [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]


def _there(kind: type[BaseException], depth: int = 0) -> list[tuple[int, str]]:
    return [(depth, kind.__name__), *(line for child in _children(kind) for line in _there(child, depth + 1))]


def test_the_drawing_is_the_tree() -> None:
    """Every class of the module stands in the docstring's drawing, in order, under the class it is derived from."""
    assert _drawn() == _there(BatchFinderError)
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__]
    assert len(classes) == len(_drawn())


def test_what_python_calls_by_another_name_is_caught_by_it() -> None:
    """A value that cannot be meant is a ValueError, a name not found a LookupError, no memory a MemoryError,
    and a RuntimeError as torch's and accelerate's are.
    """
    pairs = [
        (errors.InvalidValue("seq_len", 0, "1"), ValueError),
        (errors.NotSplittable("it is empty"), ValueError),
        (errors.UnknownName("GPU", "v10", ["v100"]), LookupError),
        (errors.SampleDoesNotFit(2, 3, None, "out of memory"), MemoryError),
        (errors.OutOfMemory(2, "out of memory"), RuntimeError),
    ]
    for error, kind in pairs:
        assert isinstance(error, kind)
        assert isinstance(error, BatchFinderError)
