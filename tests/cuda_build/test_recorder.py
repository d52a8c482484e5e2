"""Steps recorded on PyTorch's CUDA build: what is recorded is what the allocator does in the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cuda_stub import StubUnavailable, find_build
from batchfinder.devices import device_for, find_gpu
from batchfinder.errors import RecordingFailed
from batchfinder.recording.simulation import RecordingClient, Simulation
from batchfinder.results import Shape
from batchfinder.simulator.trace import Trace
from batchfinder.stub_cards import card_of_device
from batchfinder.testing import CudaStub
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE, RecordingJob, StepConfig, StepOptions, WorkloadSpec

pytestmark = pytest.mark.cuda_build
# As wide as real ones: the values of smaller tensors would be computed.
BERT = {"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 8000}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "vocab_size": 8000}


@pytest.fixture(autouse=True)
def build() -> None:
    """Without a CUDA build there is nothing to compare."""
    try:
        find_build()
    except StubUnavailable as error:
        if os.environ.get("BATCHFINDER_NO_SKIPS"):
            raise
        pytest.skip(str(error))


def peaks(spec: WorkloadSpec, config: StepConfig, batch_size: int, seq_len: int) -> tuple[int, int]:
    """Most allocated and most reserved of the step, as the allocator on the card counts them."""
    import torch

    from batchfinder.models import build_workload
    from batchfinder.training.step import Step

    workload = build_workload(**spec.arguments)
    device = torch.device("cuda", 0)
    step = Step(workload, config, device)
    workload.model.to(device, step.weights_dtype)
    step.run(batch_size, seq_len)
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize(
    ("model", "gpu", "options", "micro_batches", "batch_size"),
    [
        (BERT, "H100", StepOptions(precision="16-mixed"), 1, 8),
        (GPT2, "T4", StepOptions(optimizer="adafactor"), 2, 5),
        (GPT2, "T4", StepOptions(lora=8, precision="16-mixed"), 1, 5),  # built on the card, whose attention is its own
    ],
)
def test_a_recorded_step_is_the_step(
    model: dict[str, Any], gpu: str, options: StepOptions, micro_batches: int, batch_size: int, tmp_path: Path
) -> None:
    """Replayed on the card, it has the peaks that PyTorch counts, to the byte; peft's adapters are built in forks."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    spec, config = options.workload(str(path)), options.step(micro_batches)
    real = CudaStub(gpu=gpu).run(peaks, spec, config, batch_size, 64).result
    with Simulation(spec, config, CUDA_BUILD) as simulation:
        assert simulation.facts().recorder == CUDA_BUILD
        probe = simulation.probe(device_for(find_gpu(gpu)), [64])
        trace = probe.trace(batch_size, Shape(64), exact=True)
        timeline = probe.steady_state(batch_size, Shape(64), exact=True).timeline
    assert (timeline.max_allocated_bytes, timeline.max_reserved_bytes) == tuple(real)
    assert {"parameter", "optimizer", "gradient", "activation", "input", "workspace"} <= set(trace.structure.kinds)
    assert any("attn" in name or "attention" in name for name in trace.structure.modules)
    assert "float32[8000, 768]" in trace.shapes


@pytest.mark.parametrize("options", [StepOptions(precision="bf16-mixed"), StepOptions(gpus=2, strategy="fsdp2")])
def test_the_fake_device_records_in_its_process_too(options: StepOptions, tmp_path: Path) -> None:
    """As it does in one of its own, on a PyTorch without CUDA."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    spec, device = options.workload(str(path)), device_for(find_gpu("H100"))

    def trace(simulation: Simulation) -> Trace:
        assert simulation.recorder == FAKE_DEVICE
        return simulation.probe(device, [64]).trace(4, Shape(64), exact=True)

    with Simulation(spec, options.step(), CUDA_BUILD) as there, Simulation(spec, options.step()) as own:
        assert trace(there.on_fake_device()) == trace(own)


def test_adapters_on_the_fake_device_leave_the_card_to_later_recordings(tmp_path: Path) -> None:
    """Importing peft initializes CUDA where bitsandbytes is there, after which no fork of that process could use it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    plain, adapters, device = StepOptions(), StepOptions(lora=8), device_for(find_gpu("H100"))
    with Simulation(plain.workload(str(path)), plain.step(), CUDA_BUILD) as simulation:
        changed = simulation.with_spec(adapters.workload(str(path)), adapters.step())
        for each in (changed.on_fake_device(), changed, simulation):
            assert each.probe(device, [64]).trace(4, Shape(64), exact=True).sizes


def test_what_it_does_not_record_is_said() -> None:
    """Several GPUs; and the card decides: a recording for another has other kernels."""
    spec = WorkloadSpec("tests.builders.small:mlp")
    with RecordingClient(spec, recorder=CUDA_BUILD) as recorder:
        card = card_of_device(device_for(find_gpu("T4"))).setting
        jobs = [RecordingJob(StepConfig(gpus=gpus), (7, 5), 4, None, card=card) for gpus in (1, 2)]
        alone, several = map(recorder.submit, jobs)
        assert alone.result().structure.order
        with pytest.raises(RecordingFailed, match="2 GPUs: PyTorch's CUDA build does not record that yet"):
            several.result()


def runs(spec: WorkloadSpec, config: StepConfig, batch_size: int, seq_len: int) -> bool:
    """Whether the step has enough memory."""
    import torch

    try:
        peaks(spec, config, batch_size, seq_len)
    except torch.OutOfMemoryError:
        return False
    return True


def test_a_sweep_finds_what_runs(tmp_path: Path) -> None:
    """The size found runs on a card of that memory, and the next one runs out of it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT))
    command = [sys.executable, "-m", "batchfinder", "sweep", "config.json", "--gpu", "t4", "--budget", "1GiB"]
    command += ["--seq-len", "128", "--recorder", "cuda-build", "--no-cache", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    (row,) = json.loads(done.stdout)["rows"]
    assert row["recorder"] == "cuda-build"
    spec, found, card = StepOptions().workload(str(path)), row["max_batch_size"], CudaStub(gpu="T4", memory="1GiB")
    assert [card.run(runs, spec, StepConfig(), size, 128).result for size in (found, found + 1)] == [True, False]


def test_the_command(tmp_path: Path) -> None:
    """`estimate --recorder cuda-build` has PyTorch's own peaks, which the fake device misses here, and says so in JSON."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT))
    spec = StepOptions().workload(str(path))
    real = CudaStub(gpu="T4").run(peaks, spec, StepConfig(), 8, 128).result
    command = [sys.executable, "-m", "batchfinder", "estimate", "--model", "config.json", "--gpu", "t4", "--json"]
    done = subprocess.run(
        [*command, "--recorder", "cuda-build"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    found = json.loads(done.stdout)
    assert found["recorder"] == "cuda-build"
    assert (found["allocated_bytes"], found["reserved_bytes"]) == tuple(real)
