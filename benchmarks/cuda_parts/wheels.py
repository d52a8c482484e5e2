"""Where modules come from: this repository, and pure-Python packages that were carried along."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def unpack_wheels(wheels: Path, target: Path) -> list[str]:
    """Put those packages of a folder of wheels on the search path that are not installed.

    Args:
        wheels: the folder.
        target: where they are unpacked.

    Returns:
        The wheels that were needed.
    """
    needed = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            tops = {name.split("/")[0].removesuffix(".py") for name in archive.namelist() if ".dist-info" not in name}
            if all(importlib.util.find_spec(top) is not None for top in tops if top.isidentifier()):
                continue
            archive.extractall(target)
        needed.append(wheel.name)
    return needed


def use_repository(*further: Path) -> None:
    """Let child processes import the package, the benchmarks and the tests from this repository.

    Args:
        further: more folders to import from.
    """
    folders = [str(ROOT), *map(str, further)]
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in folders]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *kept])
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
