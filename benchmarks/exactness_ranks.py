"""How exact a recording of one rank of several is: its peaks, beside those of real ranks that train together.

A cell is a model of real width and few layers, spread over GPUs by a strategy. Its steps are taken by as many
processes on PyTorch's CUDA build on the stub, each with a card of its own and the stub's NCCL between them, which call
DDP or FSDP themselves (what splits layers and sequences is `training.strategies`); and by one process alone, tried,
and recorded and replayed by the CUDA build and the fake device. Where an event of another stream is waited for, the
host is ahead (`--events in-order` of `stub run`). With DDP it is not: NCCL would then hold each bucket until the host
waits, and with it the time decides when the first step's bucket goes. Needs `batchfinder stub install` and peft. Run:
`python benchmarks/exactness_ranks.py`; `--only WORD` takes the cells whose name has the word, and `--dry-run` one of
them, without writing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # import from the repository

from batchfinder.devices import device_for, find_gpu  # noqa: E402
from batchfinder.recording.simulation import Simulation  # noqa: E402
from batchfinder.results import Shape  # noqa: E402
from batchfinder.simulator.alloc_conf import AllocatorSettings  # noqa: E402
from batchfinder.stub_cards import open_session, stub_card  # noqa: E402
from batchfinder.training.spec import CUDA_BUILD, DDP_STRATEGIES, FAKE_DEVICE, StepOptions  # noqa: E402

RESULT = ROOT / f"benchmarks/results/exactness_ranks-{os.cpu_count()}-cores.json"
BATCH_SIZE, SEQ_LEN, STEPS = 4, 128, 3
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 3},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 3},
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""As wide as real ones: the values of smaller tensors would be computed."""


def cells() -> dict[str, tuple[str, StepOptions, int]]:
    """By name: the model, how it is trained, and the micro-batches of a step."""
    bf16 = {"precision": "bf16-mixed"}
    taken: list[tuple[dict[str, Any], int]] = [
        ({"strategy": "fsdp2", **bf16}, 1),
        ({"strategy": "fsdp2", **bf16}, 2),
        ({"strategy": "fsdp2", "gradient_checkpointing": True}, 1),
        ({"strategy": "fsdp2-shard-grad-op", **bf16}, 1),
        ({"strategy": "fsdp2", "lora": 8, **bf16}, 1),
        ({"strategy": "fsdp", **bf16}, 1),
        ({"strategy": "fsdp-shard-grad-op"}, 1),
        ({"strategy": "fsdp", "lora": 8, **bf16}, 1),
        ({"strategy": "ddp"}, 1),
        ({"strategy": "ddp", **bf16}, 2),
        ({"strategy": "ddp-bucket-view"}, 1),
        ({"strategy": "zero1", **bf16}, 1),
    ]
    found = {}
    for model in MODELS:
        for options, micro_batches in taken:
            words = " ".join(str(value) if value is not True else name for name, value in options.items())
            found[f"{model} {words} x {micro_batches}"] = model, StepOptions(gpus=2, **options), micro_batches
    for options in ({"strategy": "fsdp2-tp", "tensor_parallel": 2}, {"strategy": "fsdp2-cp", "context_parallel": 2}):
        found[f"llama {options['strategy']} bf16-mixed x 1"] = "llama", StepOptions(gpus=4, **bf16, **options), 1
    return found


def real_ranks(folder: Path, model: str, options: StepOptions, micro_batches: int) -> list[list[int]]:
    """Of each rank what is allocated after the steps, and the most that was allocated and reserved, in bytes.

    Raises:
        RuntimeError: a rank ended without saying so.
    """
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    settings = {name: value for name, value in vars(options).items() if value != getattr(StepOptions(), name)}
    events = "early" if options.strategy in DDP_STRATEGIES else "in-order"
    with open_session([stub_card("A100", 40 << 30)] * options.gpus, events=events) as session:
        path = f"{ROOT}{os.pathsep}{session.variables()['PYTHONPATH']}"
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.gpus}", "--standalone",
             __file__, json.dumps(settings), str(micro_batches)],
            env={**os.environ, **session.variables(), "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            cwd=folder, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    ranks = sorted(json.loads(rank) for rank in re.findall(r"RANK(\[.*?\])", done.stdout))
    if len(ranks) < options.gpus:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-2000:])
    return [rank[1:] for rank in ranks]


