"""The largest batch size of any training command on simulated GPUs, by running it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.cuda_stub import CudaBuild, StubCard
from batchfinder.errors import CommandFailed, InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.programs.dry_run import FITS, INTERRUPTED, OUT_OF_MEMORY, DryRun, ProcessMemory, dry_run
from batchfinder.programs.kept_runs import KeptRuns
from batchfinder.programs.placeholders import ACCUMULATION, BATCH_SIZE, SEQ_LEN, ConfigPlace, filled, names_in
from batchfinder.programs.scratch import scratch_copy
from batchfinder.results import Measurement, SearchResult, Shape, Trial, Verdict
from batchfinder.search import Capped, Search, Secant
from batchfinder.stub_cards import find_cuda_build

_TOLD_LINES = 15
"""Of what a command printed before it failed."""


@dataclass(frozen=True, slots=True)
class CommandTemplate:
    """A command with places for sizes.

    Attributes:
        argv: a program and its arguments, with `{batch_size}`, `{accumulation}` and `{seq_len}`.
        environment: variables to set, likewise.
        config: places in its config files.
        target_batch_size: samples per optimizer step that accumulation is to reach; None without.
        num_devices: cards that train side by side.
        nodes: machines that they are in, as many in each, where the command is the first rank alone; None where it
            starts all its ranks itself, in one machine.

    Raises:
        InvalidValue: there is no place for the batch size, or a place for a size that is not known.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    config: tuple[ConfigPlace, ...] = ()
    target_batch_size: int | None = None
    num_devices: int = 1
    nodes: int | None = None

    def __post_init__(self) -> None:
        names = self.names
        if BATCH_SIZE not in names:
            raise InvalidValue(
                "COMMAND",
                " ".join(self.argv),
                "a place for the batch size: {batch_size} among its arguments or in -e NAME={batch_size}, or --in "
                "FILE:KEY for a config file",
            )
        if ACCUMULATION in names and self.target_batch_size is None:
            raise InvalidValue("--target-batch-size", None, "what {accumulation} is to reach")

    @property
    def names(self) -> set[str]:
        """The placeholders that stand in it."""
        return names_in((*self.argv, *self.environment.values())) | {place.placeholder for place in self.config}

    def plan(self, batch_size: int) -> AccumulationPlan | None:
        """Micro-batches of at most this size for the target; None where there is no target."""
        if self.target_batch_size is None or not batch_size:
            return None
        return plan_accumulation(self.target_batch_size, batch_size, self.num_devices)

    def values(self, batch_size: int, seq_len: int | None, accumulation: int = 1) -> dict[str, int]:
        """What is filled in."""
        length = {} if seq_len is None else {SEQ_LEN: seq_len}
        return {BATCH_SIZE: batch_size, ACCUMULATION: accumulation, **length}

    def config_values(self, values: Mapping[str, int]) -> dict[str, int]:
        """What is written into its config files, by `FILE:KEY`."""
        return {f"{place.file}:{place.key}": values[place.placeholder] for place in self.config}


@dataclass(frozen=True, slots=True)
class FoundForCommand:
    """The largest batch size of a command on one kind of card, at one length.

    Attributes:
        card: it.
        result: of the search; each trial is a run of the command.
        plan: micro-batches for the target; None without one, or where nothing fits.
        argv: the command with the sizes in place, to be run.
        environment: the variables to set with it.
        config: what to write into its config files, by `FILE:KEY`.
        runs: how many sizes were run.
        kept: how many of these runs were kept from before.
        seconds: all of them took.
        last: the run at the size found; of the smallest that failed where none fits.
    """

    card: StubCard
    result: SearchResult
    plan: AccumulationPlan | None
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    config: Mapping[str, int]
    runs: int
    kept: int
    seconds: float
    last: DryRun


class _NoMoreSamples(Exception):
    """A larger batch took no more memory: the data has no more samples than it had at a size."""


