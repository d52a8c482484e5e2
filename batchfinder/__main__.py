"""`python -m batchfinder` and the `batchfinder` script."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the command line with this process's arguments."""
    from batchfinder.cli.main import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
