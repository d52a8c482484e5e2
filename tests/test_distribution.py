"""What is built for a package index: the files, the names and the versions in it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml

import batchfinder

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this working tree, built in a copy of it."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "batchfinder", copy / "batchfinder", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True, text=True).stdout
    return zipfile.ZipFile(copy / built.splitlines()[-1])


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    """What the index reads of it."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """Modules, tables, the page's parts and the stub's sources."""
    files = {file for file in (ROOT / "batchfinder").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    wanted = {file.relative_to(ROOT).as_posix() for file in files}
    assert {Path(name).suffix for name in wanted} >= {".py", ".toml", ".css", ".c", ".typed"}
    assert wanted <= set(wheel.namelist())


def test_names_and_versions_agree(metadata: Message) -> None:
    """Those of the wheel, of the package, of the citation and of both changelogs."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert metadata["Name"] == "torch-batchfinder"
    assert metadata["Version"] == batchfinder.__version__ == citation["version"]
    assert metadata["License"] == citation["license"]
    assert metadata["Author"] == citation["authors"][0]["name"]
    for changelog in ("CHANGELOG.md", "docs/changelog.md"):
        first = re.search(r"^## (\S+)", (ROOT / changelog).read_text(encoding="utf-8"), re.MULTILINE)
        assert first
        assert first[1] == metadata["Version"]


def test_an_extra_that_a_message_names_exists(metadata: Message) -> None:
    """And `all` has it."""
    extras = set(metadata.get_all("Provides-Extra", []))
    named = set()
    for file in (ROOT / "batchfinder").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingExtra":
                named |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
    assert len(named) >= 5
    (everything,) = (each for each in metadata.get_all("Requires-Dist", []) if each.startswith("torch-batchfinder["))
    assert named <= extras & set(re.split(r"[\[\],]", everything))
