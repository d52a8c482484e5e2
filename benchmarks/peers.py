"""Lightning's BatchSizeFinder, accelerate, the Trainer, toma, torch-max-mem, batch-finder and batchfinder on the same
work.

Each finder searches on the CUDA stub, PyTorch's CUDA build without a GPU, and each answer is trained for 200 steps in a
new process. Needs `batchfinder stub install`.

    pip install --no-deps -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py

What is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def main() -> int:
    """Measure, print the tables, and write the result and the figure; or print those of an earlier result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="peers with this in their names")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases with this in their names, such as gpt2")
    parser.add_argument(
        "--markdown", type=Path, metavar="JSON", help="print the tables of this result, measure nothing"
    )
    parser.add_argument("--figure", help="the picture (default after measuring: beside the JSON file)")
    parser.add_argument(
        "--out",
        type=Path,
        help="the JSON file (default: results/peers-<machine>.json, after a run of all cases and peers)",
    )
    arguments = parser.parse_args()
    # Import from the repository and not from this folder.
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(here.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != here)]

    if arguments.markdown is not None:
        from benchmarks.peer.report import draw, markdown

        result = json.loads(arguments.markdown.read_text())
        if arguments.figure is not None:
            draw(result, arguments.figure)
        print(markdown(result))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks.peer.comparison import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
