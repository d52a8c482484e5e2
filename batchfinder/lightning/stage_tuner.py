"""One stage of one trainer: its data looked at, its sizes found for each length, and what was found said."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.cache.store import ResultEntry
from batchfinder.distributed.agreement import AgreedEntry, AgreedProbe, Ranks
from batchfinder.errors import CacheFailed
from batchfinder.lightning.cache_key import make_key
from batchfinder.lightning.compat import is_a, progress_bar_console
from batchfinder.lightning.ddp import agreed_data, agreed_memory, forget_used_parameters
from batchfinder.lightning.dry_run import DryRun, LightningProbe, TrialConfig
from batchfinder.lightning.dry_run_scope import active_callbacks, capture, capture_data
from batchfinder.lightning.options import FinderOptions
from batchfinder.lightning.prediction import SECONDS, predict_batch_size, simulated_device
from batchfinder.lightning.probe_batches import ProbeBatches
from batchfinder.measure.device_memory import memory_of
from batchfinder.measure.trial import TrialSession
from batchfinder.measure.tuner import SearchLimits, Tuner, TuningResult
from batchfinder.probe import Probe
from batchfinder.results import Shape, Trial

_SMALL_CAP = 8
"""Up to this cap no search takes as long as a prediction."""


class StageTuner:
    """Finds the sizes of one stage.

    Args:
        trainer: set up, with its model on the device.
        finder: the callback that asks, which takes no part.
        options: what the callback was asked for.
        config: what is tried.
        batches: where batches come from.
        ranks: the trainer's processes, all of which search.
        extra_callbacks: callbacks that take part in the tries besides the user's.

    Attributes:
        longest_seq_len: the longest length in the data of any rank; None for data without lengths.
    """

    def __init__(
        self,
        trainer: Trainer,
        finder: Callback,
        options: FinderOptions,
        config: TrialConfig,
        batches: ProbeBatches,
        ranks: Ranks,
        extra_callbacks: Sequence[Callback] = (),
    ) -> None:
        self._started = time.perf_counter()
        self._trainer = trainer
        self._finder = finder
        self._options = options
        self._config = config
        self._batches = batches
        self._ranks = ranks
        self._device = trainer.strategy.root_device
        self._memory = agreed_memory(memory_of(self._device, options.budget), ranks)
        before = capture_data(trainer, finder)
        try:
            own = ranks.barrier_call(self._look_at_data, "looked at the data")
            cap, self.longest_seq_len = agreed_data(*own, ranks)
        finally:
            before.restore()
        self._callbacks = active_callbacks(trainer, finder, options.probe_callbacks, extra_callbacks)
        self._limits = SearchLimits(
            cap,
            options.tolerance,
            headroom=options.headroom,
            target_batch_size=config.target_batch_size,
            num_devices=config.num_devices,
            certify=options.certify,
        ).with_memory(self._memory.free_bytes())
        self._session = TrialSession(
            self._memory, self._device, self._limits.reserve_bytes, lambda: capture(trainer, finder)
        )
        self._probe: Probe | None = None
        self._predicted: int | None = None

    def tune(self, seq_lens: Sequence[int | None]) -> list[TuningResult]:
        """Find the size of each length, and say what was found.

        Args:
            seq_lens: the longest first. Where batches are split, lengths below one at which a batch fits whole are
                left out.

        Raises:
            OutOfMemory: not even one sample fits.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
            RankFailed: it was raised on another rank.
            RankLost: another rank has ended, or does not answer within the time limit.
        """
        shapes = [Shape(seq_len) for seq_len in seq_lens]
        entries = self._entries(shapes)
        results: list[TuningResult] = []
        whole = self._config.split_batch_size
        with Progress(self._trainer) as progress, self._session:
            tuner = Tuner(
                self._memory.free_bytes,
                self._limits,
                self._open_probe,
                hint=self._predict,
                on_trial=progress.tried,
                warn=_warn,
            )
            try:
                for shape, entry in zip(shapes, entries, strict=True):
                    self._predicted = _scaled(results[-1], shape) if results and whole else None
                    # While ranks agree the first one alone reads and writes; on its own any of them may lower a record.
                    agreed = entry if entry is None or self._ranks.size == 1 else AgreedEntry(entry, self._ranks)
                    found = replace(tuner.find(shape, agreed), entry=entry)
                    found.raise_if_nothing_fits()
                    results.append(found)
                    if whole is not None and found.batch_size >= whole:
                        break
            finally:
                if self._probe is not None:
                    self._probe = None
                    forget_used_parameters(self._trainer)
        overhead = (time.perf_counter() - self._started - sum(found.seconds for found in results)) / len(results)
        results = [replace(found, seconds=found.seconds + overhead) for found in results]
        for found in results:
            rank_zero_info(f"BatchFinder: {self._config.stage} {found}.")
        return results

    def _look_at_data(self) -> tuple[int | None, int | None]:
        """The largest size of use, and the longest length."""
        options, config = self._options, self._config
        caps = [options.max_batch_size, config.split_batch_size, self._batches.dataset_size()]
        longest = None if options.seq_lens else self._batches.longest_seq_len()
        return min((cap for cap in caps if cap is not None), default=None), longest

    def _entries(self, shapes: Sequence[Shape]) -> list[ResultEntry | None]:
        """Where the answer for each shape is kept; None without a cache."""
        store = self._options.store()
        if store is None:
            return [None for _ in shapes]
        before = capture_data(self._trainer, self._finder)
        try:
            keys = [self._key(shape) for shape in shapes]
        finally:
            before.restore()
        name = type(self._trainer.lightning_module).__name__
        return [store.entry(key, name) for key in keys]

    def _key(self, shape: Shape) -> CacheKey:
        """This rank's key, with those of the other ranks where they differ."""

        def own() -> CacheKey:
            sample = self._batches.batch(1, shape.seq_len)
            return make_key(
                self._trainer, self._config, shape, sample, self._memory, self._limits, self._callbacks.active
            )

        keys = self._ranks.all_gather_call(own, "looked at the model and its data")
        if len(keys) == 1:
            return keys[0]
        others: list[Json] = [*sorted({key.digest for key in keys} - {keys[0].digest})]
        return replace(keys[0], extra={**keys[0].extra, "ranks": [len(keys), *others]})

    def _open_probe(self) -> tuple[Probe, int]:
        """The probe, made when it is first needed: it copies the training state."""
        if self._probe is None:
            self._ranks.barrier_call(self._session.open, "got ready to try sizes")
            dry_run = DryRun(self._trainer, self._callbacks)
            probe = LightningProbe(dry_run, self._config, self._batches, self._session)
            self._probe = probe if self._ranks.size == 1 else AgreedProbe(probe, self._ranks)
        return self._probe, self._session.max_peak_bytes()

    def _predict(self, shape: Shape, max_peak_bytes: int) -> int | None:
        """What is predicted, or the simulated step's answer; None where that would cost more than it saves."""
        if self._predicted is not None:
            return self._predicted
        options, cap = self._options, self._limits.cap
        wanted = self._device.type == "cuda" if options.predict is None else options.predict
        if not wanted or (cap is not None and cap <= _SMALL_CAP):
            return None

        def on_first_rank() -> int | None:
            if self._ranks.rank > 0:  # one process that records is enough, and the others' memory is better spent
                return None
            # The others wait meanwhile, for as long as a collective may take.
            seconds = min(SECONDS, self._ranks.seconds / 2) if self._ranks.size > 1 else SECONDS
            return predict_batch_size(
                self._trainer,
                self._finder,
                self._config,
                lambda batch_size: self._batches.batch(batch_size, shape.seq_len),
                simulated_device(self._device, self._memory, max_peak_bytes, self._trainer.lightning_module),
                cap,
                seconds=seconds,
            )

        return self._ranks.all_gather_call(on_first_rank, "asked for a prediction")[0]