class CommandProbe:
    """Runs a command with a batch size, on simulated cards, or with none of them on this machine's real ones."""

    def __init__(
        self,
        template: CommandTemplate,
        cards: Sequence[StubCard],
        folder: Path,
        scratch: bool,
        stop: threading.Event,
        build: CudaBuild | None,
        kept: KeptRuns | None,
        **settings: object,
    ) -> None:
        self.source = "simulated" if cards else "measured"
        self._template, self._cards, self._folder, self._scratch = template, cards, folder, scratch
        self._settings, self._stop, self._build, self._kept = settings, stop, build, kept
        self.runs: dict[int, DryRun] = {}
        self.kept = 0

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What was taken to be so in any of the runs."""
        return tuple(dict.fromkeys(words for run in self.runs.values() for words in run.assumed))

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Run it with a size.

        Raises:
            CommandFailed: it failed for another reason than memory, or did not use a card.
        """
        start = time.monotonic()
        # A second micro-batch meets the gradients of the first; a third takes no more.
        wanted = self._template.target_batch_size or 1
        accumulation = 1 + (wanted > batch_size * self._template.num_devices)
        run = self._run(self._template.values(batch_size, shape.seq_len, accumulation))
        self.runs[batch_size] = run
        process = run.fullest
        assert process is not None
        seconds = time.monotonic() - start
        peaks = process.peak_allocated_bytes, process.peak_reserved_bytes
        if run.outcome == OUT_OF_MEMORY:
            error = process.out_of_memory[0]
            return Measurement(Verdict.OUT_OF_MEMORY, seconds=seconds, message=f"out of memory at {error['line']}")
        if any(each.retries for each in run.processes):
            return Measurement(Verdict.THRASHING, *peaks, seconds)
        self._check_samples(batch_size, process)
        return Measurement(Verdict.FITS, *peaks, seconds)

    def _check_samples(self, batch_size: int, process: ProcessMemory) -> None:
        """Raise where a larger batch takes no step any more, or as much memory in the passes over it as a smaller."""
        smaller = [size for size, run in self.runs.items() if size < batch_size and run.fits]
        if not smaller or any(size > batch_size and not run.fits for size, run in self.runs.items()):
            return
        other = self.runs[max(smaller)].fullest
        assert other is not None
        passes = process.peak.get("phase") in ("forward", "backward")
        equal = passes and process.peak_allocated_bytes == other.peak_allocated_bytes
        if equal or (other.steps and not process.steps):
            raise _NoMoreSamples

    def _run(self, values: Mapping[str, int]) -> DryRun:
        argv = [filled(word, values) for word in self._template.argv]
        environment = {name: filled(value, values) for name, value in self._template.environment.items()}
        if self._kept is None:
            return self._run_now(argv, environment, values)
        config = self._template.config_values(values)
        key = self._kept.key(argv, environment, config, self._cards, self._settings)
        run = self._kept.get(key)
        if run is not None:
            self.kept += 1
            return run
        run = self._run_now(argv, environment, values)
        self._kept.keep(key, run)  # without the files of its copy of the folder, which is gone
        return run

    def _run_now(self, argv: Sequence[str], environment: Mapping[str, str], values: Mapping[str, int]) -> DryRun:
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_copy(self._folder)) if self._scratch else self._folder
            for place in self._template.config:
                file = folder / place.file
                if not self._scratch and file.is_file():
                    stack.callback(file.write_bytes, file.read_bytes())
                place.write(folder, values[place.placeholder])
            output = stack.enter_context(tempfile.TemporaryFile())
            run = dry_run(
                argv,
                self._cards,
                folder=folder,
                environment=environment,
                stdin=subprocess.DEVNULL,
                output=output.fileno(),
                stop=self._stop,
                build=self._build,
                **self._settings,  # type: ignore[arg-type]
            )
            if run.outcome in (FITS, OUT_OF_MEMORY):
                return run
            if run.outcome == INTERRUPTED:
                raise KeyboardInterrupt
            output.seek(0)
            lines = output.read().decode(errors="replace").rstrip().splitlines()[-_TOLD_LINES:]
            raise CommandFailed(" ".join(argv), values[BATCH_SIZE], run.exit_code, run.outcome, "\n".join(lines))


