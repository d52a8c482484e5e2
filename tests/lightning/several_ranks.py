"""Several ranks on this machine: what the tests start, through `tests/forks.py`, for the cases of `rank_cases.py`."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

SECONDS = 240.0
"""How long a case may take: it takes a second or two, and a hang is all that this should end."""


def prepare() -> None:
    """Import what the cases do."""
    import rank_cases  # noqa: F401
    import torch

    from batchfinder.lightning import finding

    finding.clear = lambda device: None  # a full collection as a search begins and ends would take most of the time
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)


def respond(request: dict[str, Any]) -> list[Any]:
    """What each rank of a case came to: `{"size": 2, "case": "identical"}`."""
    from rank_cases import CASES

    from tests.forked import at_once

    with tempfile.TemporaryDirectory() as folder:
        os.environ["BATCHFINDER_CACHE"] = str(Path(folder) / "cache")
        return at_once(request["size"], CASES[request["case"]], SECONDS)
