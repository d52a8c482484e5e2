"""The simulator and the callback against a real CUDA card: one JSON file, and a short table at the end.

Run: `python benchmarks/cuda_check.py [--minutes 8]` on a machine with a card, with `--dry-run` on any other. torch,
transformers and pytorch-lightning must be installed; benchmarks/README.md says how to carry the rest along.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("cells", "traces", "maxima", "callback", "tests")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="the time for all parts (default: 8; 30 for a dry run)")
    parser.add_argument("--device", default="cuda:0", help="the card (default: cuda:0)")
    parser.add_argument("--dry-run", action="store_true", help="without a card: predict, and measure stand-ins only")
    parser.add_argument("--gpu", default="h200", help="the card that a dry run predicts for (default: h200)")
    parser.add_argument(
        "--parts", default=PARTS, type=_parts, help=f"which, separated by commas (default: {','.join(PARTS)})"
    )
    parser.add_argument(
        "--only", default=re.compile(""), type=re.compile, help="a regular expression for names of cells and cases"
    )
    parser.add_argument("--out", type=Path, help="the JSON file (default: results/cuda_check-<card>.json)")
    parser.add_argument("--keep", type=Path, help="a folder for the allocator's histories (part traces)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, to import what is not installed here from")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part is called {unknown[0]!r}; they are {', '.join(PARTS)}")
    return parts


def unpack_wheels(wheels: Path, target: Path) -> list[str]:
    """Unpack those wheels of a folder whose packages are not installed here; returns their names."""
    needed = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            packages = {
                name.split("/")[0].removesuffix(".py") for name in archive.namelist() if ".dist-info" not in name
            }
            if all(importlib.util.find_spec(package) is not None for package in packages if package.isidentifier()):
                continue
            archive.extractall(target)
        needed.append(wheel.name)
    return needed


def main() -> int:
    """Make everything importable, then run the checks."""
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="batchfinder-") as folder:
        site = Path(folder) / "site-packages"  # the name by which code counts as a library's, not as the user's
        # Import from the repository and not from this folder, here and in child processes.
        here, folders = Path(__file__).resolve().parent, [str(ROOT), str(site)]
        sys.path[:] = [*folders, *(entry for entry in sys.path if Path(entry or ".").resolve() != here)]
        inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*folders, *inherited]))
        if arguments.wheels is not None:
            unpack_wheels(arguments.wheels, site)
        from benchmarks.cuda.checks import run

        return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
