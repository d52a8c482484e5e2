"""Searches and trainings of random fits, each in a fork of a process that has imported all of it.

On the CUDA stub a fit has the card that it was drawn with. Elsewhere it has the card that is there, and may take as
much of it as its own would have.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from batchfinder.cuda_stub.card import VARIABLE, stub_setting
from batchfinder.devices.catalog import memory_fraction
from batchfinder.stub_cards import stub_card
from benchmarks.random_fit.draw import Fit, draw

BATCHES, EPOCHS = 200, 2
"""A size trains if it takes so many batches, and some of the epoch after these."""
MOST_BATCHES = 500
"""Where epochs are long, a fit ends after so many."""
SHARE = 0.97
"""A size is near enough to the largest if one that is larger by this share does not train."""
SECONDS = 240


def results_of(seeds: Sequence[int], largest: bool = True) -> list[dict[str, Any]]:
    """The result of each seed's fit, one after the other; a name and a number for all that was seen."""
    from benchmarks.random_fit import parts  # noqa: F401  # imported before the forks

    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return [result_of(draw(seed), largest) for seed in seeds]


def result_of(fit: Fit, largest: bool = True) -> dict[str, Any]:
    """Search and train; then, if asked, train larger sizes until one does not train."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/first.ckpt" if fit.resumed else None
        result = {"seed": fit.seed, "fit": str(fit)}
        if checkpoint is not None:
            saved = forked(fit, lambda: save(fit, checkpoint))
            if "error" in saved:
                return {**result, "failed": saved["error"]}
        found = forked(fit, lambda: train(fit, None, checkpoint))
        if "error" in found:
            return {**result, "failed": found["error"], "seconds": round(time.perf_counter() - start, 1)}
        result |= found
        if largest and found["trains"] and found["size"] < fit.samples:
            # The callback has segments expandable where lengths differ, for the training as well.
            same = replace(fit, expandable=fit.expandable or fit.lengths == "free")
            result |= larger_sizes(found["size"], lambda size: forked(same, lambda: train(same, size, checkpoint)))
        return {**result, "seconds": round(time.perf_counter() - start, 1)}


def larger_sizes(found: int, trained: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """The share of the largest size that trains: a bound where the first larger one does not, else bisected to 1 %."""
    size, below, share = max(found + 1, int(found / SHARE) + 1), found, SHARE
    while (seen := trained(size)).get("trains"):
        below, share = size, share - (1 - share)
        if share < 0.3:
            break
        size = max(below + 1, int(found / share))
    if below == found:
        return {"share_at_least": round(found / (size - 1), 3), "above": seen}
    while size - below > max(1, found // 100):
        between = (size + below) // 2
        below, size = (between, size) if trained(between).get("trains") else (below, between)
    return {"share": round(found / below, 3), "largest": below}


def reserved_of(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What fits of free lengths reserve on a card that does not limit them, with and without expandable segments.

    In bytes: `peak` allocated, and `reserved` at most, by how many batches have been trained.
    """
    from benchmarks.random_fit import parts

    def reserved(fit: Fit) -> dict[str, Any]:
        import torch

        most: list[int] = []

        def note(*_: object) -> None:
            most.append(torch.cuda.max_memory_reserved())

        parts.Module.on_train_batch_end = note
        train(fit, RESERVED_SIZE, None)
        return {"peak": torch.cuda.max_memory_allocated(), "reserved": {at: most[at - 1] for at in RESERVED_AT}}

    drawn = [replace(draw(seed), **UNLIMITED) for seed in seeds if draw(seed).lengths == "free"]
    both = [replace(fit, expandable=expandable) for fit in drawn for expandable in (False, True)]
    return [{"seed": fit.seed, "fit": str(fit), **forked(fit, lambda fit=fit: reserved(fit))} for fit in both]


RESERVED_SIZE, RESERVED_AT = 64, (1, 8, 150)
UNLIMITED: dict[str, Any] = {
    "card": "A100",
    "memory_bytes": 80 << 30,
    "elsewhere_bytes": 0,
    "held_bytes": 0,
    "resumed": False,
    "validation": "none",
    "samples": RESERVED_SIZE * 250,
}