def train_as_rank(settings: dict[str, Any], micro_batches: int) -> None:
    """Take the steps as one of the ranks, spread by PyTorch's own calls, and print what that took."""
    import torch
    import torch.distributed as dist
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp.wrap import CustomPolicy

    from batchfinder.models import build_workload
    from batchfinder.training.step import Step
    from batchfinder.training.strategies import mesh_shape, shard

    options, rank = StepOptions(**settings), int(os.environ["RANK"])
    strategy, card = str(options.strategy), torch.device("cuda", rank)
    torch.cuda.set_device(card)
    workload = build_workload(**options.workload("config.json").arguments)
    dist.init_process_group("nccl", device_id=card)
    step, model = Step(workload, replace(options.step(micro_batches), steps=STEPS), card), workload.model
    half = torch.bfloat16 if options.precision == "bf16-mixed" else None
    names = set(model._no_split_modules or ())
    layers = [each for each in model.modules() if type(each).__name__ in names]
    tied = getattr(model.config, "tie_word_embeddings", False)
    layers = [each for each in layers if not (tied and "Embeddings" in type(each).__name__)]
    if strategy in DDP_STRATEGIES:
        by_views = strategy == "ddp-bucket-view"
        spread: Any = torch.nn.parallel.DistributedDataParallel(
            model.to(card), device_ids=[rank], gradient_as_bucket_view=by_views
        )
    elif strategy in ("fsdp", "fsdp-shard-grad-op"):
        trained = [each for each in model.modules() if getattr(getattr(each, "weight", None), "requires_grad", False)]
        units = {*layers, *(each for each in trained if options.lora and not list(each.children()))}
        how = fsdp.ShardingStrategy.FULL_SHARD if strategy == "fsdp" else fsdp.ShardingStrategy.SHARD_GRAD_OP
        spread = fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=how,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            mixed_precision=fsdp.MixedPrecision(half, half, half),
            use_orig_params=True,
            device_id=card,
        )
    elif strategy in ("fsdp2", "fsdp2-shard-grad-op"):
        policy = fsdp.MixedPrecisionPolicy(half, half, half)
        for layer in reversed(layers):
            fsdp.fully_shard(layer, mp_policy=policy, reshard_after_forward=strategy == "fsdp2")
        spread = fsdp.fully_shard(model, mp_policy=policy, reshard_after_forward=None if strategy == "fsdp2" else False)
    else:
        split = options.tensor_parallel or options.context_parallel or 1
        shape = mesh_shape(strategy, options.gpus, split)
        mesh = init_device_mesh("cuda", tuple(shape.values()), mesh_dim_names=tuple(shape))
        spread = shard(model, strategy, mesh, options.precision, lambda module: module.to(card))
    step.workload = replace(workload, model=spread)
    step.run(BATCH_SIZE, SEQ_LEN)
    torch.cuda.synchronize()
    seen = [rank, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    print("RANK" + json.dumps(seen), flush=True)
    dist.barrier()
    os._exit(0)


def take(name: str, model: str, options: StepOptions, micro_batches: int) -> dict[str, Any]:
    """A cell: what its real ranks took, and what is said of one."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = real_ranks(Path(folder), model, options, micro_batches)
        said = {}
        spec, device = options.workload(f"{folder}/config.json"), device_for(find_gpu("A100 40GB"))
        for recorder in (CUDA_BUILD, FAKE_DEVICE):
            start = time.perf_counter()
            with Simulation(spec, replace(options.step(micro_batches), steps=STEPS), recorder) as simulation:
                timeline = simulation.probe(device, [SEQ_LEN]).unlimited(BATCH_SIZE, Shape(SEQ_LEN))
                said[recorder] = [
                    timeline.stages[-1].allocated_bytes, timeline.max_allocated_bytes, timeline.max_reserved_bytes
                ]  # fmt: skip
                if recorder == CUDA_BUILD:
                    tried = simulation.tried_sizes(device, AllocatorSettings())(BATCH_SIZE, Shape(SEQ_LEN))
                    said["tried"] = [tried.peak_allocated_bytes, tried.peak_reserved_bytes]
            said[f"{recorder} seconds"] = round(time.perf_counter() - start, 1)
    return {"name": name, "ranks": ranks, **said}


def nearest(row: dict[str, Any], said: list[int]) -> list[int]:
    """The rank that is nearest to what is said. What is left over of a block is allocated too, so ranks differ."""
    found: list[int] = min(row["ranks"], key=lambda rank: sum(abs(a - b) for a, b in zip(rank, said, strict=True)))
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By recorder: in how many cells a rank has these peaks, and how far they are off; of DDP and all else."""
    found: dict[str, Any] = {"cells": len(rows)}
    for kind, some in (
        ("sharded", [row for row in rows if "fsdp" in row["name"]]),
        ("DDP", [row for row in rows if "fsdp" not in row["name"]]),
    ):
        for recorder in (CUDA_BUILD, FAKE_DEVICE):
            off = [[said / real - 1 for said, real in zip(row[recorder], nearest(row, row[recorder]), strict=True)]
                   for row in some]  # fmt: skip
            for place, what in enumerate(("at the end", "allocated", "reserved")):
                each = [errors[place] for errors in off]
                found[f"{kind}, {recorder}, {what}"] = {
                    "cells": len(each),
                    "equal": sum(error == 0 for error in each),
                    "lowest %": round(100 * min(each, default=0), 2),
                    "highest %": round(100 * max(each, default=0), 2),
                }
        found[f"{kind}, tried is replayed"] = sum(row["tried"] == row[CUDA_BUILD][1:] for row in some)
    seconds = {each: [row[f"{each} seconds"] for row in rows] for each in (CUDA_BUILD, FAKE_DEVICE)}
    return {**found, "seconds, median": {each: statistics.median(some) for each, some in seconds.items() if some}}


def main() -> None:
    """Take the cells one after the other and print a line for each, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose name has this word")
    parser.add_argument("--dry-run", action="store_true", help="one cell, without writing")
    options = parser.parse_args()
    wanted = {name: cell for name, cell in cells().items() if options.only in name}
    rows = []
    for name, cell in list(wanted.items())[: 1 if options.dry_run else None]:
        rows.append(take(name, *cell))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows), indent=1))
    if not options.dry_run and not options.only:
        described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        result = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
            "source": subprocess.run(described, capture_output=True, text=True).stdout.strip(),
            "summary": summary(rows),
            "cells": rows,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_as_rank(json.loads(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
