"""What is imported when, in interpreters of their own."""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import batchfinder

PACKAGE = Path(__file__).resolve().parent.parent / "batchfinder"
HEAVY = (
    *("torch", "transformers", "huggingface_hub", "pytorch_lightning", "rich", "fsspec", "tenacity", "platformdirs"),
    "numpy",
)
BELOW_THE_LINE = (
    *("find", "simulator", "search", "cache", "accumulation", "devices", "retry", "probe", "results"),
    *("errors", "memory_use", "units"),
)
# These run in the process that prints: the recording process imports torch for them.
ALSO_WITHOUT = (
    *(
        "cli",
        "sizing",
        "report",
        "training.child_process",
        "training.spec",
        "recording.simulation",
        "recording.answers",
    ),
    *("models.catalog", "reproductions"),
)
ALLOWED_ABOVE_BARE_PYTHON_SECONDS = 0.15


def python(code: str) -> str:
    """Run code in a fresh interpreter that can import nothing but what it asks for; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of these modules are loaded after the code has run."""
    printed = python(f"import sys\n{code}\nprint([name for name in {names!r} if name in sys.modules])")
    loaded: list[str] = eval(printed.splitlines()[-1])
    return loaded


def modules(names: tuple[str, ...]) -> list[str]:
    """Every module of these parts of the package."""
    found = []
    for name in names:
        path = PACKAGE / name.replace(".", "/")
        files = [path.with_suffix(".py")] if not path.is_dir() else sorted(path.rglob("*.py"))
        for file in files:
            parts = ["batchfinder", *file.relative_to(PACKAGE).with_suffix("").parts]
            found.append(".".join(part for part in parts if part != "__init__"))
    return found


def test_the_package_alone() -> None:
    """`import batchfinder` imports nothing heavy."""
    assert loaded_by("import batchfinder", HEAVY) == []


def test_help() -> None:
    """Every verb's `--help` imports nothing heavy."""
    for verb in ("", "sweep", "estimate", "profile", "reproduce"):
        code = f"""
import contextlib, io
from batchfinder.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main({[verb] if verb else []} + ["--help"])
"""
        assert loaded_by(code, HEAVY) == [], verb


def test_help_is_quick() -> None:
    """`--help` takes little more of a core's time than Python itself: how long it waits for one is not its own."""

    def seconds(*arguments: str) -> float:
        def worked() -> float:
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            return usage.ru_utime + usage.ru_stime

        start = worked()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        return worked() - start

    # In turns, so that whatever else the machine does meets both alike.
    pairs = [(seconds("-c", "pass"), seconds("-m", "batchfinder", "--help")) for _ in range(7)]
    assert statistics.median(ours - bare for bare, ours in pairs) < ALLOWED_ABOVE_BARE_PYTHON_SECONDS


def test_no_torch() -> None:
    """No module below the line imports torch, nor does any that the printing process needs."""
    parts = (*BELOW_THE_LINE, *ALSO_WITHOUT)
    # The models that are reproduced are built by the recording process.
    names = [name for name in modules(parts) if not re.search(r"reproductions\.(models|.*_model)$", name)]
    assert len(names) > len(parts)
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(print(name))
"""
    assert python(code) == ""


def test_public_names_are_all_there() -> None:
    """Every name the package says it has can be imported, and a wrong one is an AttributeError."""
    assert len(batchfinder.__all__) > 10
    for name in batchfinder.__all__:
        getattr(batchfinder, name)
    assert not hasattr(batchfinder, "nothing")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_module_first() -> None:
    """Each module can be the first of the package that is imported: no two import each other."""
    names = [name for name in modules(("",)) if "__main__" not in name]
    assert len(names) > 100
    code = f"""
import importlib, os, traceback
import torch, transformers, pytorch_lightning
for name in {names!r}:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""
    assert python(code) == ""
