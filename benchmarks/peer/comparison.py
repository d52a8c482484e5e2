"""Every peer on every case, on the CUDA stub: each search and each training is a fork of a process on it."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from batchfinder.devices import host_name
from batchfinder.testing import CudaStub
from batchfinder.versions import installed
from benchmarks.peer.finders import PEERS
from benchmarks.peer.report import draw, markdown
from benchmarks.peer.work import CASES, STATE, Loop, module_of, name_of, seed
from benchmarks.random_fit.draw import Fit
from benchmarks.random_fit.run import forked

_RESULTS = Path(__file__).resolve().parents[1] / "results"
SEARCH_SEED, TRAINING_SEED = 0, 1
"""Training shuffles the data otherwise than the search."""


def run(arguments: argparse.Namespace) -> int:
    """Measure what the options of `peers.py` ask for, print the tables, write the result; returns 0."""
    peers = [peer for peer in PEERS if arguments.only in peer.name]
    result: dict[str, Any] = {
        "benchmark": "peers",
        "command": " ".join(["python benchmarks/peers.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "cpu": host_name(),
            "cores": os.cpu_count(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
        },
        "versions": installed("torch", *sorted({peer.package for peer in PEERS})),
        "python": platform.python_version(),
        "notes": {peer.name: peer.note for peer in peers},
        "cases": [],
        "changed": {},
    }
    out: Path | None = arguments.out
    if out is None and not (arguments.only or arguments.case):
        out = _RESULTS / f"peers-{os.cpu_count()}-cores.json"
    names = [peer.name for peer in peers if peer.version]
    for fit in (case for case in CASES if arguments.case in name_of(case)):
        case = CudaStub(fit.card, fit.memory_bytes, values=False, timeout=3600.0).run(measured, fit, names).result
        result["cases"].append(case)
        print(json.dumps(case, indent=1), file=sys.stderr, flush=True)
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
    result["changed"] = CudaStub(STATE.card, STATE.memory_bytes, timeout=3600.0).run(states, names).result
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
        if find_spec("matplotlib"):
            draw(result, arguments.figure or str(out.with_suffix(".png")))
    print(markdown(result))
    return 0


def measured(fit: Fit, names: Sequence[str]) -> dict[str, Any]:
    """The peers' answers, how each of them trains, and the largest size that trains with each driver."""
    _load(fit)
    chosen = [peer for peer in PEERS if peer.name in names]
    rows = []
    trained: dict[str, dict[int, dict[str, Any]]] = {peer.driver: {} for peer in chosen}
    for peer in chosen:
        found = forked(fit, partial(search, peer.name, fit))
        if "error" in found:
            rows.append({"peer": peer.name, "failed": _last_line(found["error"])})
            continue
        size, known = found["returned"], trained[peer.driver]
        if size and found["allocator"]:  # as the finder has set it, for the training too
            known = {size: trains(fit, peer.driver, size, found["allocator"])}
        elif size and size not in known:
            known[size] = trains(fit, peer.driver, size)
        rows.append({"peer": peer.name, **found, **known.get(size, {"trains": False, "retries": 0})})
    true = {driver: largest(sizes, partial(trains, fit, driver)) for driver, sizes in trained.items()}
    for peer, row in zip(chosen, rows, strict=True):
        if "failed" not in row:
            row |= {"true": true[peer.driver], "share": round(row["returned"] / true[peer.driver], 4)}
    return {"name": name_of(fit), "lengths": fit.lengths, "true": true, "rows": rows, "trained": trained}


def states(names: Sequence[str]) -> dict[str, list[str] | str | None]:
    """For each peer the parts of the training state that its search changes, on the small case.

    Text where the search failed; None where there is nothing to compare, as each size has a new model.
    """
    _load(STATE)
    chosen = [peer for peer in PEERS if peer.name in names]
    changed: dict[str, list[str] | str | None] = {}
    for peer in chosen:
        found = forked(STATE, partial(search, peer.name, STATE, states=True))
        if "error" in found:
            changed[peer.name] = _last_line(found["error"])
            continue
        before, after = found["before"], found["after"]
        if after and not before:
            before = forked(STATE, partial(state_at_start, peer.driver, found["returned"]))
        changed[peer.name] = [name for name in after if before[name] != after[name]] if after else None
    return changed


