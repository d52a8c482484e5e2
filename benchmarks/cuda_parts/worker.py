"""The far end: takes the steps that the near end asks for, one after another.

    {"measure": {"cell": {...}, "steps": 2, "limit_bytes": null}}  -> {"ran": true, "stages": [...], ...}
    {"history": {"cell": {...}, "steps": 2}, "path": "..."}        -> the same; the history lies in the file
    {"callback": {...}}                                            -> see `callback_check`

An error of any kind is an answer too: {"error": "...", "dead": whether the card can be used no more}.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import traceback
from typing import Any

import torch

from batchfinder.training.child_process import answer, end_with_parent, requests_from
from benchmarks.cuda_parts.cells import Cell
from benchmarks.cuda_parts.meter import CudaMeter, Meter
from benchmarks.cuda_parts.stand_in import StandIn
from benchmarks.cuda_parts.step_measure import measure


def meter_of(device: str) -> Meter:
    """The card, or the stand-in on the CPU.

    Args:
        device: as `torch.device` takes it.
    """
    return StandIn() if device == "cpu" else CudaMeter(torch.device(device))


def serve(request: dict[str, Any], meter: Meter) -> dict[str, Any]:
    """One answer.

    Args:
        request: see the module's head.
        meter: the card.
    """
    if "measure" in request:
        arguments = request["measure"]
        return measure(Cell(**arguments.pop("cell")), meter, **arguments)[0]
    if "history" in request:
        arguments = request["history"]
        found, events = measure(Cell(**arguments.pop("cell")), meter, **arguments, with_history=True)
        with gzip.open(request["path"], "wt") as file:
            json.dump(events, file)
        return {**found, "path": request["path"]}
    from benchmarks.cuda_parts.callback_check import compare

    return compare(**request["callback"])


def _dead(device: str) -> bool:
    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main(argv: list[str]) -> int:
    """Serve: request pipe, answer pipe, device."""
    requests, answers, device = int(argv[0]), int(argv[1]), argv[2]
    end_with_parent(requests)
    meter: Meter | None = None
    frozen = False
    for request in requests_from(requests):
        try:
            meter = meter or meter_of(device)
            message = serve(request, meter)
        except Exception as error:
            traceback.print_exc()
            message = {"error": f"{type(error).__name__}: {error}"[:2000], "dead": _dead(device)}
        answer(answers, message)
        if not frozen:  # each step collects garbage; looking through what was imported takes longer than a small step
            gc.collect()
            gc.freeze()
            frozen = True
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
