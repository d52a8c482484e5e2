"""Several ranks on this machine: forks, through `tests/forks.py`, that run cases of one of two modules."""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forks import forks

SECONDS = 240.0
"""How long a case may take: it takes a second or two, and a hang is all that this should end."""

Run = Callable[[int, str], list[Any]]


@contextmanager
def several_ranks(cases: str) -> Iterator[Run]:
    """Start the process that is forked.

    Args:
        cases: the module whose `CASES` are run.

    Yields:
        Runs a case on a number of ranks, and returns what each came to; of 1, what the process itself did.
    """
    with forks("tests.lightning.ddp_processes") as started:
        yield lambda size, case: started.run(size=size, cases=cases, case=case)


def prepare() -> None:
    """Import what the cases do."""
    import torch

    import tests.lightning.ddp_cases
    import tests.lightning.ddp_split_cases  # noqa: F401
    from batchfinder.lightning.micro_batching import closure
    from batchfinder.measure import trial

    # A full collection for each failure and search would take most of the time.
    trial.clear = closure.clear = lambda device: None
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)


def respond(request: dict[str, Any]) -> list[Any]:
    """What each rank of a case came to: `{"size": 2, "cases": "ddp_cases", "case": "identical"}`."""
    from tests.forked import at_once

    case = importlib.import_module(f"tests.lightning.{request['cases']}").CASES[request["case"]]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BATCHFINDER_CACHE"] = str(Path(folder) / "cache")
        return at_once(request["size"], case, SECONDS) if request["size"] > 1 else case(0)