def find_for_command(
    template: CommandTemplate,
    cards: Sequence[StubCard],
    seq_lens: Sequence[int | None] = (None,),
    *,
    real: bool = False,
    scratch: bool = True,
    steps: int | None = None,
    epochs: int | None = None,
    max_batch_size: int | None = None,
    tolerance: float = 0.01,
    online: bool = False,
    again: bool = False,
    build: CudaBuild | None = None,
    jobs: int | None = None,
    on_trial: Callable[[StubCard, Trial], None] | None = None,
) -> list[FoundForCommand]:
    """The largest batch size of a command on each of several kinds of cards, at each length.

    Args:
        template: the command.
        cards: each is searched for on its own; of each the command gets what the template says.
        real: run it on the GPUs of this machine: the one card says what they are.
        seq_lens: to fill in; None where the command has no place for one.
        scratch: run it in temporary copies of this folder, which are thrown away.
        steps: optimizer steps of a run; None for when memory is steady.
        epochs: of a run instead, evaluation and checkpoint included.
        max_batch_size: the largest to try.
        tolerance: end once a size within this share of the answer fails; 0 for the exact maximum.
        online: let loggers and the Hub use the network.
        again: run what was run before, too, though nothing has changed since.
        build: the CUDA build of PyTorch; None for the one that is found.
        jobs: runs at once; None for the number of cores, or one where a run has several cards or these are real.
        on_trial: called after each run, on any thread.

    Returns:
        What was found, by card and then length.

    Raises:
        CommandFailed: a run failed for another reason than memory.
        CudaStubUnavailable: the CUDA stub cannot be had here.
    """
    stop = threading.Event()
    folder = Path.cwd()
    build = None if real else build or find_cuda_build()
    # In the folder itself, what a run writes may change the next one.
    kept = KeptRuns(folder, build, anew=again) if scratch and build is not None else None
    known: dict[int | None, list[tuple[StubCard, SearchResult]]] = {}

    def search(card: StubCard, seq_len: int | None) -> FoundForCommand:
        world_size = None if template.nodes is None else template.num_devices
        settings = {"world_size": world_size, "steps": steps, "epochs": epochs, "online": online}
        in_a_node = 0 if real else template.num_devices // (template.nodes or 1)
        probe = CommandProbe(template, [card] * in_a_node, folder, scratch, stop, build, kept, **settings)
        usable = card.total_bytes - card.context_bytes - card.held_bytes
        predicted = _predicted(usable, known.get(seq_len, ()))
        sizes: Search[object] = Secant(usable, tolerance, predicted=predicted)  # type: ignore[assignment]
        if max_batch_size is not None:
            sizes = Capped(sizes, max_batch_size)
        start, shape = time.monotonic(), Shape(seq_len)
        trials: list[Trial] = []

        def keep(trial: Trial) -> None:
            trials.append(trial)
            if on_trial is not None:
                on_trial(card, trial)

        try:
            result = find_max_batch_size(probe, shape, search=sizes, on_trial=keep)
        except _NoMoreSamples:
            most = max(trial.batch_size for trial in trials if trial.fits)
            result = find_max_batch_size(probe, shape, search=Capped(sizes, most), trials=trials)
        result = replace(result, trials=tuple(trials))
        known.setdefault(seq_len, []).append((card, result))
        found = result.max_batch_size
        plan = template.plan(found)
        values = template.values(plan.micro_batch_size if plan else found, seq_len, plan.accumulation if plan else 1)
        return FoundForCommand(
            card,
            result,
            plan,
            tuple(filled(word, values) for word in template.argv),
            {name: filled(value, values) for name, value in template.environment.items()},
            template.config_values(values),
            len(probe.runs),
            probe.kept,
            round(time.monotonic() - start, 1),
            probe.runs[found or min(probe.runs)],
        )

    cells = [(card, seq_len) for card in cards for seq_len in seq_lens]
    if real or not scratch:
        jobs = 1  # they would share the card, or write the same files
    elif template.num_devices > 1 and template.nodes is None:
        jobs = jobs or 1  # processes of one run meet at a port, which scripts often fix
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = [pool.submit(search, *cell) for cell in cells]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise


def _predicted(usable: int, known: Sequence[tuple[StubCard, SearchResult]]) -> int | None:
    """The largest size by a line through what other cards reserved at this length; None without two points."""
    points = {
        trial.batch_size: trial.measurement.peak_reserved_bytes
        for _, result in known
        for trial in result.trials
        if trial.fits and trial.measurement.peak_reserved_bytes
    }
    if len(points) < 2:
        return None
    (small, low), *_, (large, high) = sorted(points.items())
    slope = (high - low) / (large - small)
    return max(0, int(small + (usable - low) / slope)) if slope > 0 else None