def search(name: str, fit: Fit, states: bool = False) -> dict[str, Any]:
    """A peer's search in this process: its answer, its tries, and the out-of-memory errors of the allocator."""
    import torch

    (peer,) = (peer for peer in PEERS if peer.name == name)
    torch.cuda.init()
    seed(SEARCH_SEED)
    found = peer.find(fit)
    errors = torch.cuda.memory_stats()["num_ooms"]
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    row = {"returned": found.batch_size, "tries": found.tries, "out_of_memory": errors, "allocator": allocator}
    return {**row, "before": found.before, "after": found.after} if states else row


def state_at_start(driver: str, batch_size: int) -> dict[str, str]:
    """Digests of the state with which a trainer starts that has no finder."""
    from benchmarks.peer import huggingface, trainer

    seed(SEARCH_SEED)
    if driver == "lightning":
        return trainer.start(STATE, module_of(STATE, batch_size))
    starts = huggingface.Starts(STATE, stop=True)
    huggingface.trainer(STATE, batch_size, starts).train()
    return starts.state


def trains(fit: Fit, driver: str, batch_size: int, allocator: str = "") -> dict[str, Any]:
    """Whether a size trains in a new process without a finder, and how often the allocator gave its cache back.

    Args:
        allocator: its settings.

    Raises:
        RuntimeError: it failed for another reason than memory.
    """
    seen = forked(fit, partial(train, fit, driver, batch_size, allocator))
    if "error" in seen:
        raise RuntimeError(f"{name_of(fit)} with {batch_size} in {driver}: {seen['error']}")
    return seen


def train(fit: Fit, driver: str, batch_size: int, allocator: str = "") -> dict[str, Any]:
    """Train in this process."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    import torch

    from batchfinder.measure.oom import classify

    torch.cuda.init()
    seed(TRAINING_SEED)
    ran = True
    try:
        if driver == "loop":
            Loop(fit).train(batch_size)
        else:
            module = {"lightning": "trainer", "transformers": "huggingface"}[driver]
            import_module(f"benchmarks.peer.{module}").train(fit, batch_size)
    except Exception as error:
        if classify(error, device="cuda") is None:
            raise
        ran = False
    return {"trains": ran, "retries": torch.cuda.memory_stats()["num_alloc_retries"]}


def largest(trained: dict[int, dict[str, Any]], train: Callable[[int], dict[str, Any]]) -> int:
    """The largest size that trains, within a per cent.

    Args:
        trained: what is known of sizes already; what is learnt is added.
        train: trains with a size, as `trains` does.
    """
    low = max((size for size, seen in trained.items() if seen["trains"]), default=0)
    high = min((size for size in trained if size > low), default=None)
    step = max(1, low // 20)
    while high is None or high - low > max(1, low // 100):
        size = low + step if high is None else (low + high) // 2
        trained[size] = train(size)
        if trained[size]["trains"]:
            low, step = size, 2 * step
        else:
            high = size
    return low


def _load(fit: Fit) -> None:
    """What each fork would do again: the imports, and the weights."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with patch("torch.cuda.is_available", return_value=False):
        _import("bitsandbytes")  # transformers imports it, and it would initialize CUDA, which forks cannot use then
    for name in ("accelerate", "toma", "torch_max_mem", "batch_finder", "benchmarks.peer.huggingface"):
        _import(name)
    module_of(fit)
    gc.collect()
    gc.freeze()  # a garbage collection in a fork then only sees objects of its own


def _import(name: str) -> None:
    if find_spec(name.partition(".")[0]):
        import_module(name)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:200]
