"""The simulator and the callback beside a real CUDA card; one JSON file, and a short table last.

Run: `python benchmarks/cuda_check.py [--minutes 8]` on a machine with a card, with `--dry-run` on any other. torch,
transformers and pytorch-lightning must be installed; benchmarks/README.md says how to carry the rest.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

PARTS = ("cells", "traces", "maxima", "callback", "tests")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="what all of it may take (default: 8; 30 for a dry run)")
    parser.add_argument("--device", default="cuda:0", help="the card (default: cuda:0)")
    parser.add_argument("--dry-run", action="store_true", help="without a card: predict, and measure stand-ins only")
    parser.add_argument("--gpu", default="h200", help="what a dry run predicts for (default: h200)")
    parser.add_argument(
        "--parts", default=PARTS, type=_parts, help=f"which, separated by commas (default: {','.join(PARTS)})"
    )
    parser.add_argument(
        "--only", default=re.compile(""), type=re.compile, help="a regular expression for names of cells and cases"
    )
    parser.add_argument("--out", type=Path, help="the JSON file (default: results/cuda_check-<card>.json)")
    parser.add_argument("--keep", type=Path, help="a folder for the allocator's histories (part traces)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels: those not installed here are imported from it")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part is called {unknown[0]!r}; they are {', '.join(PARTS)}")
    return parts


def main() -> int:
    """Make everything importable, then run."""
    arguments = _parser().parse_args()
    here = Path(__file__).resolve().parent
    # Modules come from the repository's folder: in this one, names could stand in the way of others'.
    sys.path[:] = [str(here.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != here)]
    from benchmarks.cuda_parts.wheels import unpack_wheels, use_repository

    with tempfile.TemporaryDirectory(prefix="batchfinder-") as folder:
        site = Path(folder) / "site-packages"  # by this name what is in it is known for libraries, and not the user's
        use_repository(site)
        if arguments.wheels is not None:
            unpack_wheels(arguments.wheels, site)
        from benchmarks.cuda_parts.run import run

        return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
