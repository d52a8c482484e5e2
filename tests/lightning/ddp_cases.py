"""What the tests of several ranks run: each case is a function of the rank, and returns JSON values."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from batchfinder.cache import Store
from batchfinder.distributed import agreement
from batchfinder.lightning.callback import BatchFinder
from batchfinder.measure import trial
from batchfinder.measure.host_limits import status
from batchfinder.measure.trial import clear
from batchfinder.search import Prediction
from tests.lightning import nets
from tests.lightning.ddp_failures import FAILURES
from tests.lightning.ddp_fits import fit, ranks, runs_out, sizes, trainer
from tests.lightning.ddp_nets import Branching, Evaluated, Grouped, Logged, Sharded
from tests.lightning.identical_runs import same, two_runs
from tests.lightning.oom_net import Bounded


def identical(
    rank: int, make: Any, accumulation: int = 1, target: int | None = None, kind: Any = DDPStrategy, **strategy: Any
) -> list[Any]:
    """Train with the finder, and from its sizes without it."""

    def options(name: str) -> dict[str, Any]:
        accelerator = "auto" if kind is DDPStrategy else "cpu"
        options: dict[str, Any] = {"strategy": kind(**strategy), "accelerator": accelerator}
        if strategy.get("tensor_parallel_size") == 1:  # else PyTorch does not clip gradients of several meshes together
            options["gradient_clip_val"] = 0.5
        return {**options, "accumulate_grad_batches": accumulation} if name == "direct" else options

    found, direct = two_runs(make, devices=ranks(), target=target, options=options)
    assert found.finder is not None
    optimizers = [repr(run.trainer.optimizers[0].state_dict()["state"]) for run in (found, direct)]
    return [
        found.finder.batch_size,
        len(found.module.losses),
        found.module.losses == direct.module.losses,
        same(found.module, direct.module),
        optimizers[0] == optimizers[1],
        found.trainer.global_step == direct.trainer.global_step > 0,
    ]


def small(size: int) -> Any:
    """With BatchNorm and dropout."""
    return nets.ConvNet(size, rows=64, side=4, width=2)


def branching(size: int) -> Any:
    """With a parameter that is not always used."""
    return Branching(size)


def static(size: int) -> Any:
    """The same, always used."""
    return Branching(size, always=True)


class Counted(Store):
    """Counts what it is asked for."""

    read = written = 0

    def get(self, key: Any) -> Any:
        self.read += 1
        return super().get(key)

    def put_record(self, record: Any) -> None:
        self.written += 1
        super().put_record(record)


def cached(rank: int) -> list[Any]:
    """A second start of as many ranks certifies the answer; a third, of one rank with less memory, searches."""
    store = Counted(os.environ["BATCHFINDER_CACHE"])
    first, _ = fit(Bounded(most=5), BatchFinder(max_batch_size=8, tolerance=0, cache=store))
    second, _ = fit(Bounded(most=5), BatchFinder(max_batch_size=8, tolerance=0, cache=store))
    sources = [finder.results["fit"][None].source for finder in (first, second)]
    seen = [second.batch_size, len(sizes(first)) > 1, sizes(second), sources, store.read, store.written]
    fit(Bounded(), BatchFinder(max_batch_size=1, cache=store, budget=(20 + rank) << 30))
    named: dict[Any, Any] = {}
    if rank == 0:
        named = {record.key.max_batch_size: record.key.extra["ranks"] for record in store.records()}
    return [*seen, named.get(8), len(named.get(1, []))]


def resumed(rank: int) -> list[Any]:
    """A run goes on from a checkpoint without a cache; the largest size to try is one that fits one rank alone."""
    folder = Path(os.environ["BATCHFINDER_CACHE"]).parent
    finder = BatchFinder(16, tolerance=0, cache=False)
    module, saves = Bounded(most=5 - rank, rows=64), pl.callbacks.ModelCheckpoint(folder, filename="it")
    trainer(finder, saves, enable_checkpointing=True, max_epochs=1).fit(module)
    again = BatchFinder(16, tolerance=0, cache=False)
    module = Bounded(most=5 - rank, rows=64)
    trainer(again, max_epochs=2).fit(module, ckpt_path=folder / "it.ckpt")
    (found,) = again.results["fit"].values()
    return [finder.batch_size, again.batch_size, found.source, sizes(again), len(module.losses)]


def no_cache(rank: int) -> list[Any]:
    """The first rank alone says that there is no cache."""
    place = Path(os.environ["BATCHFINDER_CACHE"]).parent / "a file"
    place.write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finder, error = fit(Bounded(most=5), BatchFinder(max_batch_size=8, cache=place))
    return [finder.batch_size, error, *warned_of(caught)]


def warned_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """Those that are ours, without the place of the cache."""
    texts = [str(warning.message) for warning in caught if "BatchFinder" in str(warning.message)]
    return [text.replace(str(Path(os.environ["BATCHFINDER_CACHE"]).parent), "FOLDER") for text in texts]


def own_group(rank: int) -> list[Any]:
    """The user's code has made a process group."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finder, error = fit(Grouped(runs_out))
    return [finder.batch_size, error, *warned_of(caught)]


