"""What an older PyTorch with CUDA 12 does on the stub; `batchfinder stub install --torch 2.6.0 --minimal` brings it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchfinder import sweep
from batchfinder.cuda_stub import CudaBuild, StubUnavailable, find_build
from batchfinder.devices import device_for, find_gpu
from batchfinder.programs import dry_run
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import BEFORE_2_12, AllocatorSettings
from batchfinder.stub_cards import open_session, stub_card
from batchfinder.testing import CudaStub, CudaStubFixture
from batchfinder.training.spec import StepOptions, torch_of
from tests.cuda_build.test_allocator_model import MEMORY, compare, requests_of
from tests.cuda_build.test_memory_paths import embedding_backward, fragmented, graphs, out_of_memory, pooled
from tests.cuda_build.test_processes import DDP
from tests.cuda_build.test_recorder import BERT, GPT2, peaks

pytestmark = pytest.mark.cuda_build
RECORDER = "cuda-build==2.6.0"
MIB = 1 << 20


@pytest.fixture(scope="module")
def older() -> CudaBuild:
    """PyTorch 2.6.0, whose CUDA is 12.4."""
    try:
        return find_build("2.6.0")
    except StubUnavailable as error:
        pytest.skip(str(error))


def trained(precision: str) -> list[float]:
    """Losses of a small encoder, and what it took at most."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 64), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(64, 100)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=precision == "fp32")
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "float16")
    ids = torch.randint(0, 100, (4, 32), device="cuda")
    losses = []
    for _ in range(4):
        with torch.autocast("cuda", getattr(torch, precision, None), enabled=precision != "fp32"):
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("bfloat16", "float16"))]
)
def test_a_model_learns(cuda_stub: CudaStubFixture, older: CudaBuild, precision: str) -> None:
    """With values, as on any device."""
    seen = cuda_stub(gpu="A100", build=older).run(trained, precision)
    assert seen.result[-1] < seen.result[0] < 10
    assert seen.report.unwritten == ()


def seed_of_all_ranks() -> list[int]:
    """What torchtitan reads of a card, half of the time past int64, and a library that Triton before 3.3 links with."""
    import ctypes

    import torch

    ctypes.CDLL("libcuda.so")
    return [torch.full((8,), 255, dtype=torch.uint8, device=each).view(torch.uint64).item() for each in ("cpu", "cuda")]


def test_what_programs_of_its_day_do(cuda_stub: CudaStubFixture, older: CudaBuild) -> None:
    """A number of uint64 is read whole, and `libcuda.so` is there without its version."""
    assert cuda_stub(build=older).run(seed_of_all_ranks).result == [2**64 - 1] * 2


def test_a_dry_run_keeps_none_of_the_hosts_memory(older: CudaBuild, tmp_path: Path) -> None:
    """What the allocator's history adds does not take the place of large blocks: 1.5 GB had been left."""
    script = """
import torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

torch.empty(1, device="cuda")
before = resident()
for _ in range(100):
    for _ in range(30): torch.empty(1 << 10, device="cuda")
    torch.ones(1 << 20, dtype=torch.int64) % 16
print(resident() - before)
"""
    (tmp_path / "train.py").write_text(script)
    with (tmp_path / "out").open("w+") as output:
        dry_run([sys.executable, "train.py"], [stub_card("T4")], build=older, folder=tmp_path, output=output.fileno())
        output.seek(0)
        assert int(output.read()) < 200


def test_its_allocator(cuda_stub: CudaStubFixture, older: CudaBuild) -> None:
    """Out of memory with its own words, fragments, expandable segments, pools, graphs, and a kernel of CUB's."""
    said, ooms, retries, again, (free, total) = (
        cuda_stub(memory="4GiB", held="512MiB", build=older).run(out_of_memory).result
    )
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 512.00 MiB is free." in said
    assert (ooms, retries, again, free, total) == (1, 1, 1 << 30, 512 * MIB, 4 << 30)
    for allocator, reserved in (("", 600), ("expandable_segments:True", 600), ("roundup_power2_divisions:2", 608)):
        seen = cuda_stub(memory="8GiB", allocator=allocator, values=False, build=older).run(fragmented)
        assert seen.result["reserved_bytes.all.peak"] == reserved * MIB
    assert cuda_stub(memory="2GiB", values=False, build=older).run(pooled).result == [2, 2, 6 << 20]
    assert cuda_stub(memory="8GiB", build=older).run(graphs).result == [True, False, True, True, 512]
    assert cuda_stub(gpu="RTX 4090", values=False, build=older).run(embedding_backward).result > 2 * 30000 * 64 * 4


@pytest.mark.exhaustive
def test_two_of_its_ranks(cuda_stub: CudaStubFixture, older: CudaBuild, tmp_path: Path) -> None:
    """torchrun and NCCL of its version."""
    script = tmp_path / "train.py"
    script.write_text(DDP)
    with open_session(
        [stub_card("A100", 16 << 30), stub_card("A100", 16 << 30, held_bytes=4 << 30)], build=older
    ) as session:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)],
            env={**os.environ, **session.variables()}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    ranks: list[Any] = sorted(json.loads(rank) for rank in re.findall(r"RANK(\[.*?\])", done.stdout))
    assert ranks == [[0, True, 1, 11], [1, True, 1, 11]], done.stderr[-3000:]


