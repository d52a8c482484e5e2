"""Pages that are made from what is in the package, and examples in Python that stand alone."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_devices_is_the_catalogues() -> None:
    """docs/devices.md is what `python docs/make_devices.py` writes."""
    assert (DOCS / "devices.md").read_text(encoding="utf-8") == _script("make_devices").page()


def test_every_page_is_in_the_index() -> None:
    """Nothing is written that no reader would find."""
    listed = set(re.findall(r"^([a-z]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    assert listed == {page.stem for page in DOCS.glob("*.md")} - {"index"}


def test_the_example_in_python_prints_what_it_says() -> None:
    """The README's one example that needs no model of the reader's."""
    (code,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
        if "FunctionProbe" in block
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == code.rpartition("# ")[2]


def test_coverage_page_is_up_to_date() -> None:
    """docs/coverage.md is what `python docs/make_coverage.py` writes."""
    assert (DOCS / "coverage.md").read_text(encoding="utf-8") == _script("make_coverage").page()


def test_the_page_on_accuracy_is_up_to_date() -> None:
    """docs/accuracy.md is what `python docs/make_accuracy.py` makes of the committed results."""
    assert (DOCS / "accuracy.md").read_text(encoding="utf-8") == _script("make_accuracy").page()
