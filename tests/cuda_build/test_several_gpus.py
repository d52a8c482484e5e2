"""One rank of several, recorded and tried alone: it takes what it takes beside real others, whose NCCL is the stub's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchfinder import sweep
from batchfinder.devices import device_for, find_gpu
from batchfinder.testing import CudaStubFixture
from batchfinder.training.spec import CUDA_BUILD, StepOptions
from benchmarks.exactness_ranks import MODELS, take

pytestmark = pytest.mark.cuda_build


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [
        (StepOptions(gpus=2, strategy="fsdp2", precision="bf16-mixed"), 2),
        pytest.param(
            StepOptions(gpus=2, strategy="fsdp", precision="bf16-mixed", lora=8), 1, marks=pytest.mark.exhaustive
        ),
        pytest.param(StepOptions(gpus=2, strategy="fsdp", precision="bf16-mixed"), 1, marks=pytest.mark.exhaustive),
        pytest.param(StepOptions(gpus=2, strategy="ddp"), 1, marks=pytest.mark.exhaustive),
        pytest.param(
            StepOptions(gpus=4, strategy="fsdp2-tp", precision="bf16-mixed", tensor_parallel=2),
            1,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_rank_alone_is_a_rank_among_others(
    cuda_stub: CudaStubFixture, options: StepOptions, micro_batches: int
) -> None:
    """To the byte: what is allocated at the end, the most that is, and what is reserved; tried, and replayed.

    It is one of the ranks: what is left over of a block is allocated too, and so a rank can have a MiB more.
    """
    row = take("", "llama", options, micro_batches)
    said, ranks = row[CUDA_BUILD], row["ranks"]
    assert row["tried"] == said[1:]
    if options.strategy == "ddp":  # the time decides when NCCL lets the first step's bucket go
        assert min(abs(said[0] - rank[0]) for rank in ranks) < said[0] // 100
        assert 0 <= said[1] - max(rank[1] for rank in ranks) < said[0] // 5
    else:
        assert said in ranks


@pytest.mark.exhaustive
def test_a_sweep_tries_each_number_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size found trains and the next does not, of 2 GPUs and of 8, of which each holds less; NCCL takes its part."""
    monkeypatch.delenv("BATCHFINDER_RECORDER")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(MODELS["llama"]))
    settings = {"strategy": "fsdp2", "precision": "bf16-mixed"}
    rows = sweep("config.json", gpus="T4", num_gpus=[2, 8], seq_lens=[128], cache=False, **settings)
    for row in rows:
        assert row.to_json()["recorder"] == CUDA_BUILD
        assert {row.batch_size: True, row.batch_size + 1: False}.items() <= {
            t.batch_size: t.fits for t in row.trials
        }.items()
    two, eight = rows
    assert two.batch_size < eight.batch_size
    assert eight.cell.device.usable_bytes < device_for(find_gpu("T4")).usable_bytes
