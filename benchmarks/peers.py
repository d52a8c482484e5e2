"""Lightning's BatchSizeFinder, accelerate, toma, torch-max-mem, batch-finder and batchfinder on the same work.

Recorded steps on simulated cards, which raise genuine out-of-memory errors; and real training within a real limit: of
the address space on a CPU, of the allocator on a card. Each search and each judgement is a process of its own.

    pip install --no-deps -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py

What is not installed is left out, and said. `--quick` takes two small cases, `--markdown` prints the tables of a result
that is there already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Measure, print the tables, write the result and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small simulated cases; nothing is written")
    parser.add_argument("--only", default="", help="peers whose names contain this")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="for real training (default: cuda where there is one)"
    )
    parser.add_argument("--part", choices=("simulated", "real"), help="one kind of case only")
    parser.add_argument("--markdown", type=Path, help="print the tables of this result, and measure nothing")
    parser.add_argument("--cases", action="store_true", help="with --markdown, each case as well")
    parser.add_argument("--figure", help="the picture (default after measuring: beside the JSON file)")
    parser.add_argument("--out", type=Path, help="the JSON file (default: results/peers-<machine>.json)")
    arguments = parser.parse_args()
    # Modules come from the repository's folder: in this one, names could stand in the way of others'.
    sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]
    from batchfinder.measure.child_probe import MALLOC

    if arguments.markdown is not None:
        from benchmarks.peer.report import draw, markdown

        result = json.loads(arguments.markdown.read_text())
        if arguments.figure is not None:
            draw(result, arguments.figure)
        print(markdown(result, arguments.cases))
        return 0
    import torch

    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # glibc reads its variables as a process starts; they make a limit on the address space sharp. A card must not be
    # seen where processes are forked.
    settings = {**MALLOC, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if arguments.device == "cpu" else {}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})
    from benchmarks.peer.run import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
