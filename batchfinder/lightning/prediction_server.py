"""The process that foretells a size: it has the step recorded in a process of its own, and replays it.

`python -m batchfinder.lightning.prediction_server <requests> <answers> <folder> <seconds>`;
it ends, and the folder with it, when its parent does or when its time is up. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from batchfinder.devices import Device
from batchfinder.find import find_max_batch_size
from batchfinder.probe import FunctionProbe
from batchfinder.recording.simulation import Simulation, StepConfig
from batchfinder.results import Shape
from batchfinder.search import Secant
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.probe import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.trace import Trace
from batchfinder.training.child_process import answer, describe, end_with_parent, requests_from
from batchfinder.training.spec import WorkloadSpec

_TIME_IS_UP = 75  # EX_TEMPFAIL

HOST_SHARE = 0.8
"""What remains of an answer on a CPU, whose kernels take scratch memory of which nothing is known here.

Measured with a transformer and with a convolutional net: the plain answer is 20 % and 12 % too high.
"""


def on_card(probe: SimulatedProbe, cap: int | None = None) -> int:
    """The largest size that the recorded step runs at on a card.

    Args:
        probe: knows the card and the step.
        cap: the largest size of use; a line through two peaks is enough of an answer for a card that runs twice that.
    """
    shape = Shape()
    line = predict_max_batch_size(probe, shape)
    if cap is not None and line > 2 * cap:
        return line
    search = Secant(limit_bytes=probe.memory.capacity_bytes, tolerance=0.0, predicted=line)
    return find_max_batch_size(probe, shape, search=search).max_batch_size


def on_host(probe: SimulatedProbe) -> int:
    """A share of the largest size whose live bytes, not rounded and without a GPU's workspaces, find room.

    Args:
        probe: knows the memory and the step.
    """
    usable = probe.memory.capacity_bytes
    function = FunctionProbe(lambda batch_size, shape: live_bytes(probe.trace(batch_size, shape)), usable)
    search = Secant(limit_bytes=usable, tolerance=0.0, predicted=predict_max_batch_size(probe, Shape()))
    return int(HOST_SHARE * find_max_batch_size(function, Shape(), search=search).max_batch_size)


def live_bytes(trace: Trace) -> int:
    """The most bytes of a trace that are in use at one time, as they were asked for."""
    sizes = [0 if kind == "workspace" else size for kind, size in zip(trace.structure.kinds, trace.sizes, strict=True)]
    most = live = 0
    for event in trace.structure.order:
        live += sizes[event] if event >= 0 else -sizes[~event]
        most = max(most, live)
    return most


def foretell(request: dict[str, Any]) -> int:
    """Record a step and find its size.

    Args:
        request: `workload` (the fields of a `WorkloadSpec`), `how` (of a `StepConfig`), `device` (of a `Device`),
            `host` (whether the device is the host's memory) and `cap`.
    """
    device = Device(**{**request["device"], "compute_capability": tuple(request["device"]["compute_capability"])})
    with Simulation(WorkloadSpec(**request["workload"]), StepConfig(**request["how"])) as simulation:
        probe = simulation.probe(device, [None], _allocator_settings())
        probe.traces.prefetch()
        return on_host(probe) if request["host"] else on_card(probe, request["cap"])


def _allocator_settings() -> AllocatorSettings:
    """From the environment, where PyTorch reads them."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if conf := os.environ.get(name):
            return AllocatorSettings.parse(conf, option=name)
    return AllocatorSettings()


def _lift_limits() -> None:
    """A limit on the memory of the process that trains is not meant for this one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (hard, hard))


def main(argv: list[str]) -> int:
    """Answer requests until the parent hangs up: request pipe, answer pipe, folder, seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _lift_limits()
    requests, answers = int(argv[0]), int(argv[1])
    end = end_with_parent(requests, Path(argv[2]))
    clock = threading.Timer(float(argv[3]), os._exit, (_TIME_IS_UP,))
    clock.daemon = True
    clock.start()
    for request in requests_from(requests):
        try:
            answer(answers, {"batch_size": foretell(request)})
        except Exception as error:
            answer(answers, {"error": describe(error)})
    end.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
