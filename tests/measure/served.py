"""Code that runs in a fork of a worker's process: it sets `result`, which is JSON values."""

from __future__ import annotations

import gc
import textwrap
from typing import Any


def prepare() -> None:
    """Import what a worker does, and let it warm up."""
    import batchfinder.measure.worker as worker

    worker.open_workload("tests.measure.workloads:encoder", {}, {}, "cpu", None, 1)
    gc.freeze()


def respond(request: dict[str, Any]) -> Any:
    """Run `code`; returns its `result`."""
    names: dict[str, Any] = {}
    exec(textwrap.dedent(request["code"]), names)
    return names["result"]
