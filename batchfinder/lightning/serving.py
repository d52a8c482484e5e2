"""One stage served: its batches looked at, its sizes found for each length, and what was found said."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from batchfinder.cache import Store
from batchfinder.lightning.batches import ProbeBatches
from batchfinder.lightning.feedback import check_loaders, has_size
from batchfinder.lightning.finding import Finding, Found
from batchfinder.lightning.participants import participants
from batchfinder.lightning.probe import Setting
from batchfinder.lightning.progress import Progress
from batchfinder.lightning.ranks import agreed_data, agreed_memory
from batchfinder.lightning.summary import summary_line
from batchfinder.lightning.trainer_state import capture_data
from batchfinder.outcome import Shape
from batchfinder.probing.agreeing import Ranks
from batchfinder.probing.known import Limits
from batchfinder.probing.memory import memory_of

Lengths = Callable[[int | None], Sequence[int | None]]
Train = tuple[int, Shape, ProbeBatches]


def batches_of(finder: Any, trainer: Any, stage: str, loop: Any, ranks: Ranks, resized: bool = True) -> ProbeBatches:
    """Where a stage's batches come from; loaders that cannot be given a size are refused before any is tried.

    Args:
        finder: the callback that asks.
        trainer: set up.
        stage: `fit`, `validate`, `test` or `predict`.
        loop: the stage's.
        ranks: who agrees.
        resized: whether the loaders are to be given a size.
    """
    untouched = capture_data(trainer, finder)
    try:
        batches = ProbeBatches(trainer, trainer.lightning_module, loop._data_source, finder.make_batch)
        if ranks.together(lambda: batches.loaders, "made its loaders") is not None and resized:
            trusted = has_size(trainer.lightning_module, finder.batch_size_attribute)
            check_loaders(loop._data_source, batches.loaders, stage, trusted)
    finally:
        untouched.restore()
    return batches


def setting_for(trainer: Any, stage: str, target: int | None, train: Train | None, splits: bool) -> Setting:
    """What is tried where batches are not split.

    Args:
        trainer: set up.
        stage: `fit`, `validate`, `test` or `predict`.
        target: samples per optimizer step; None for no target.
        train: what a fit trains with while it validates; None where it makes its batches itself, and to fit.
        splits: whether that fit splits its batches.
    """
    if trainer.state.fn != "fit":
        return Setting(stage, alone=True)
    if stage == "fit":
        return Setting(stage, target, trainer.accumulate_grad_batches, num_devices=trainer.world_size)
    return Setting(stage, None, 2 if splits else trainer.accumulate_grad_batches, train)


def find_sizes(
    finder: Any,
    trainer: Any,
    setting: Setting,
    batches: ProbeBatches,
    ranks: Ranks,
    cap: int | None,
    lengths: Lengths,
    also: Sequence[Any] = (),
) -> list[Found]:
    """Find each length's size, and say what was found.

    Args:
        finder: the callback that asks.
        trainer: set up, with its model on the device.
        setting: what is tried.
        batches: where batches come from.
        ranks: who agrees.
        cap: the largest size of use; None for none but the dataset's.
        lengths: says, given the longest length in the data, which ones to find sizes for, longest first. Where batches
            are split, lengths below one at which a batch fits whole are left out.
        also: callbacks that take part in the tries besides the user's.

    Raises:
        OutOfMemory: not even one sample fits.
        Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
    """
    started = time.perf_counter()
    memory = agreed_memory(memory_of(trainer.strategy.root_device, finder.budget), ranks)
    free = memory.free_bytes()
    reserve = finder.headroom if isinstance(finder.headroom, int) else int(finder.headroom * free)

    def look() -> tuple[int | None, int | None]:
        caps = [size for size in (finder.max_batch_size, cap, batches.dataset_size()) if size is not None]
        return min(caps, default=None), None if finder.seq_lens else batches.longest_seq_len()

    with Progress(trainer) as progress:
        untouched = capture_data(trainer, finder)
        try:
            cap, longest = agreed_data(*ranks.together(look, "looked at the data"), ranks)
            store = _store(finder.cache)
            kept, starting = participants(trainer, finder, finder.probe_callbacks)
            finding = Finding(
                trainer,
                finder,
                setting,
                batches,
                ([*kept, *also], starting),
                memory,
                Limits(cap, finder.tolerance, reserve, finder.headroom),
                store,
                progress.tried,
                finder.predict,
                ranks,
            )
            shapes = [Shape(seq_len) for seq_len in lengths(longest)]
            keys = [None if store is None else finding.key(shape) for shape in shapes]
        finally:
            untouched.restore()
        founds: list[Found] = []
        try:
            for shape, key in zip(shapes, keys, strict=True):
                finding.predicted = _scaled(founds[-1], shape) if founds and setting.split_batch_size else None
                founds.append(finding.find(shape, key))
                if setting.split_batch_size is not None and founds[-1].batch_size >= setting.split_batch_size:
                    break
        finally:
            finding.close()
    overhead = (time.perf_counter() - started - sum(found.seconds for found in founds)) / len(founds)
    for found in founds:
        seconds = found.seconds + overhead
        rank_zero_info(summary_line(setting.stage, found.outcome, found.plan, free, reserve, seconds))
    return founds


def _scaled(found: Found, shape: Shape) -> int | None:
    """As many tokens as at another length; more may fit, where attention took its part of the memory."""
    longer = found.outcome.shape.seq_len
    if longer is None or shape.seq_len is None:
        return None
    return found.outcome.max_batch_size * longer // shape.seq_len


def _store(cache: Any) -> Store | None:
    if cache is False:
        return None
    if isinstance(cache, Store):
        return cache
    return Store(None if cache is True else cache)