def test_each_block_is_the_one_that_pytorch_takes(cuda_stub: CudaStubFixture, older: CudaBuild) -> None:
    """Of equal free blocks that at the lowest address, which the stub and the simulation give by one rule."""
    compare(cuda_stub(memory=MEMORY, build=older), requests_of(2), BEFORE_2_12)


def tuned() -> tuple[int, str]:
    """The size that a loop gets, and what simulating says."""
    import torch

    import batchfinder

    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batches: Any) -> None:
        for batch in batches:
            model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = batchfinder.tune_batch_size(
        train_step,
        lambda size, _: torch.randn(size, 1024, device="cuda"),
        [model, optimizer],
        max_batch_size=64,
        cache=False,
    )
    try:
        return found.batch_size, str(batchfinder.simulate)
    except batchfinder.BatchFinderError as error:
        return found.batch_size, str(error)


def test_a_loop_is_tuned_and_simulating_says_what_it_needs(cuda_stub: CudaStubFixture, older: CudaBuild) -> None:
    """What measures runs on an older PyTorch; what records a step needs operators that it lacks."""
    batch_size, said = cuda_stub(gpu="T4", build=older).run(tuned).result
    assert batch_size == 64
    assert said == "a simulated step needs PyTorch 2.11 or later; this is 2.6.0+cu124"


@pytest.mark.parametrize(
    ("model", "gpu", "options", "micro_batches"),
    [
        (BERT, "T4", StepOptions(precision="16-mixed"), 1),
        # Its embedding is its head, too: 2.6 sums the two gradients in place, which 2.13 does not.
        (GPT2, "A100", StepOptions(optimizer="adafactor", precision="bf16-mixed"), 2),
    ],
)
def test_a_recorded_step_is_the_step(
    model: dict[str, Any], gpu: str, options: StepOptions, micro_batches: int, older: CudaBuild, tmp_path: Path
) -> None:
    """To the byte, by the rules of that version's allocator; each block with its operator, module and shape."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    spec, config = options.workload(str(path)), options.step(micro_batches)
    real = CudaStub(gpu=gpu, build=older).run(peaks, spec, config, 8, 64).result
    settings = AllocatorSettings.from_environment(torch_of(RECORDER))
    assert settings == BEFORE_2_12
    with Simulation(spec, config, RECORDER) as simulation:
        facts = simulation.facts()
        assert (facts.recorder, facts.versions["torch"]) == (RECORDER, "2.6.0+cu124")
        probe = simulation.probe(device_for(find_gpu(gpu)), [64], settings)
        trace = probe.trace(8, Shape(64), exact=True)
        timeline = probe.steady_state(8, Shape(64), exact=True).timeline
    assert (timeline.max_allocated_bytes, timeline.max_reserved_bytes) == tuple(real)
    structure = trace.structure
    assert {"parameter", "optimizer", "gradient", "activation", "input", "workspace"} <= set(structure.kinds)
    norms = [block for block, name in enumerate(structure.operators) if name == "aten.native_layer_norm.default"]
    assert {re.sub(r"^\w+", "", trace.shapes[block]) for block in norms} == {"[8, 64, 768]", "[8, 64, 1]"}
    assert all("ln" in structure.modules[block] or "Norm" in structure.modules[block] for block in norms)


def test_a_sweep_names_it(older: CudaBuild, tmp_path: Path) -> None:
    """Each size was tried on that version, on which the largest trains and the next one runs out of memory.

    The fake device, which that version does not have, predicts it on the PyTorch that is installed.
    """
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    (row,) = sweep(str(path), gpus="t4", seq_lens=512, cache=False, recorder=RECORDER)
    assert (row.cell.options.recorder, row.recorder_version) == (RECORDER, "2.6.0+cu124")
    assert row.recorder_in_words == "CUDA build 2.6.0+cu124, on which each size is tried"
    assert len(row.trials) <= 3
    card = CudaStub(gpu="t4", memory=row.usable_bytes, build=older)
    step = StepOptions().workload(str(path)), StepOptions().step()
    assert card.run(peaks, *step, row.batch_size, 512).result[1] <= row.usable_bytes
    with pytest.raises(Exception, match=r"out of memory|num_alloc_retries"):
        card.run(peaks, *step, row.batch_size + 1, 512)


@pytest.mark.parametrize("recorder", [RECORDER, "cuda-build"])
def test_what_cudnn_would_take_is_named(older: CudaBuild, tmp_path: Path, recorder: str) -> None:
    """Where a build has none of its libraries: what is recorded lacks their workspaces, and says so."""
    spec = StepOptions().workload(resnet(tmp_path))
    with Simulation(spec, StepOptions(recorder=recorder).step(), recorder) as simulation:
        probe = simulation.probe(device_for(find_gpu("t4")), [64], AllocatorSettings.from_environment())
        trace = probe.trace(2, Shape(64), exact=True)
    without = older.cudnn_folder is None and recorder == RECORDER
    assert any(each.startswith("cuDNN takes no workspaces") for each in trace.unmodelled) == without
    assert any(each.startswith("cuDNN's batch norm") for each in trace.unmodelled)


def resnet(folder: Path) -> str:
    """The path of a small one's config."""
    path = folder / "config.json"
    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic", "num_labels": 10}
    path.write_text(json.dumps({"model_type": "resnet", "architectures": ["ResNetForImageClassification"], **sizes}))
    return str(path)
