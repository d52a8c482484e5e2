"""Trainers of several ranks, with DDP and FSDP through accelerate on a CPU: cases that `tests/forks.py` runs."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from batchfinder import tune_trainer
from batchfinder.measure import trial
from tests.forked import at_once
from tests.forks import ready_to_search
from tests.huggingface import trainers

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    },
}


def prepare() -> None:
    """Import what the cases do."""
    warnings.simplefilter("ignore")
    trial.clear = lambda device: None  # a full collection for each try would take most of the time
    ready_to_search(trainers.language_model())


def respond(request: dict[str, Any]) -> list[Any]:
    """What each rank of a case came to: `{"size": 2, "case": "identical", "kind": "ddp"}`."""
    size, case = request.pop("size"), CASES[request.pop("case")]
    return at_once(size, lambda rank: case(rank, **request))


def make(kind: str, folder: str, **arguments: Any) -> Any:
    """A trainer of this rank's."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), ACCELERATE_USE_CPU="true")
    trainer = trainers.make_trainer(Path(folder), **KINDS[kind], **arguments)
    if kind == "fsdp":
        # accelerate 1.15 has FSDP for accelerators alone (state.py), though all of its code for it runs on a CPU.
        trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    return trainer


def identical(rank: int, kind: str) -> list[Any]:
    """Train with sizes that were searched, where the last rank fits fewer samples, and with the same given by hand."""
    ended = []
    with tempfile.TemporaryDirectory() as folder:
        for searches in (True, False):
            trainer = make(kind, folder, **({} if searches else SIZES))
            if searches:
                trainers.MOST[0] = 7 - 2 * (rank == dist.get_world_size() - 1)
                found = tune_trainer(trainer, cache=False)
                sizes = [trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps]
                texts = sorted({one.measurement.message for one in found.result.trials if not one.fits})
            trainers.MOST[0] = 8
            trainer.train()
            ended.append(came_of(trainer))
    return [sizes, texts, ended[0] == ended[1], len(ended[0]["losses"]), any(ended[0]["sharded"])]


SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}


def came_of(trainer: Any) -> dict[str, Any]:
    """Losses and this rank's weights."""
    named = dict(trainer.model.named_parameters())
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in named.items()}
    return {
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "weights": {name.removeprefix("module."): each.detach().numpy().tobytes() for name, each in local.items()},
        "sharded": [isinstance(each, DTensor) for each in named.values()],
        "random": torch.rand(1).item(),
    }


CASES: dict[str, Callable[..., Any]] = {"identical": identical}
