"""Loops of several ranks, with DDP and `fully_shard` on a CPU: cases that `tests/forks.py` runs."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder import tune_batch_size
from batchfinder.measure import trial
from batchfinder.measure.key_fields import describe_sharding
from batchfinder.snapshot.training_state import TrainingState
from tests.forked import at_once
from tests.forks import SECONDS, lift_limit, limit_growth, ready_to_search, verdict_of
from tests.loop.loops import MESSAGE

WIDTH = 32
STAGES = ("forward", "backward", "optimizer", "collective")


def prepare() -> None:
    """Import what the cases do."""
    warnings.simplefilter("ignore")
    trial.clear = lambda device: None  # a full collection for each try would take most of the time
    ready_to_search(Net())


def respond(request: dict[str, Any]) -> list[Any]:
    """What each rank of a case came to: `{"size": 2, "case": "identical", "kind": "fsdp"}`, and more of the case's."""
    size, case = request.pop("size"), CASES[request.pop("case")]
    seconds = 0.8 * request.pop("seconds", SECONDS)
    return at_once(size, lambda rank: case(rank, **request), seconds)


class Block(nn.Module):
    """Two layers and dropout, beside which the input goes on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    """Blocks, of which the last is left out of every other forward if that is asked for."""

    def __init__(self, width: int = WIDTH, blocks: int = 2, alternating: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)
        self.register_buffer("seen", torch.zeros(1))
        self.alternating, self.forwards = alternating, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.forwards += 1
        for index, block in enumerate(self.blocks):
            if not (self.alternating and self.forwards % 2 and index == len(self.blocks) - 1):
                x = block(x)
        return self.head(x)


def wrapped(kind: str, width: int = WIDTH, blocks: int = 2) -> nn.Module:
    """The net, the same on all ranks, as each kind of training in parallel has it."""
    torch.manual_seed(1)
    net, size = Net(width, blocks, alternating=kind == "ddp unused"), dist.get_world_size()
    if kind.startswith("ddp"):
        options = {"find_unused_parameters": kind == "ddp unused", "static_graph": kind == "ddp static"}
        return DistributedDataParallel(net, bucket_cap_mb=0.005, **options)
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, init_device_mesh("cpu", (size,)), plan)
        return net
    if kind == "fsdp1":
        policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
        return FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    shape, names = ((size // 2, 2), ("replicate", "shard")) if kind == "hsdp" else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh)
    return net


class Failing(TorchDispatchMode):
    """Runs out of memory in the second collective of a backward; is no attribute of what is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left and func.namespace in ("c10d", "_c10d_functional"):
            self.left -= 1
            if not self.left:
                raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


INJECTED: dict[str, Any] = {"rank": None, "stage": "", "above": 0}


def make_loop(kind: str) -> Any:
    """A loop whose step does what `INJECTED` says on one rank, at more samples than `above`."""
    rank, model = dist.get_rank(), wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []

    def train_step(x: torch.Tensor) -> None:
        active = INJECTED["rank"] == rank and len(x) > INJECTED["above"]
        stage, mode = INJECTED["stage"] if active else "", Failing()

        def reach(here: str) -> None:
            if here == stage:
                INJECTED.get("act", _runs_out)()

        with mode:
            loss = model(x).square().mean()
            reach("forward")
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # as for a log
            losses.append(mean.item())
            loss.register_hook(lambda gradient: reach("backward"))
            mode.left = 2 if stage == "collective" else 0
            loss.backward()
            mode.left = 0
        if kind != "tp":  # its layers without a plan have plain tensors, which PyTorch does not clip with the others
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        reach("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    return SimpleNamespace(
        train_step=train_step,
        make_batch=lambda batch_size, seq_len: torch.randn(batch_size, WIDTH),
        state=[model, optimizer, losses],
        losses=losses,
    )


def _runs_out() -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def local_bytes(loop: Any) -> dict[str, Any]:
    """Weights, gradients and optimizer state as this rank holds them, and what else training depends on."""
    model, optimizer, losses = loop.state

    def held(tensor: Any) -> bytes | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return None if local is None else local.detach().numpy().tobytes()

    named = [*model.named_parameters(), *model.named_buffers()]
    state = [[held(value) for value in values.values()] for values in optimizer.state.values()]
    return {
        "tensors": {name: held(tensor) for name, tensor in named},
        "gradients": {name: held(tensor.grad) for name, tensor in named},
        "optimizer": state,
        "losses": list(losses),
        "random": torch.get_rng_state().tolist(),
    }


def identical(rank: int, kind: str) -> list[Any]:
    """Train, search where a rank runs out of memory above 3 samples, and train on; the same without a search."""
    ended = []
    for searches in (False, True):
        loop = make_loop(kind)
        torch.manual_seed(7 + rank)
        INJECTED.update(rank=None)
        loop.train_step(loop.make_batch(3, None))
        if searches:
            INJECTED.update(rank=dist.get_world_size() - 1, stage="backward", above=3)
            found = tune_batch_size(loop.train_step, loop.make_batch, loop.state, max_batch_size=8, tolerance=0)
            INJECTED.update(rank=None)
        for _ in range(4):
            loop.train_step(loop.make_batch(3, None))
        ended.append(local_bytes(loop))
    return [found.batch_size, ended[0] == ended[1], len(set(ended[0]["losses"]))]


