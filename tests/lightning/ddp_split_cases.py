"""What the tests of split batches on several ranks run: each case is a function of the rank, and returns JSON."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy

from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.micro_batching import closure
from batchfinder.measure import trial
from batchfinder.measure.trial import clear
from tests.forks import lift_limit, limit_growth
from tests.lightning import nets
from tests.lightning.ddp_fits import ranks
from tests.lightning.ddp_split_nets import Branching, Buggy, Sharing, Tight, Wide
from tests.lightning.varied_lengths import Given, Reader


class Neighbour(pl.Callback):
    """Takes memory from a step on."""

    def __init__(self, mib: int) -> None:
        self.mib = mib

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.mib and trainer.global_step == 2:
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (soft - (self.mib << 20), hard))


class Logs(pl.Callback):
    """What was logged after each batch, and each gradient."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.gradients: list[torch.Tensor | None] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found = [parameter.grad for parameter in pl_module.parameters()]
        self.gradients.extend(None if gradient is None else gradient.clone() for gradient in found)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def fit(module: Any, split: Any = None, **options: Any) -> Logs:
    """Train on all ranks from one seed."""
    logs = Logs()
    strategy = DDPStrategy(**options.pop("ddp", {}))
    callbacks = [logs] if split is None else [split, logs]
    options = {"max_epochs": 2, "log_every_n_steps": 1, "accelerator": "auto", **options}
    trainer = nets.trainer(callbacks=callbacks, strategy=strategy, devices=ranks(), **options)
    pl.seed_everything(2, verbose=False)
    trainer.fit(module)
    return logs


def close(one: Any, other: Any) -> bool:
    """Whether two gradients are within 1e-6 of the larger, or both missing."""
    if one is None or other is None:
        return one is other
    return bool((one - other).norm() <= 1e-6 * other.norm() + 1e-15)


def exact(rank: int, make: Callable[[], Reader], recover: bool, **ddp: Any) -> list[Any]:
    """Train whole and split; ranks have different numbers of micro-batches."""
    whole_module, module = make(), make()
    whole = fit(whole_module, ddp=ddp)
    split = fit(module, Given({8: 4, 16: 3 - rank % 2}, recover=recover), ddp=ddp)
    same = all(close(one, other) for one, other in zip(split.gradients, whole.gradients, strict=True))
    logs = all(
        abs(ours[name] - theirs[name]) < 1e-9
        for ours, theirs in zip(split.logged, whole.logged, strict=True)
        for name in theirs
    )
    weights = all(map(torch.allclose, module.parameters(), whole_module.parameters()))
    missing = sum(gradient is None for gradient in whole.gradients)
    return [same, logs, weights, missing, len(module.sizes) > len(whole.logged)]


def injected(rank: int) -> list[Any]:
    """Out of memory on each rank in turn, in each stage: the bits are those of the run without."""
    plain, module = Sharing(rows=24 * ranks(), batch_size=4), Sharing(True, rows=24 * ranks(), batch_size=4)
    sizes: dict[int | None, int] = {8: 3, 16: 2}
    split = Given(sizes, recover=True)
    expected, found = fit(plain, Given(sizes, recover=True)), fit(module, split)
    tensors = [[*one.parameters(), *one.buffers()] for one in (plain, module)]
    return [
        len(module.failed),
        split.table.sizes == sizes,
        all(torch.equal(a, b) for a, b in zip(*tensors, strict=True)),
        repr(expected.logged) == repr(found.logged),
        module.trainer.global_step,
    ]


def shrinks(rank: int) -> list[Any]:
    """Less memory on one rank: all ranks make smaller micro-batches, and it is one run."""
    plain, module = Reader(ignored=False, rows=32 * ranks()), Tight(70, rows=32 * ranks())
    split = Given({8: 8, 16: 8}, recover=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, split)
    fit(plain, Given({8: 8, 16: 8}, recover=True))
    said = [str(warning.message) for warning in caught if "BatchFinder" in str(warning.message)]
    weights = all(
        torch.allclose(one, other, rtol=1e-9)
        for one, other in zip(module.parameters(), plain.parameters(), strict=True)
    )
    return [{str(length): size for length, size in split.table.sizes.items()}, weights, said]


def ends(rank: int, module: Callable[[], Reader]) -> list[Any]:
    """How a run ends."""
    try:
        fit(module(), Given({8: 8, 16: 8}, recover=True))
    except BaseException as error:
        return [f"{type(error).__name__}: {error}"]
    return [""]


def raises() -> None:
    """A bug."""
    raise KeyError("labels_2")


def dies() -> None:
    """As the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def found(rank: int, make: Callable[..., Reader] = Reader, **ddp: Any) -> list[Any]:
    """The finder itself: lengths, loader, target."""
    module = make(rows=64, batch_size=4)
    module.most = 64
    finder = BatchFinder(
        16 * ranks(), split_batches=True, weight="tokens", seq_lens=[4, 8, 16], tolerance=0, cache=False
    )
    fit(module, finder, ddp=ddp)
    sizes = {str(length): size for length, size in finder.micro_batch_sizes.items()}
    return [finder.batch_size, sizes, module.trainer.global_step]


def limited(rank: int, limit_mib: int, taken_mib: int) -> list[Any]:
    """One process under a real limit, which becomes less from the third step on.

    What is left is several times what a process takes for its threads and its math library, some 10 to 30 MiB. The
    headroom is in bytes, as a share of it would be one of what the process holds, too.
    """
    trial.clear = closure.clear = clear
    (torch.ones(4, requires_grad=True) * 2).sum().backward()  # the engine's threads exist before the limit does
    pl.seed_everything(1, verbose=False)
    module = Wide()
    lengths = [128, 64, 32]
    finder = BatchFinder(split_batches=True, weight="tokens", seq_lens=lengths, headroom="8MiB", cache=False)
    trainer = nets.trainer(callbacks=[finder, Neighbour(taken_mib)])
    limit_growth(limit_mib)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module)
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    lift_limit()
    said = [str(warning.message) for warning in caught if "ran out" in str(warning.message)]
    results = finder.results.get("fit", {})
    found = [results[length].max_batch_size for length in sorted(results)]
    return [error, trainer.global_step, found, list(finder.micro_batch_sizes.values()), said]


CASES: dict[str, Callable[[int], list[Any]]] = {
    "exact": partial(exact, make=Reader, recover=True),
    "exact, last backward": partial(exact, make=Reader, recover=False),
    "exact, unused": partial(exact, make=Branching, recover=True, find_unused_parameters=True),
    "exact, unused, last backward": partial(exact, make=Branching, recover=False, find_unused_parameters=True),
    "exact, views": partial(exact, make=Reader, recover=True, gradient_as_bucket_view=True),
    "injected": injected,
    "shrinks": shrinks,
    "hopeless": partial(ends, module=partial(Tight, 15)),
    "bug": partial(ends, module=partial(Buggy, raises)),
    "dies": partial(ends, module=partial(Buggy, dies)),
    "found": found,
    "found, unused": partial(found, make=Branching, find_unused_parameters=True),
    "limited": partial(limited, limit_mib=96, taken_mib=0),
    "limited further in training": partial(limited, limit_mib=144, taken_mib=88),
}
