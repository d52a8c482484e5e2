"""torchao's CPUOffloadOptimizer on PyTorch's CUDA build, and what the fake device records of its stand-in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from batchfinder.devices import device_for, find_gpu
from batchfinder.errors import RecordingFailed
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Shape
from batchfinder.training.spec import CUDA_BUILD, StepConfig, WorkloadSpec

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_stub")]
GPT2 = {"model_type": "gpt2", "n_layer": 2, "vocab_size": 8000}
FOLDER = os.environ.get("BATCHFINDER_TEST_TORCHAO") or str(Path(sys.executable).parents[1] / "torchao")
"""Where CI has torchao alone."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Of the model's config.json."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2))
    return str(file)


def train(folder: str, path: str, config: StepConfig, batch_size: int, seq_len: int) -> tuple[int, int, int]:
    """Most allocated, most reserved, and what the optimizer holds on the card."""
    import torch

    from batchfinder.models import build_workload
    from batchfinder.training.optimizers import states_of
    from batchfinder.training.step import Step

    workload = build_workload(path)
    sys.path.append(folder)
    device = torch.device("cuda", 0)
    step = Step(workload, config, device)
    workload.model.to(device, step.weights_dtype)
    step.run(batch_size, seq_len)
    assert type(step.optimizer).__name__ == "CPUOffloadOptimizer"
    states = sum(each.nbytes for _, tensors in states_of(step.optimizer) for each in tensors if each.is_cuda)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), states


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(StepConfig(optimizer="adamw-offload"), marks=pytest.mark.exhaustive),
        StepConfig(optimizer="adamw-offload", micro_batches=2),
        pytest.param(StepConfig(optimizer="adamw-offload", precision="bf16-true"), marks=pytest.mark.exhaustive),
    ],
    ids=["fp32", "accumulated", "bf16"],
)
def test_the_library_takes_the_same(config: StepConfig, path: str, cuda_stub: Any) -> None:
    """The peaks of the recorded stand-in are those of torchao's own optimizer, to 1 %."""
    if not Path(FOLDER, "torchao").is_dir():
        pytest.skip(f"torchao is not in {FOLDER}: pip install --no-deps --target brings it")
    allocated, reserved, states = cuda_stub(gpu="A10").run(train, FOLDER, path, config, 4, 128).result
    with Simulation(WorkloadSpec("batchfinder.models:build_workload", {"spec": path}), config) as simulation:
        probe = simulation.probe(device_for(find_gpu("A10")), [128])
        trace = probe.trace(4, Shape(128), exact=True)
        timeline = probe.steady_state(4, Shape(128), exact=True).timeline
    assert timeline.max_allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert timeline.max_reserved_bytes == pytest.approx(reserved, rel=0.01)
    kinds = zip(trace.sizes, trace.structure.kinds, strict=True)
    assert sum(size for size, kind in kinds if kind == "optimizer") == states


def test_the_other_recorder_refuses_it(path: str) -> None:
    """It would take the optimizer's memory, and its time, on this machine."""
    config = StepConfig(optimizer="adamw-offload")
    spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": path})
    with Simulation(spec, config, CUDA_BUILD) as simulation:
        probe = simulation.probe(device_for(find_gpu("A10")), [128])
        with pytest.raises(RecordingFailed, match="the optimizer adamw-offload, which would compute on this machine"):
            probe.trace(4, Shape(128), exact=True)