def train(fit: Fit, size: int | None, checkpoint: str | None) -> dict[str, Any]:
    """Train with a size, or with the one that a finder finds."""
    import pytorch_lightning as pl
    import torch

    from batchfinder import BatchFinder
    from batchfinder.measure.oom import classify
    from batchfinder.measure.trial import prepare_cache
    from benchmarks.random_fit.parts import Module, trainer

    torch.cuda.init()
    if VARIABLE not in os.environ:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_fraction(fit.memory_bytes - fit.elsewhere_bytes, total))
    elif fit.elsewhere_bytes:
        pointer = ctypes.c_void_p()
        cudart = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        assert cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(fit.elsewhere_bytes)) == 0
    held = [torch.empty(fit.held_bytes // 4, dtype=torch.uint8, device="cuda") for _ in range(4 * bool(fit.held_bytes))]
    before = {"num_alloc_retries": 0, "num_ooms": 0}
    seen: dict[str, Any] = {"batches": 0, "epochs": 0}

    def counted(name: str) -> int:
        return torch.cuda.memory_stats().get(name, 0) - before[name]

    class Watch(pl.Callback):
        """Counts, and ends the fit. Without a finder it empties the cache where the finder does."""

        def __init__(self) -> None:
            self.started = time.perf_counter()

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if size is not None:
                prepare_cache(trainer.strategy.root_device)
            seen["search_seconds"] = round(time.perf_counter() - self.started, 1)
            before.update({name: torch.cuda.memory_stats().get(name, 0) for name in before})

        def give_back(self, *_: object) -> None:
            if size is not None:
                torch.cuda.empty_cache()

        on_train_epoch_start = on_validation_start = on_validation_end = give_back

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            seen["batches"] += 1
            seen["epochs"] = trainer.current_epoch
            enough = seen["batches"] >= BATCHES and trainer.current_epoch >= EPOCHS and trainer.fit_loop.batch_idx >= 2
            trainer.should_stop |= enough or seen["batches"] >= MOST_BATCHES
            trainer.should_stop |= counted("num_alloc_retries") > 0  # it is known then

    finder = None if size is not None else BatchFinder(cache=False)
    whole = trainer(fit, [*([finder] if finder else []), Watch()])
    error = ""
    try:
        whole.fit(Module(fit, size or 2), ckpt_path=checkpoint)
    except Exception as raised:
        if classify(raised, device="cuda") is None:
            raise
        error = str(raised)[:150]
    seen |= {"size": size, "out_of_memory": error, "retries": counted("num_alloc_retries"), "ooms": counted("num_ooms")}
    if finder is not None:
        seen["size"] = finder.batch_size
        if finder.results.get("fit"):
            (found,) = finder.results["fit"].values()
            seen["tries"] = [trial.batch_size if trial.fits else -trial.batch_size for trial in found.trials]
            seen["errors"] = sum(trial.measurement.verdict.value == "out_of_memory" for trial in found.trials)
    del held
    return {**seen, "trains": not (error or seen["retries"] or seen["ooms"])}


def save(fit: Fit, checkpoint: str) -> dict[str, Any]:
    """Write a checkpoint of the fit after a step."""
    from benchmarks.random_fit.parts import Module, trainer

    first = trainer(fit, [], max_steps=1, limit_train_batches=fit.accumulation, limit_val_batches=0)
    first.fit(Module(fit, 2))
    first.save_checkpoint(checkpoint)
    return {}


def forked(fit: Fit, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work returns in a fork with the fit's card; `error` where it raised, died or took too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.setpgid(0, 0)
            if VARIABLE in os.environ:
                card = stub_card(fit.card, fit.memory_bytes)
                settings, _, _ = os.environ[VARIABLE].partition("|")
                _, _, own = stub_setting([card]).partition("|")
                os.environ[VARIABLE] = f"{settings}|{own}"
            if fit.expandable:
                os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                result = work()
        except BaseException:
            result = {"error": traceback.format_exc()[-3000:]}
        with os.fdopen(writing, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    end, text = time.monotonic() + SECONDS, b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            part = pipe.read(1 << 16)
            if not part:
                break
            text += part
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"no result in {SECONDS} s, or the process died"}
