"""How long the command and the import take to be there."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

CODES = {
    "pass": ("-c", "pass"),
    "import batchfinder": ("-c", "import batchfinder"),
    "batchfinder --help": ("-m", "batchfinder", "--help"),
}
_LOADED = (
    "import sys\nfrom batchfinder.cli.main import build_parser\n"
    "build_parser().format_help()\nsys.exit('torch' in sys.modules)"
)


def start_up(rounds: int) -> dict[str, Any]:
    """Whole processes, taking turns.

    Args:
        rounds: how often each.

    Returns:
        Each one's seconds, the median above bare Python, and whether torch was imported.
    """
    seconds: dict[str, list[float]] = {name: [] for name in CODES}
    for _ in range(rounds):
        for name, code in CODES.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *code], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(round(time.perf_counter() - started, 4))
    # Beside the process before it: what else the machine does changes from one round to the next.
    above = {
        name: statistics.median(taken - bare for taken, bare in zip(seconds[name], seconds["pass"], strict=True))
        for name in CODES
        if name != "pass"
    }
    return {
        "seconds": seconds,
        "median_ms_above_pass": {name: round(1000 * value, 1) for name, value in above.items()},
        "imports_torch": subprocess.run([sys.executable, "-c", _LOADED]).returncode != 0,
    }
