"""How many of our functions a cell passes between the command line and its table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import CodeType, FrameType

import batchfinder
from tests.cli.command import Run

ROOT = Path(batchfinder.__file__).parent
ROOMS = ("cli/", "sizing/", "report/", "recording/client.py", "recording/simulation.py", "recording/answers.py")
STATUS_LINE = "report/progress.py"


def properties(module: str) -> set[CodeType]:
    """The code of a module's properties."""
    classes = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, type)]
    found = [value.fget for each in classes for value in vars(each).values() if isinstance(value, property)]
    return {function.__code__ for function in found if function is not None and hasattr(function, "__code__")}


def test_the_journey_from_the_arguments_to_the_table_is_short(run: Run) -> None:
    """A simulated cell that is not in the cache passes at most 30 of our functions between `main` and its table.

    Counted are the functions and methods of cli/, sizing/, report/ and three modules of recording/ that the
    main thread enters, each once. Not counted are what is no step of its own: properties and double-underscore methods
    of records, functions within functions, class bodies; and the status line on stderr (report/progress.py).
    """
    entered: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            entered.add(frame.f_code)

    sys.setprofile(profile)
    try:
        done = run("sweep", "--model", "mine:tiny", "--seq-len", "16")
    finally:
        sys.setprofile(None)
    assert done.code == 0, done.err
    steps = []
    for code in entered:
        file = str(Path(code.co_filename).relative_to(ROOT))
        *_, name = code.co_qualname.split(".")
        module = f"batchfinder.{file.removesuffix('.py').replace('/', '.')}"
        outside = not file.startswith(ROOMS) or file == STATUS_LINE or code.co_qualname == "<module>"
        part = "<" in code.co_qualname or name.startswith("__") or not code.co_flags & 2  # a class body has no locals
        if not outside and not part and code not in properties(module):
            steps.append(f"{file} {code.co_qualname}")
    assert len(steps) <= 30, "\n".join(sorted(steps))
