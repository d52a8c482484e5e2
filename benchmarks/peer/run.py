"""The whole comparison: every peer on every case."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

from batchfinder.devices import host_name
from batchfinder.units import format_bytes
from benchmarks.peer.cases import QUICK, REAL, SIMULATED, simulated_works
from benchmarks.peer.contract import Peer, all_peers
from benchmarks.peer.judge import largest
from benchmarks.peer.measure import row
from benchmarks.peer.meter import Meter
from benchmarks.peer.report import draw, markdown
from benchmarks.peer.trainer import state_at_start
from benchmarks.peer.work import Work

RESULTS = Path(__file__).resolve().parents[1] / "results"


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0.

    Args:
        arguments: of `peers.py`.
    """
    device: str = arguments.device
    peers = [peer for peer in all_peers() if arguments.only in peer.name]
    _warm_up()
    result: dict[str, Any] = {
        "benchmark": "peers",
        "command": " ".join(["python benchmarks/peers.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "cpu": host_name(),
            "cores": os.cpu_count(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        },
        "versions": {
            name: version(name)
            for name in ("torch", "transformers", *sorted({peer.package for peer in all_peers() if peer.version}))
        },
        "python": platform.python_version(),
        "notes": {peer.name: peer.note for peer in peers},
        "cases": [],
    }
    out = None if arguments.quick else arguments.out or RESULTS / f"peers-{_machine(device)}.json"
    for found in _cases(arguments, device, peers):
        result["cases"].append(found)
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result, cases=True))
    if out is not None and find_spec("matplotlib"):
        draw(result, arguments.figure or str(out.with_suffix(".png")))
    return 0


def _cases(arguments: argparse.Namespace, device: str, peers: list[Peer]) -> Iterator[dict[str, Any]]:
    simulated = QUICK if arguments.quick else () if arguments.part == "real" or device == "cuda" else SIMULATED
    for case, work in simulated_works(simulated):
        assert work.card is not None
        true = work.card.largest(case.size)
        facts: dict[str, Any] = {
            "name": f"{case.name}, {format_bytes(work.card.total_bytes)}",
            "kind": "simulated",
            "budget_bytes": work.card.total_bytes,
            "cap": case.cap,
        }
        yield _searched(facts, work, peers, {"loop": true, "trainer": true})
    if arguments.quick or arguments.part == "simulated":
        return
    for real in REAL[device]:
        work = Work(real.net, device=device, budget_bytes=real.budget_bytes)
        trues = {driver: largest(work, driver) for driver in ("loop", "trainer")}
        facts = {"name": real.name, "kind": device, "budget_bytes": real.budget_bytes, "cap": None}
        yield _searched(facts, work, peers, trues)


def _searched(facts: dict[str, Any], work: Work, peers: list[Peer], trues: dict[str, int]) -> dict[str, Any]:
    cap = work.cap or max(trues.values())
    rows = []
    for peer in peers:
        rows.append(row(peer, replace(work, meter=Meter()), min(cap, trues[peer.driver])))
        print(json.dumps({"case": facts["name"], **rows[-1]}), file=sys.stderr, flush=True)
    return {**facts, "true": trues, "rows": rows}


def _warm_up() -> None:
    """Load here what every process would load by itself, and what would count against its limit.

    That a thread has ended before is usual, too: its stack, which the C library keeps, is there for the next one.
    """
    torch.set_num_threads(1)
    thread = Thread(target=gc.collect)
    thread.start()
    thread.join()
    for name in ("accelerate.utils", "toma", "torch_max_mem", "batch_finder"):
        if find_spec(name.partition(".")[0]):
            __import__(name)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()  # loads torch._dynamo
    # A trainer's first start draws random numbers that later ones do not.
    state_at_start(Work("small"), [], 2)
    gc.collect()
    gc.freeze()  # forks then collect what they made and nothing else


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"{os.cpu_count()}-cores"
