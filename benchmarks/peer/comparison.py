"""The cases, simulated and real, and the run of every peer on each of them."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

from batchfinder.devices import host_name
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Shape
from batchfinder.simulator.allocator import UNLIMITED
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB, MIB, format_bytes
from benchmarks.peer.card import Meter, SimulatedCard
from benchmarks.peer.finders import PEERS, Peer
from benchmarks.peer.judge import largest, row
from benchmarks.peer.report import draw, markdown
from benchmarks.peer.trainer import state_at_start
from benchmarks.peer.work import Work

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Simulated:
    """A model's recorded step on a card that has exactly the memory of some batch size.

    Attributes:
        model: a name in the catalog of models.
        seq_len: the samples' length in tokens, or their side in pixels.
        size: the batch size whose reserved bytes the card has; the largest that trains may be another.
        cap: the largest size to try.
    """

    model: str
    seq_len: int
    size: int
    cap: int | None = None

    @property
    def name(self) -> str:
        """In tables, followed by the card's memory."""
        capped = "" if self.cap is None else f", cap {self.cap}"
        return f"{self.model} at {self.seq_len}{capped}"


@dataclass(frozen=True)
class Real:
    """Real training.

    Attributes:
        net: a name in `work.NETS`.
        budget_bytes: what it may take, the model included.
    """

    net: str
    budget_bytes: int

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.net} in {format_bytes(self.budget_bytes)}"


SIMULATED = (
    *(Simulated("gpt2", 1024, size) for size in (1, 3)),
    *(Simulated("bert-large", 512, size) for size in (7, 13, 23)),
    *(Simulated("resnet50", 224, size) for size in (47, 97, 201, 389)),
    *(Simulated("distilbert", 32, size) for size in (777, 1531, 2999)),
    Simulated("resnet50", 224, 97, cap=60),
    Simulated("resnet50", 224, 97, cap=150),
)
REAL = {
    "cpu": (Real("transformer", 512 * MIB), Real("transformer", 1024 * MIB), Real("conv net", 768 * MIB)),
    "cuda": tuple(Real(net, size * GIB) for net in ("transformer", "conv net") for size in (4, 16)),
}
QUICK = (SIMULATED[2], SIMULATED[6])


def simulated_works(cases: tuple[Simulated, ...]) -> Iterator[tuple[Simulated, Work]]:
    """Each case with its card. All recordings are made, and their processes ended, before the first."""
    sources: dict[tuple[str, int], TraceSource] = {}
    with ExitStack() as running:
        for key in dict.fromkeys((case.model, case.seq_len) for case in cases):
            spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": key[0]})
            simulation = running.enter_context(Simulation(spec, StepConfig()))
            sources[key] = simulation.source(_CAPABILITY, [key[1]])
            sources[key].prefetch()
        for (_, seq_len), source in sources.items():
            for size in (1, 2):
                source.at(size, seq_len)
    for case in cases:
        source, shape = sources[case.model, case.seq_len], Shape(case.seq_len)
        needed = SimulatedProbe(source, UNLIMITED).needed_bytes(case.size, shape)
        card = SimulatedCard(SimulatedProbe(source, DeviceMemory(needed, needed)), shape)
        yield case, Work("small", case.cap, card=card)


def run(arguments: argparse.Namespace) -> int:
    """Measure what the options of `peers.py` ask for, print the tables, write the result; returns 0."""
    device: str = arguments.device
    peers = [peer for peer in PEERS if arguments.only in peer.name]
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
            for name in ("torch", "transformers", *sorted({peer.package for peer in PEERS if peer.version}))
        },
        "python": platform.python_version(),
        "notes": {peer.name: peer.note for peer in peers},
        "cases": [],
    }
    out: Path | None = arguments.out
    if out is None and not (arguments.quick or arguments.only or arguments.case or arguments.part):
        machine = f"{os.cpu_count()}-cores"
        if device == "cuda":
            machine = torch.cuda.get_device_name().lower().replace(" ", "-")
        out = _RESULTS / f"peers-{machine}.json"
    for case in _cases(arguments, peers):
        result["cases"].append(case)
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result, cases=True))
    if out is not None and find_spec("matplotlib"):
        draw(result, arguments.figure or str(out.with_suffix(".png")))
    return 0


def _cases(arguments: argparse.Namespace, peers: list[Peer]) -> Iterator[dict[str, Any]]:
    device: str = arguments.device
    simulated = QUICK if arguments.quick else SIMULATED
    if arguments.part == "real" or (device == "cuda" and not arguments.quick):
        simulated = ()
    for case, work in simulated_works(tuple(case for case in simulated if arguments.case in case.name)):
        assert work.card is not None
        true = work.card.largest(case.size)
        facts: dict[str, Any] = {
            "name": f"{case.name}, {format_bytes(work.card.total_bytes)}",
            "kind": "simulated",
            "budget_bytes": work.card.total_bytes,
            "cap": case.cap,
        }
        yield _case(facts, work, peers, {"loop": true, "trainer": true})
    if arguments.quick or arguments.part == "simulated":
        return
    for real in (case for case in REAL[device] if arguments.case in case.name):
        work = Work(real.net, device=device, budget_bytes=real.budget_bytes)
        trues = {driver: largest(work, driver) for driver in ("loop", "trainer")}
        facts = {"name": real.name, "kind": device, "budget_bytes": real.budget_bytes, "cap": None}
        yield _case(facts, work, peers, trues)


def _case(facts: dict[str, Any], work: Work, peers: list[Peer], trues: dict[str, int]) -> dict[str, Any]:
    cap = work.cap or max(trues.values())
    rows = []
    for peer in peers:
        rows.append(row(peer, replace(work, meter=Meter()), min(cap, trues[peer.driver])))
        print(json.dumps({"case": facts["name"], **rows[-1]}), file=sys.stderr, flush=True)
    return {**facts, "true": trues, "rows": rows}


def _warm_up() -> None:
    """Load what each forked process would load by itself, at the expense of its memory limit.

    A thread is started and ended, since the C library keeps its stack for the next one.
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
    gc.freeze()  # a garbage collection in a fork then only sees objects of its own
