"""Lightning's BatchSizeFinder, accelerate, toma, torch-max-mem, batch-finder and batchfinder on the same work.

The work is recorded steps on simulated cards, which raise genuine out-of-memory errors, and real training within a real
limit: of the address space on a CPU, of the allocator on a card. Each search, and each check of an answer, is a process
of its own.

    pip install --no-deps -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py

What is not installed is left out, and its rows say so.
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
    parser.add_argument("--quick", action="store_true", help="two small simulated cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="peers with this in their names")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases with this in their names, such as gpt2")
    parser.add_argument("--part", choices=("simulated", "real"), help="one kind of case")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="for real training (default: cuda if there is a GPU)")
    parser.add_argument(
        "--markdown", type=Path, metavar="JSON", help="print the tables of this result, measure nothing"
    )
    parser.add_argument("--cases", action="store_true", help="with --markdown, a table for each case as well")
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
        print(markdown(result, arguments.cases))
        return 0
    import torch

    from batchfinder.measure.child_probe import MALLOC

    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # glibc reads its variables as a process starts; they make a limit of the address space exact. GPUs are hidden, as
    # CUDA must not be initialized in a process that forks.
    environment = {**MALLOC, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if arguments.device == "cpu" else {}
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    from benchmarks.peer.comparison import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
