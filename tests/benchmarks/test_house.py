"""The figures of a package small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import figures, table

MODULES = {
    "__init__.py": "",
    "a.py": '"""A module.\n\nThree lines.\n"""\n\n\ndef one():\n    """One line."""\n    return 1\n',
    "b.py": "from .a import one\nfrom . import c\n\n\ndef two():\n    def three():\n        return 3\n\n    three()\n",
    "c.py": "import package.deep.d\nfrom package import a\n",
    "deep/__init__.py": "from ..a import one\n",
    "deep/d.py": "x = 1\n",
    "tests/test_a.py": "from package.b import two\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with two folders, one of them with tests."""
    for name, text in MODULES.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "package"


def test_figures_of_a_package(package: Path) -> None:
    """Tests are left out; importers are found through relative, absolute and submodule imports."""
    assert figures(package) == {
        "modules": "6",
        "lines": "22",
        "median module": "2",
        "largest module": "9",
        "mean function": "3.3",
        "p95 function": "5",
        "largest folder": "4 (package)",
        "modules with one importer": "2 (33%)",  # c by b, d by c; a has three, b none but the test
        "lines in docstrings": "22.7%",
    }


def test_folders_can_be_skipped(package: Path) -> None:
    """And with them their importers; a folder without Python files is refused."""
    assert figures(package, ("tests", "deep"))["modules with one importer"] == "1 (25%)"
    assert table([package]).splitlines()[2].startswith("| package | 6 | 22 |")
    with pytest.raises(ValueError, match="no Python files"):
        figures(package / "missing")
