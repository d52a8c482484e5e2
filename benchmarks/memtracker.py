"""The largest batch sizes by PyTorch's MemTracker, one step on fake tensors for each size that is tried.

`sweep_speed.py` runs it in a process of its own, since the fake GPU stays registered. The model is built once, and one
step is taken first, so that the optimizer's state exists before the first size.

`python -m benchmarks.memtracker SOURCE ...` records what it says of published figures, those of `benchmarks.measured`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
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
from batchfinder.training.child_process import build_with
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step, Workload, call, default_loss
from benchmarks.measured.__main__ import RESULTS
from benchmarks.measured.case import Case

TakeStep = Callable[[int, int], None]
Ready = tuple[Workload, TakeStep, torch.optim.Optimizer]
"""The workload, a function that takes one step of (batch size, length), and the optimizer."""


@contextlib.contextmanager
def on_fake_cpu(model: str) -> Iterator[Ready]:
    """Fake tensors of the CPU. Those of "cuda" cannot run a backward on a machine without a GPU."""
    with FakeTensorMode():
        workload = build_workload(model)
        yield _ready(workload, workload.make_batch)


@contextlib.contextmanager
def on_fake_gpu(model: str, capability: tuple[int, int]) -> Iterator[Ready]:
    """batchfinder's fake GPU, with the kernels that CUDA runs at a compute capability."""
    mode = fake_device.FakeDeviceMode(allow_non_fake_inputs=True)
    with mode:
        workload = build_workload(model)
    device = fake_device.register()
    autocast.register()
    sdpa.register(capability, False)
    rnn.register()
    fake_device.hide_from_transformers()
    step = Step(workload, StepConfig(), device, lambda tensor, dtype: fake_device.fake_copy(tensor, device, dtype))
    # It answers `.item()`, without which the attention masks cannot be made.
    recorder = AllocationRecorder(capability, lambda: "", lambda name: None)
    with mode, torch.autograd.set_multithreading_enabled(False), recorder:
        fake_device.move_module(workload.model, step._move)
        yield _ready(workload, step.batch)


def _ready(workload: Workload, make_batch: Callable[[int, int], Any]) -> Ready:
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


def peak_of_case(case: Case) -> int:
    """What MemTracker makes of a published figure: the most in the steps of its training, on fake tensors of the CPU.

    What the figure holds beside, and what was taken off it, is as batchfinder's own estimate has it.
    """
    at_start = 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build_with(case.workload.builder, case.workload.arguments)
        step = Step(workload, case.step, torch.device("cpu"))
        fake_device.move_module(workload.model, lambda tensor, dtype: tensor.detach().to(dtype), step.weights_dtype)
        tracker = MemTracker()
        tracker.track_external(workload.model)

        def on_stage(number: int, stage: str, micro_batch: int) -> None:
            nonlocal at_start
            if number == 0 and stage == "zero_grad":
                at_start = total("current")
            if stage == "batch":
                tracker.reset_mod_stats()  # it follows a module through one forward and backward

        def total(which: str) -> int:
            return max(int(figures["Total"]) for figures in tracker.get_tracker_snapshot(which).values())

        with tracker:
            step.run(case.batch_size, case.seq_len, on_stage)
    return total("peak") + case.outside_bytes - (at_start if case.less_model else 0)


def record_cases(sources: Sequence[str]) -> None:
    """Write what MemTracker says of the cases of `benchmarks.measured`.

    The result, results/measured/memtracker/SOURCE.json, is complete after every case; those that it has are left out.
    So are runs on several GPUs, which are not sharded here.
    """
    for source in sources:
        path = RESULTS / "memtracker" / f"{source}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
        for case in importlib.import_module(f"benchmarks.measured.{source}.cases").cases():
            if case.name in rows or case.published_bytes is None or case.step.gpus > 1:
                continue
            started = time.perf_counter()
            try:
                row: dict[str, Any] = {"predicted_bytes": peak_of_case(case)}
            except Exception as error:
                row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            rows[case.name] = {**row, "seconds": round(time.perf_counter() - started, 2)}
            print(source, case.name, rows[case.name], flush=True)
            facts = {"benchmark": "memtracker", "source": source, "versions": {"torch": version("torch")}, "rows": rows}
            path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Print the largest size of each length as JSON, and every size tried with its peak and seconds.

    The argument is JSON: `model`, `seq_lens`, `budget_bytes`, `device` (`cpu` or `gpu`), and `near`, where the search
    starts, by length.
    """
    if not sys.argv[1].startswith("{"):
        record_cases(sys.argv[1:])
        return
    request = json.loads(sys.argv[1])
    model, cells = request["model"], []
    with on_fake_cpu(model) if request["device"] == "cpu" else on_fake_gpu(model, (6, 1)) as ready:
        workload, take_step, optimizer = ready
        take_step(2, request["seq_lens"][0])
        for seq_len in request["seq_lens"]:
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

            near = request["near"].get(str(seq_len))
            search = Secant(limit_bytes=request["budget_bytes"], tolerance=0.0, predicted=near, margin=0.0)
            probe = FunctionProbe(peak, capacity_bytes=request["budget_bytes"])
            outcome = find_max_batch_size(probe, Shape(seq_len), search=search)
            cells.append({"seq_len": seq_len, "max_batch_size": outcome.max_batch_size, "tried": tried})
    print(json.dumps(cells))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
