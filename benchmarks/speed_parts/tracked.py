"""What one would write oneself: a step on fake tensors under PyTorch's MemTracker, for each size that is tried.

A process of its own, since the pretend GPU stays for good. The model is built once, and the optimizer's state is there
before the first size, so that each size takes one step only. Run by `sweep_speed.py`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from batchfinder.find import find_max_batch_size
from batchfinder.models import build_workload
from batchfinder.probe import FunctionProbe
from batchfinder.recording import autocast, fake_device, rnn, sdpa
from batchfinder.recording.recorder import AllocationRecorder
from batchfinder.results import Shape
from batchfinder.search import Secant
from batchfinder.training.step import Step, StepSettings, call, default_loss
from batchfinder.training.workload import Workload

TakeStep = Callable[[int, int], None]


@contextlib.contextmanager
def on_the_cpu(model: str) -> Iterator[tuple[Workload, TakeStep, Any]]:
    """Fake tensors of the CPU: those of "cuda" cannot run a backward on a machine without a GPU.

    Args:
        model: a name in the zoo, or a config.

    Yields:
        The workload, a function that takes one step of (batch size, length), and the optimizer.
    """
    with FakeTensorMode():
        workload = build_workload(model)
        yield _ready(workload, workload.make_batch)


@contextlib.contextmanager
def on_the_pretend_gpu(model: str, capability: tuple[int, int]) -> Iterator[tuple[Workload, TakeStep, Any]]:
    """batchfinder's own fake GPU, which runs what CUDA would run.

    Args:
        model: a name in the zoo, or a config.
        capability: the simulated card's compute capability.

    Yields:
        As `on_the_cpu`.
    """
    mode = fake_device.FakeDeviceMode(allow_non_fake_inputs=True)
    with mode:
        workload = build_workload(model)
    device = fake_device.register()
    autocast.register()
    sdpa.register(capability, False)
    rnn.register()
    fake_device.hide_from_transformers()
    step = Step(
        workload, StepSettings(), device, lambda tensor, dtype: fake_device.pretend_copy(tensor, device, mode, dtype)
    )
    # The recording is there for its answers to `.item()`, without which the masks cannot be made.
    answers = AllocationRecorder(capability, lambda: "", lambda name: None)
    with mode, torch.autograd.set_multithreading_enabled(False), answers:
        fake_device.move_module(workload.model, device, mode)
        yield _ready(workload, step.batch)


def _ready(workload: Workload, make_batch: Callable[[int, int], Any]) -> tuple[Workload, TakeStep, Any]:
    model = workload.model.train()
    optimizer = torch.optim.AdamW(model.parameters())

    def take_step(batch_size: int, seq_len: int) -> None:
        batch = make_batch(batch_size, seq_len)
        loss = (workload.loss or default_loss)(call(model, batch), batch)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    return workload, take_step, optimizer


def main() -> None:
    """Find each length's largest size; prints every size that was tried, with its peak and its seconds."""
    asked = json.loads(sys.argv[1])
    where = on_the_cpu(asked["model"]) if asked["device"] == "cpu" else on_the_pretend_gpu(asked["model"], (6, 1))
    cells = []
    with where as (workload, take_step, optimizer):
        take_step(2, asked["seq_lens"][0])
        for seq_len in asked["seq_lens"]:
            tried: list[dict[str, Any]] = []

            def peak(batch_size: int, shape: Shape, tried: list[dict[str, Any]] = tried) -> int:
                assert shape.seq_len is not None
                started = time.perf_counter()
                tracker = MemTracker()
                tracker.track_external(workload.model, optimizer)
                with tracker:
                    take_step(batch_size, shape.seq_len)
                found = max(figures["Total"] for figures in tracker.get_tracker_snapshot("peak").values())
                seconds = round(time.perf_counter() - started, 3)
                tried.append({"batch_size": batch_size, "peak_bytes": found, "seconds": seconds})
                return int(found)

            near = asked["near"].get(str(seq_len))
            search = Secant(limit_bytes=asked["budget_bytes"], tolerance=0.0, predicted=near, margin=0.0)
            probe = FunctionProbe(peak, capacity_bytes=asked["budget_bytes"])
            outcome = find_max_batch_size(probe, Shape(seq_len), search=search)
            cells.append({"seq_len": seq_len, "max_batch_size": outcome.max_batch_size, "tried": tried})
    print(json.dumps(cells))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