def _scaled(found: TuningResult, shape: Shape) -> int | None:
    """As many tokens as at another length; more may fit, where attention took its part of the memory."""
    longer = found.result.shape.seq_len
    if longer is None or shape.seq_len is None:
        return None
    return found.result.max_batch_size * longer // shape.seq_len


def _warn(error: CacheFailed) -> None:
    rank_zero_warn(
        f"BatchFinder cannot use the cache at {error.url}: {error.reason.rstrip('.')}. Results of this run are not "
        "cached. Pass BatchFinder(cache=...) a place that can be written, or cache=False."
    )


class Progress:
    """Shows the tries; nothing is shown before the first, nor where the trainer shows nothing.

    Args:
        trainer: whose progress bar is imitated.
    """

    def __init__(self, trainer: Trainer) -> None:
        bar = trainer.progress_bar_callback
        shown = bar is not None and trainer.is_global_zero and not getattr(bar, "is_disabled", False)
        self._rich = shown and is_a(bar, "RichProgressBar")
        self._tqdm = shown and is_a(bar, "TQDMProgressBar")
        self._console: dict[str, Any] = progress_bar_console(bar)  # where the user wants Rich to write
        self._bar: Any = None
        self._tries = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop() if self._rich else self._bar.close()
            self._bar = None

    def tried(self, trial: Trial) -> None:
        """Show one more."""
        self._tries += 1
        tries = "1 try" if self._tries == 1 else f"{self._tries} tries"
        text = f"BatchFinder: batch size {trial.batch_size} {'fits' if trial.fits else 'does not fit'} ({tries})"
        if self._rich:
            from rich.console import Console
            from rich.status import Status

            if self._bar is None:
                self._bar = Status(text, console=Console(**self._console))
                self._bar.start()
            self._bar.update(text)
        elif self._tqdm:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            if self._bar is None:
                self._bar = tqdm(leave=False, bar_format="{desc}")
            self._bar.set_description_str(text)