class RunsOut(Bounded):
    """One rank runs out of memory in training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and len(self.trainer.callbacks) and isinstance(self.trainer.callbacks[0], BatchFinder):
            runs_out()


def on_oom(rank: int) -> list[Any]:
    """One rank lowers the record that all have."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = fit(RunsOut(), BatchFinder(max_batch_size=8, tolerance=0))[1]
    return [error.partition(":")[0], *warned_of(caught)]


def stages(rank: int) -> list[Any]:
    """A fit and a validation of their own; the caps are each rank's part of the data."""
    pl.seed_everything(1, verbose=False)
    finder = BatchFinder(tolerance=0, cache=False, also=["validate"])
    both, module = trainer(finder, max_epochs=1), Evaluated(rows=9 * ranks())
    both.fit(module)
    seen = [finder.batch_size, max(sizes(finder)), max(sizes(finder, "validate"))]
    both.validate(module, verbose=False)
    return [*seen, max(sizes(finder, "validate"))]


def limited(rank: int, mib: int) -> list[Any]:
    """A real limit on the address space of each rank, and some steps at the size that was found."""
    trial.clear = clear
    limit = status("VmSize") + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    module = nets.Transformer(rows=200 * ranks(), seq_len=64, width=64)
    finder, error = fit(module, BatchFinder(tolerance=0.3, cache=False), max_steps=4, max_epochs=-1)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    failed = {trial.measurement.message[:9] for trial in finder.results["fit"][64].trials if not trial.fits}
    return [finder.batch_size, sorted(failed), error, module.trainer.global_step]


def predicted(rank: int) -> list[Any]:
    """Each rank predicts by itself, and all start from the least."""
    agreement.can_record, agreement.most_scratch = (lambda device: True), (lambda device: 0)
    agreement.predict_batch_size = lambda *_: Prediction(20 + 2 * rank)
    finder, error = fit(Bounded(most=23, rows=48 * ranks()), BatchFinder(tolerance=0, cache=False))
    return [finder.batch_size, sizes(finder)[0], error]


def unpredicted(rank: int) -> list[Any]:
    """One rank has no prediction."""
    agreement.can_record, agreement.most_scratch = (lambda device: True), (lambda device: 0)
    agreement.predict_batch_size = lambda *_: None if rank else Prediction(20)
    finder, error = fit(Bounded(most=23, rows=48 * ranks()), BatchFinder(tolerance=0, cache=False))
    return [finder.batch_size, sizes(finder)[0], error]


CASES: dict[str, Callable[[int], list[Any]]] = {
    **FAILURES,
    "identical": lambda rank: identical(rank, small),
    "identical, accumulating": lambda rank: identical(rank, small, 2, 16 * ranks()),
    "identical, logged": lambda rank: identical(rank, lambda size: Logged(size, rows=64)),
    "identical, scheduled": lambda rank: identical(rank, lambda size: nets.Transformer(size, rows=64, scheduled=True)),
    "identical, unused": lambda rank: identical(rank, branching, find_unused_parameters=True),
    "identical, static": lambda rank: identical(rank, static, static_graph=True),
    "identical, views": lambda rank: identical(rank, small, gradient_as_bucket_view=True),
    "identical, sharded": lambda rank: identical(
        rank, Sharded, kind=ModelParallelStrategy, data_parallel_size=ranks(), tensor_parallel_size=1
    ),
    "identical, sharded and accumulating": lambda rank: identical(
        rank, Sharded, 2, 16 * 2, ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=ranks() // 2
    ),
    "cached": cached,
    "uneven limits": lambda rank: limited(rank, 110 - 35 * (rank == ranks() - 1)),
    "resumed": resumed,
    "no cache": no_cache,
    "own group": own_group,
    "predicted": predicted,
    "unpredicted": unpredicted,
    "ran out": on_oom,
    "stages": stages,
}
