"""Finding the largest batch size for a training loop of one's own, and the key under which it is cached."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchfinder.cache import CacheKey, Store
from batchfinder.cache.key import Json
from batchfinder.distributed.agreement import (
    AgreedEntry,
    AgreedProbe,
    Ranks,
    agree_on_key,
    connect_groups,
    forget_trials,
    free_buckets,
    predict_on_each,
)
from batchfinder.errors import InvalidValue
from batchfinder.loop.options import LoopConfig, Phases, check_arguments, device_of, warn_not_cached, world_size
from batchfinder.loop.probe import LoopProbe
from batchfinder.loop.result import TunedBatchSize, TunedBatchSizes
from batchfinder.measure.device_memory import SEGMENTS_EXPAND, Memory, expand_segments, memory_of
from batchfinder.measure.key_fields import describe_batch, describe_sharding, measured_key_fields, versions
from batchfinder.measure.options import SearchOptions
from batchfinder.measure.trial import TrialSession, prepare_cache
from batchfinder.measure.tuner import SearchLimits, Tuner, spare_bytes
from batchfinder.models.fingerprint import fingerprint_module, fingerprint_optimizer
from batchfinder.probe import Probe
from batchfinder.results import Shape, Trial
from batchfinder.search import Bounds, Prediction
from batchfinder.units import parse_count

_log = logging.getLogger(__name__)


def make_key(config: LoopConfig, shape: Shape, sample: Any, memory: Memory, limits: SearchLimits) -> CacheKey:
    """The key of a loop; `sample` is a batch of the smallest size, for the shapes and dtypes of the data."""
    device, optimizers = config.device, config.optimizers
    modules = [item for item in config.state if isinstance(item, nn.Module)]
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "loop": [f"{type(item).__module__}.{type(item).__qualname__}" for item in config.state],
        "target": limits.target_batch_size,
        "headroom": limits.headroom,
        "phases": config.phases.described,
        "training": [[name for name, part in module.named_modules() if part.training] for module in modules],
        "compiled": [any(part._compiled_call_impl is not None for part in module.modules()) for module in modules],
        "settings": process_settings(device),
        **describe_sharding(modules),
    }
    return CacheKey(
        **measured_key_fields(memory, limits, device, shape, optimizers),
        model=fingerprint_module(nn.ModuleList(modules), config.make_batch, config.train_step),
        mode="train",
        precision="as train_step has it",
        optimizer_options={str(index): fingerprint_optimizer(optimizer) for index, optimizer in enumerate(optimizers)},
        attention="",
        gradient_checkpointing=False,
        accumulation=1,
        versions=versions(),
        extra=extra,
    )


def process_settings(device: torch.device) -> dict[str, Json]:
    """What the process has set for every step on a device: autocast, dtypes, kernels, threads."""
    kind = device.type
    found: dict[str, Json] = {
        "autocast": [torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
    }
    if kind == "cpu":
        return {**found, "threads": torch.get_num_threads()}
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        **found,
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.version()],
        "attention": [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
    }


MakeKey = Callable[[LoopConfig, Shape, Any, Memory, SearchLimits], CacheKey]


def tune_loop(
    config: LoopConfig,
    limits: SearchLimits,
    budget_bytes: int | None,
    seq_lens: Sequence[int | None],
    store: Store | None,
    on_trial: Callable[[Trial], object] | None = None,
    make_key: MakeKey = make_key,
) -> TunedBatchSizes:
    """Find the size for each length, with one copy of the training state for all of them.

    Lengths are tried in the order given. `make_key` is given a batch of the smallest size as well. All ranks of
    `torch.distributed` call this, and get the size that fits on each of them.

    Raises:
        OutOfMemory: not even the smallest size fits.
        Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        RankFailed: it was raised on another rank.
        RankLost: another rank has ended, or does not answer within the time limit.
    """
    started = time.perf_counter()
    shapes = [Shape(seq_len) for seq_len in seq_lens]
    sizes: dict[int | None, TunedBatchSize] = {}
    with ExitStack() as opened:
        connect_groups(config.device)
        ranks = opened.enter_context(closing(Ranks.open()))
        for replica in config.replicas:
            opened.callback(forget_trials, replica)
            free_buckets(replica)
        memory = ranks.barrier_call(lambda: memory_of(config.device, budget_bytes), "looked at its memory")

        def free_bytes() -> int:
            return ranks.all_reduce_min(memory.free_bytes())[0]

        limits = limits.with_memory(free_bytes())
        varies = any(ranks.all_gather(config.phases.others is not None))
        if varies and expand_segments(config.device):
            _log.info(SEGMENTS_EXPAND)
        session = opened.enter_context(TrialSession(memory, config.device, limits.reserve_bytes, config.capture))
        session.spare_bytes = spare_bytes(free_bytes(), varies) if config.device.type == "cuda" else 0
        own = LoopProbe(config, limits, session)
        probe: Probe = own if ranks.size == 1 else AgreedProbe(own, ranks)

        def open_probe() -> tuple[Probe, int]:
            ranks.barrier_call(session.open, "got ready to try sizes")
            return probe, ranks.all_reduce_min(session.max_peak_bytes())[0]

        def predict(shape: Shape, bounds: Bounds, max_peak_bytes: int) -> Prediction | None:
            record = functools.partial(own.record, shape=shape)
            return predict_on_each(ranks, session, record, bounds, max_peak_bytes, own.later_steps)

        held = memory.held_bytes()
        tuner = Tuner(
            free_bytes,
            limits,
            open_probe,
            hint=predict,
            on_trial=on_trial,
            warn=warn_not_cached,
            held_bytes=held,
            time_steps=session.time_steps,
        )
        keys = [] if store is None else _keys(config, limits, memory, shapes, make_key, ranks)
        each = (time.perf_counter() - started) / len(shapes)
        for index, shape in enumerate(shapes):
            entry = None if store is None else store.entry(keys[index], config.label)
            # While ranks agree the first one alone reads and writes; on its own any of them may lower a record.
            found = tuner.find(shape, entry if entry is None or ranks.size == 1 else AgreedEntry(entry, ranks))
            found.raise_if_nothing_fits()
            found = replace(found, entry=entry, seconds=found.seconds + each)
            sizes[shape.seq_len] = TunedBatchSize(found, config.device.type, config.caller)
    return TunedBatchSizes(sizes)


def _keys(
    config: LoopConfig, limits: SearchLimits, memory: Memory, shapes: Sequence[Shape], make_key: MakeKey, ranks: Ranks
) -> list[CacheKey]:
    """The keys of all shapes. A batch of each is made for it, and the random numbers are put back."""
    # No tensors: a step has not run, and a copy of them would take longer than the look-up.
    untouched = config.capture(left_alone=[torch.Tensor, Optimizer])
    try:
        return [
            agree_on_key(
                lambda shape=shape: make_key(  # type: ignore[misc]
                    config, shape, config.make_batch(limits.bounds.first, shape.seq_len), memory, limits
                ),
                ranks,
            )
            for shape in shapes
        ]
    finally:
        untouched.restore()


def tune_batch_size(
    train_step: Callable[[Any], object],
    make_batch: Callable[[int, int | None], Any],
    state: Any,
    *,
    device: torch.device | str | None = None,
    goal: str = "memory",
    seq_lens: Sequence[int] | None = None,
    evaluate: Callable[[], object] | None = None,
    epoch_samples: int | None = None,
    target_batch_size: int | None = None,
    num_devices: int | None = None,
    exact: bool = False,
    headroom: float | int | str = 0.0,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    tolerance: float = 0.01,
    budget: int | str | None = None,
    cache: str | os.PathLike[str] | Store | bool | None = None,
    certify: bool = True,
    on_trial: Callable[[Trial], object] | None = None,
) -> TunedBatchSizes:
    """Find the largest batch size that a training step of one's own runs at, and leave no trace.

    Sizes are tried with `train_step` itself: at least twice each, and until each optimizer in `state` has stepped
    twice. After each trial everything is put back, down to the random numbers, however it ended: training is bit for
    bit what it would be without. A later start of the same program takes the answer from the cache and tries it once.

    In several processes that train together (`torchrun`), with DDP, FSDP or any groups, all ranks call this at once and
    get the size that fits on each. Meanwhile no collective of the step waits for another rank: a rank that runs out of
    memory, wherever it does, leaves none waiting.

    Args:
        train_step: takes a whole optimizer step, as the loop does: forward, loss, backward, step, zero_grad. Without
            a target it is called as `train_step(batch)`. With one it is called as `train_step(micro_batches)`, with an
            iterable of the micro-batches of one optimizer step, whose `len()` is how many there are; it should go
            through all of them and step once. What it prints or writes to files stays.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as the loader would; `seq_len` is None for data
            of one fixed shape.
        state: all that `train_step` changes, in a list or tuple: models, optimizers, schedulers, scalers, averages of
            weights, counters; any object will do. What can be reached from these, from variables of closures, and
            from the objects that bound methods belong to, need not be named. Module-level names cannot be reached.
        device: `cpu`, `cuda` or `cuda:N`; None for where the model is.
        goal: `memory` for the largest size that fits, or `throughput` for the smallest of those up to it that trains at
            full speed, within 3 % of the best samples per second. `make_batch` and communication are not timed.
        seq_lens: lengths to find sizes for, the longest first; None for data of one fixed shape.
        evaluate: takes a few batches of the loop's evaluation, where it has one: it leaves the allocator's cache in
            other pieces, so that each try has it after the first steps, and a step after it. The cache is emptied
            before and after, as the loop should do (`torch.cuda.empty_cache()`).
        epoch_samples: samples of an epoch on this device, where its last batch is a smaller one: each try has that too.
        target_batch_size: samples per optimizer step, on all devices together, made up of micro-batches that fit; None
            for no target.
        num_devices: devices that train on samples of their own, and make up the target together; None for the world
            size, of which it is a part where ranks share samples, as in tensor parallelism.
        exact: meet the target exactly, however small the micro-batch that divides it; see `plan_accumulation`.
        headroom: memory to leave free: a share of what training could take (0.05 or `5%`), or bytes (an int or `1GiB`).
        min_batch_size: no smaller size is tried; 2 for a step that fails with a single sample, as BatchNorm may.
        max_batch_size: no larger size is tried.
        multiple_of: every size tried is a multiple of this.
        tolerance: share of the answer that may be left on the table for fewer tries; 0 for the exact maximum.
        budget: the most memory that may be used, in bytes or as `12GiB`; on a CPU, resident memory of the process.
        cache: where results are cached (a path, an fsspec URL, a `Store`); None or True for the default place, False
            for no cache.
        certify: whether a cached answer is tried once before it is returned. With False it is returned at once where as
            much memory is free as when it was found, or far more than it takes.
        on_trial: called after each trial with it, for a line of progress.

    Returns:
        What was found, by length. On a GPU cuBLAS has taken its workspaces by then, as it has when a try begins.

    Raises:
        InvalidValue: an argument has an invalid value, or `train_step` changes what could not be put back.
        OutOfMemory: not even the smallest size fits; the text says what to do.
        Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        RankFailed: it was raised on another rank.
        RankLost: another rank has ended, or does not answer within the time limit of `init_process_group`.
    """
    if seq_lens is not None and (not seq_lens or min(seq_lens) < 1):
        raise InvalidValue("seq_lens", seq_lens, "lengths of at least 1, or None for data of one fixed shape")
    options = SearchOptions(
        target_batch_size=target_batch_size,
        goal=goal,
        exact=exact,
        headroom=headroom,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        multiple_of=multiple_of,
        tolerance=tolerance,
        budget=budget,
        cache=cache,
        certify=certify,
    )
    limits = options.limits(num_devices=world_size() if num_devices is None else num_devices)
    named = tuple(state) if isinstance(state, list | tuple) else (state,)
    check_arguments("train_step", train_step, "the batch")
    check_arguments("make_batch", make_batch, "batch_size", "seq_len")
    if evaluate is not None:
        check_arguments("evaluate", evaluate)
    if epoch_samples is not None:
        epoch_samples = parse_count(epoch_samples, "epoch_samples")
    phases = Phases(evaluate=evaluate, samples=epoch_samples)
    config = LoopConfig(train_step, make_batch, named, device_of(device, named), phases=phases)
    lengths = sorted(set(seq_lens), reverse=True) if seq_lens else [None]
    found = tune_loop(config, limits, options.budget_bytes, lengths, options.store, on_trial)
    prepare_cache(config.device)  # for a training that begins as tries did
    return found