def injected(rank: int, kind: str, times: int) -> list[Any]:
    """Search again and again, with a failure in each stage of each rank in turn; with the seconds of the longest."""
    loop, size, longest = make_loop(kind), dist.get_world_size(), 0.0
    torch.manual_seed(7 + rank)
    loop.train_step(loop.make_batch(3, None))
    before, wrong = local_bytes(loop), []
    for time_ in range(times):
        for failing in range(size):
            for stage in STAGES:
                INJECTED.update(rank=failing, stage=stage, above=1 + time_ % 2)
                started = time.monotonic()
                found = tune_batch_size(
                    loop.train_step, loop.make_batch, loop.state, max_batch_size=4, tolerance=0, cache=False
                )
                longest = max(longest, time.monotonic() - started)
                messages = {trial.measurement.message for trial in found.result.trials if not trial.fits}
                ended = (found.batch_size, local_bytes(loop) == before, messages)
                if ended != (1 + time_ % 2, True, {f"on rank {failing}: {MESSAGE}"}):
                    wrong.append([failing, stage, repr(ended)])
    INJECTED.update(rank=None)
    loop.train_step(loop.make_batch(3, None))
    return [wrong, longest]


def shards(rank: int, kind: str) -> list[Any]:
    """Bytes that a copy of the training state takes, those of the whole model's with its optimizer's, and the key's."""
    loop = make_loop(kind)
    loop.train_step(loop.make_batch(3, None))
    whole = sum(4 * parameter.numel() for parameter in loop.state[0].parameters())
    kept = describe_sharding([loop.state[0]])
    for block in loop.state[0].blocks:
        block.set_reshard_after_forward(False)
    keys = [kept, describe_sharding([loop.state[0]]), describe_sharding([Net()])]
    return [TrainingState.capture(*loop.state).nbytes, 3 * whole, keys]


def cached(rank: int, kind: str, folder: str) -> list[Any]:
    """A first and a second start."""
    ends, target = [], 8 * dist.get_world_size() if "target" in kind else None
    for _ in range(2):
        loop = make_loop(kind.partition(" ")[0])

        def train_step(given: Any, loop: Any = loop) -> None:
            for x in [given] if target is None else given:
                loop.train_step(x)

        INJECTED.update(rank=1, stage="forward", above=5)
        found = tune_batch_size(
            train_step,
            loop.make_batch,
            loop.state,
            target_batch_size=target,
            max_batch_size=8,
            tolerance=0,
            cache=folder,
        )
        ends.append([found.batch_size, found.result.source, len(found.result.trials)])
    return ends


def ends(rank: int, how: str) -> str:
    """The last rank fails for good while sizes are tried: the error of each."""
    loop = make_loop("fsdp")
    ended = Path(os.environ["ENDED"] + how)

    def hang() -> None:
        _until(ended.exists)
        os._exit(0)

    def bug() -> None:
        raise ValueError("the labels are wrong")

    acts: dict[str, Callable[[], None]] = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hung": hang,
        "a bug": bug,
    }
    INJECTED.update(rank=dist.get_world_size() - 1, stage="forward", above=1, act=acts[how])
    dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=3 if how == "hung" else 60)
    try:
        tune_batch_size(loop.train_step, loop.make_batch, loop.state, max_batch_size=4, cache=False)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ended.touch()


def unnamed(rank: int) -> str:
    """The state names the module inside DDP."""
    loop = make_loop("ddp")
    model, *others = loop.state
    try:
        tune_batch_size(loop.train_step, loop.make_batch, [model.module, *others], max_batch_size=4, cache=False)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.01)


def limited(rank: int, kind: str, limit_mib: int, steps: int, more: float, lower_mib: int = 0) -> dict[str, Any]:
    """Search and train under a real RLIMIT_AS, lower on the last rank, and train on with more.

    Returns:
        The size found, each try, the steps that ran at it, and what a larger one came to.
    """
    width = 16
    model = wrapped(kind, width, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.randn(batch_size, 256, width)

    def trained(batch_size: int, steps: int) -> Iterator[str]:
        for _ in range(steps):
            try:
                train_step(make_batch(batch_size, None))
            except RuntimeError as error:
                yield verdict_of(error)
                return
            yield "ran"

    train_step(make_batch(1, None))  # gloo's and the engine's threads exist before the limit does
    last = rank == dist.get_world_size() - 1
    limit_growth(limit_mib - lower_mib * last)
    found = tune_batch_size(train_step, make_batch, [model, optimizer], cache=False, tolerance=0.02)
    size = found.batch_size
    at = list(trained(size, steps))
    dist.barrier()
    beyond = list(trained(int((1 + more) * size) + 1, 1))
    lift_limit()
    tries = [[trial.batch_size, trial.measurement.message] for trial in found.result.trials]
    return {"size": size, "tries": tries, "at": [at.count("ran"), at[-1]], "beyond": beyond}


CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case for case in (identical, injected, shards, cached, ends, unnamed, limited)
}
