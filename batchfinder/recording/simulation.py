"""A workload on any simulated GPU, by recordings that a child process makes. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from batchfinder.cuda_stub import StubCard
from batchfinder.devices import Device, Multiprocessors
from batchfinder.errors import BatchFinderError, RecordingDied, RecordingFailed
from batchfinder.find import find_max_batch_size
from batchfinder.results import Measurement, SearchResult, Shape, Verdict
from batchfinder.search import (
    DEFAULT_MAX_BATCH_SIZE,
    Bisection,
    Prediction,
    Search,
    Secant,
    within_limits,
)
from batchfinder.search.secant import FIRST_TRY_SHARE_OF_PREDICTION
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import NO_SCRATCH, TraceSource, between_gpus
from batchfinder.simulator.steady_state import SimulatedProbe, fill_card, predict_max_batch_size
from batchfinder.simulator.trace import Trace
from batchfinder.stub_cards import card_of_device, open_session, recording_card
from batchfinder.training import child_process
from batchfinder.training.child_process import Child, ChildDied, line_of_crash, revive
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE, RecordingJob, StepConfig, WorkloadFacts, WorkloadSpec

_T = TypeVar("_T")
_CONFIRMATIONS = 8
"""Searches for an answer, each with more sizes recorded than the one before: of a compiled step, or of one that differs
from what it was scaled to."""
_SMALLEST_SHARE = 128
"""Of a size: what it is narrowed down to where what comes after the first steps decides."""
_MOST_SLOPE = 2.0
"""What a sample adds to reserved bytes, at most, per byte that it adds to those allocated; at least the inverse."""
# A recording is the same with a GPU in the machine as without one. The autograd engine's threads would make a context
# on each GPU but the first, and take memory there.
_NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
# It is recorded in forks, which do not have the threads that OpenMP has started.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# In what PyTorch says when code wants the values of a tensor that has none, as `.numpy()` does.
_NEEDS_VALUES = ("NotImplementedError:", "is not supported for tensor subclasses")


class RecordingClient(contextlib.AbstractContextManager["RecordingClient"]):
    """A process that records one workload's steps.

    Args:
        spec: how to build the workload there.
        workers: recordings at once; the number of cores by default.
        recorder: `fake-device`, or `cuda-build` for PyTorch's CUDA build on the stub.

    Raises:
        CudaStubUnavailable: the CUDA build cannot be had here.

    Example:
        >>> spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": "bert-base"})
        >>> with RecordingClient(spec) as recorder:  # doctest: +SKIP
        ...     trace = recorder.submit(job).result()
    """

    def __init__(self, spec: WorkloadSpec, workers: int | None = None, recorder: str = FAKE_DEVICE) -> None:
        self.spec = spec
        self.recorder = recorder
        self._stub = open_session([StubCard()]) if recorder == CUDA_BUILD else None  # each recording has its own card
        self._lock = threading.Lock()
        self._futures: dict[int, tuple[RecordingJob, Future[Any]]] = {}
        self._facts: Future[WorkloadFacts] = Future()
        self._died: RecordingDied | None = None
        self._told: set[str] = set()
        self._next = 0
        with contextlib.ExitStack() as failed:  # there may be no more descriptors, processes, threads or memory
            if self._stub is not None:
                failed.callback(self._stub.close)
            environment = {**_ONE_THREAD, **(_NO_CARDS if self._stub is None else self._stub.variables())}
            folder = child_process.temporary_folder()
            silent = str(child_process.SILENT_SECONDS)
            # On the CUDA build the first step at a size compiles, whatever other processes have compiled: that takes
            # memory of the card.
            own = None if self._stub is not None else os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            environment["TORCHINDUCTOR_CACHE_DIR"] = own or str(folder)
            self._child = Child(
                "batchfinder.recording.server",
                (str(folder), str(workers or os.cpu_count() or 1), silent, recorder),
                environment,
                folder,
            )
            failed.callback(self._child.close)
            self._child.send({"open": asdict(spec)})
            self._reader = threading.Thread(target=self._read_answers, daemon=True)
            self._reader.start()
            failed.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self) -> WorkloadFacts:
        """What there is to know about the workload; waits until it is built.

        Raises:
            BatchFinderError: it could not be built; the user's own failures are `UserCodeFailed`.
        """
        facts = self._facts.result()
        self._warn(facts.warnings)
        return facts

    def _warn(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._told:
                self._told.add(text)
                warnings.warn(text, stacklevel=3)

    def submit(self, job: RecordingJob) -> Future[Any]:
        """Ask for a recording, or a try. Several may run at once.

        Returns:
            The `Trace` to come, or of a job that is tried the `TriedSize`. Its `result()` raises `UserCodeFailed`,
            `RecordingFailed` or `RecordingDied`.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._died is not None:
                future.set_exception(self._died)
                return future
            number = self._next
            self._next += 1
            self._futures[number] = (job, future)
        self._child.send({"record": asdict(job), "id": number})
        return future

    def close(self) -> None:
        """End the process and everything it started. Recordings that are still to come fail."""
        self._child.kill()
        self._reader.join()
        self._child.close()
        if self._stub is not None:
            self._stub.close()

    def _read_answers(self) -> None:
        """Until the process ends: then everything that was asked of it and has no answer fails."""
        try:
            while True:
                # The first answer is about the workload. After that it may be quiet: there may be nothing to record.
                answer = self._child.receive(None if self._facts.done() else child_process.SILENT_SECONDS)
                if "facts" in answer:
                    _resolve(self._facts, WorkloadFacts(**answer["facts"]))
                    continue
                if "error" in answer:
                    _resolve(self._facts, _revive(answer["error"], self.spec.name))
                    continue
                number, exit_code = answer["id"], answer["exit"]
                with self._lock:
                    job, future = self._futures.pop(number)
                what = f"{(job.workload or self.spec).name} at {job}"
                path = self._child.folder / f"{number}.json"
                try:
                    if path.exists():
                        result = json.loads(path.read_text())
                        path.unlink()
                        self._warn(result.get("warnings", ()))
                        if "error" in result:
                            _resolve(future, _revive(result["error"], what))
                        elif "trace" in result:
                            _resolve(future, Trace.from_json(result["trace"]))
                        else:
                            seen = result["measurement"]
                            measurement = Measurement(**{**seen, "verdict": Verdict[seen["verdict"]]})
                            _resolve(future, TriedSize(measurement, tuple(result["unmodelled"])))
                    else:
                        operator_file = path.with_suffix(".operator")
                        operator = operator_file.read_text().strip() if operator_file.exists() else ""
                        last_words = self._child.last_words(f"{number}.log")
                        crash_file = path.with_suffix(".crash")
                        line = line_of_crash(crash_file.read_text()) if crash_file.exists() else ""
                        _resolve(future, RecordingDied(what, operator, exit_code, last_words, line))
                except Exception as error:
                    _resolve(future, RecordingDied(what, "", exit_code, _unreadable(error)))
        except ChildDied as death:
            died = RecordingDied(self.spec.name, "", death.exit_code, death.last_words)
        except Exception as error:  # whatever it says next would not be understood either
            self._child.kill()
            died = RecordingDied(self.spec.name, "", None, _unreadable(error))
        with self._lock:
            self._died = died
            waiting, self._futures = list(self._futures.values()), {}
        for _, future in waiting:
            _resolve(future, died)
        _resolve(self._facts, died)


def _resolve(future: Future[_T], outcome: _T | BaseException) -> None:
    """Give a future its result or exception, unless it has one or was cancelled."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _unreadable(error: Exception) -> str:
    return f"an answer that cannot be read ({type(error).__name__}: {error})"


def _revive(description: Mapping[str, Any], what: str) -> BatchFinderError:
    """The error that the recording process described: where code asked for values of fake tensors, in our words."""
    message = description["message"]
    if not description["type"] and (
        description["module"].startswith("torch._subclasses") or any(sign in message for sign in _NEEDS_VALUES)
    ):
        line = f"\n{description['line'][:1].upper()}{description['line'][1:]}" if description["line"] else ""
        return RecordingFailed(
            f"recording {what} failed where the code reads values, which fake tensors do not have: {message}{line}\n"
            "Give the model fixed shapes and no decisions on tensors' values there, or measure on a real GPU."
        )
    return revive(description, what)


class Simulation(contextlib.AbstractContextManager["Simulation"]):
    """One workload, recorded as needed by one process for all GPUs and sequence lengths.

    Args:
        spec: the workload.
        how: its steps are taken.
        recorder: what records them, by name; or a recording process to share, which this simulation does not close.

    Attributes:
        recorder: its name.
    """

    recorder = FAKE_DEVICE

    def __init__(self, spec: WorkloadSpec, how: StepConfig, recorder: RecordingClient | str = FAKE_DEVICE) -> None:
        self.spec = spec
        self.how = how
        self._owns_recorder = isinstance(recorder, str)
        self._recorder = RecordingClient(spec, recorder=recorder) if isinstance(recorder, str) else recorder
        self.recorder = self._recorder.recorder
        self.facts = self._recorder.facts  # of the workload that the process was opened with
        self._sources: dict[tuple[tuple[int, int], Multiprocessors, str], TraceSource] = {}
        self._recorded: dict[tuple[int, int | None], dict[tuple[tuple[int, int], str], Future[Trace]]] = {}
        self._on_others: dict[tuple[int, int | None, tuple[tuple[int, int], ...]], Future[Trace]] = {}
        self._ends: tuple[Simulation, ...] = ()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the recording process, unless it is shared."""
        if self._owns_recorder:
            self._recorder.close()

    def with_spec(self, spec: WorkloadSpec, how: StepConfig) -> Simulation:
        """Another workload, or another way to take its steps, in this simulation's recording process.

        Where the workload is not what the process was opened with, each recording builds it.
        """
        other = Simulation(spec, how, self._recorder)
        other.recorder = self.recorder
        return other

    def on_fake_device(self) -> Simulation:
        """The same on the fake device, in this simulation's recording process, whichever recorder that has."""
        other = self.with_spec(self.spec, self.how)
        other.recorder = FAKE_DEVICE
        return other

    def on_several(self, counts: Collection[int]) -> dict[int, Simulation]:
        """The same on other numbers of GPUs, in this simulation's recording process, by their number.

        The fewest and the most are recorded. Numbers in between are interpolated, linearly in one over their number,
        where the size of every block is linear in it; where it is not, they are recorded too.
        """
        found = {count: self.with_spec(self.spec, replace(self.how, gpus=count)) for count in sorted(counts)}
        ends = tuple(found.values())
        for simulation in ends[1:-1]:
            simulation._ends = ends[0], ends[-1]
        return found

    def source(
        self,
        capability: tuple[int, int],
        seq_lens: Iterable[int | None],
        reduces_on: Multiprocessors = NO_SCRATCH,
        card: str = "",
    ) -> TraceSource:
        """The step's traces on one kind of GPU, at these lengths and any others.

        What was recorded for one compute capability serves the others on which the kernels are the same, but for their
        sizes.

        Args:
            reduces_on: `Device.reduces_on`; `NO_SCRATCH` for a PyTorch whose reductions allocate nothing.
            card: what PyTorch's CUDA build is told of the card, in the words of `StubCard.setting`.
        """
        kind = capability, reduces_on, card
        if kind not in self._sources:
            ends = [(end.how.gpus, end.source(capability, seq_lens)) for end in self._ends]

            def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
                between = None
                if ends:
                    with contextlib.suppress(BatchFinderError):  # one cannot be recorded, and this one may be
                        traces = [(gpus, source.recorded(batch_size, seq_len)) for gpus, source in ends]
                        between = between_gpus(traces[0], traces[1], self.how.gpus)
                if between is not None:
                    made: Future[Trace] = Future()
                    made.set_result(between)
                    return made
                recorded = self._recorded.setdefault((batch_size, seq_len), {})
                if (capability, card) in recorded:
                    return recorded[capability, card]
                for earlier in recorded.values():
                    done = earlier.done() and earlier.exception() is None
                    if done and capability in earlier.result().alike:
                        return self._on_other(earlier.result(), capability)
                workload = None if self.spec == self._recorder.spec else self.spec
                job = RecordingJob(self.how, capability, batch_size, seq_len, workload, card)
                recorded[capability, card] = self._recorder.submit(job)
                return recorded[capability, card]

            compiled = self.spec.arguments.get("compile") is not None
            # Kernels' scratch memory, which the CUDA build records as well, goes up in steps.
            scales = self.recorder == FAKE_DEVICE
            self._sources[kind] = TraceSource(submit, seq_lens, compiled, scales, reduces_on)
        return self._sources[kind]

    def _on_other(self, trace: Trace, capability: tuple[int, int]) -> Future[Trace]:
        """A trace that was recorded for another compute capability; the same object for all on which it is the same."""
        different = trace.alike[capability]
        key = trace.batch_size, trace.seq_len, different
        if key not in self._on_others:
            sizes = list(trace.sizes)
            for block, size in different:
                sizes[block] = size
            self._on_others[key] = Future()
            self._on_others[key].set_result(replace(trace, sizes=tuple(sizes)) if different else trace)
        return self._on_others[key]

    def probe(
        self, device: Device, seq_lens: Iterable[int | None], allocator: AllocatorSettings | None = None
    ) -> SimulatedProbe:
        """A probe for one GPU, at the sequence lengths that will be asked for."""
        memory = DeviceMemory(device.total_bytes, device.usable_bytes)
        major, minor = device.compute_capability
        assumed = f"the card's own kernels: those of compute capability {major}.{minor} are assumed"
        unmodelled = [assumed] if device.assumed_capability else []
        if allocator is not None:
            unmodelled += [f"the allocator's setting {setting}" for setting in allocator.unmodelled]
        card = recording_card(device) if self.recorder == CUDA_BUILD else ""
        source = self.source(device.compute_capability, seq_lens, device.reduces_on, card)
        return SimulatedProbe(source, memory, allocator, unmodelled)

    def tried_sizes(self, device: Device, allocator: AllocatorSettings) -> TriedSizes:
        """A probe that takes the step itself on a GPU, by PyTorch's CUDA build on the stub.

        Args:
            allocator: the settings of this process's environment, which the CUDA build reads itself.
        """
        card = replace(card_of_device(device), name="").setting
        workload = None if self.spec == self._recorder.spec else self.spec

        def submit(batch_size: int, seq_len: int | None) -> Future[TriedSize]:
            job = RecordingJob(self.how, device.compute_capability, batch_size, seq_len, workload, card, tried=True)
            return self._recorder.submit(job)

        left_out = [f"the allocator's setting {setting}" for setting in allocator.unmodelled]
        return TriedSizes(submit, left_out, twice=self.spec.arguments.get("compile") is not None)


class TriedSize(NamedTuple):
    """What came of a size that was tried, and in words what that leaves out."""

    measurement: Measurement
    unmodelled: tuple[str, ...]


class TriedSizes:
    """Says whether a size runs on a card, by PyTorch's own word: a process on the CUDA stub takes the steps.

    Args:
        submit: has a size tried.
        unmodelled: what any answer leaves out, in words.
        twice: whether the answer has to run a second time, as a compiled step does whose graphs are in Inductor's cache
            then: what compiling took of the card is gone, and the allocator has other segments.
    """

    source = "simulated"

    def __init__(
        self,
        submit: Callable[[int, int | None], Future[TriedSize]],
        unmodelled: Iterable[str] = (),
        twice: bool = False,
    ) -> None:
        self._submit = submit
        self.twice = twice
        self._asked: dict[tuple[int, int | None], Future[TriedSize]] = {}
        self._unmodelled = dict.fromkeys(unmodelled)

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the answers so far leave out, in words."""
        return tuple(self._unmodelled)

    def ask(self, batch_size: int, shape: Shape) -> None:
        """Have a size tried, without waiting for it."""
        key = batch_size, shape.seq_len
        if key not in self._asked:
            self._asked[key] = self._submit(*key)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        self.ask(batch_size, shape)
        measurement, unmodelled = self._asked[batch_size, shape.seq_len].result()
        self._unmodelled |= dict.fromkeys(unmodelled)
        return measurement

    def try_again(self, batch_size: int, shape: Shape) -> Measurement:
        """Take the steps of a size that runs once more; if it fails then, it has failed."""
        again = self._submit(batch_size, shape.seq_len)
        if not again.result().measurement.fits:
            self._asked[batch_size, shape.seq_len] = again
        return self(batch_size, shape)


def search_simulated(
    probe: SimulatedProbe,
    shape: Shape,
    max_batch_size: int | None = None,
    min_batch_size: int = 1,
    multiple_of: int = 1,
    confirm: bool = True,
) -> SearchResult:
    """Find the largest batch size that fits, with tolerance 0.

    Args:
        max_batch_size: the largest of interest; None for no such bound.
        min_batch_size: the smallest of interest.
        multiple_of: only multiples of it are of interest.
        confirm: whether the sizes that decide it are recorded themselves, where they were scaled.

    Raises:
        InvalidValue: there is no such size.
    """
    for _ in range(_CONFIRMATIONS):
        search: Search[Any]
        if probe.traces.is_scaled(shape.seq_len):
            full, filled = fill_card(probe, shape, max_batch_size or DEFAULT_MAX_BATCH_SIZE)
            search = Secant(tolerance=0.0, predicted=full, margin=0.0)
            if probe.steady_state(full + 1, shape).fits:  # by giving memory back
                search = Bisection(full + 1, max(full + 1, filled) + 1)
        else:
            # A line tends to be a little too high: it does not know what the allocator cannot use.
            start = predict_max_batch_size(probe, shape)
            if multiple_of == 1:
                start = _recorded_prediction(probe, shape, min(start, max_batch_size or start))
            search = Secant(tolerance=0.0, predicted=start, margin=0.0)
        search = within_limits(search, max_batch_size, min_batch_size, multiple_of)
        result = find_max_batch_size(probe, shape, search=search)
        # That it fits, and that the next size does not.
        decisive = {max(result.max_batch_size, min_batch_size), result.max_batch_size + multiple_of}
        decisive = {size for size in decisive if max_batch_size is None or size <= max_batch_size}
        if not confirm or not probe.traces.confirm(sorted(decisive), shape.seq_len):
            break
    return result


def search_tried(
    sizes: TriedSizes | LengthProbe,
    shape: Shape,
    max_batch_size: int | None = None,
    min_batch_size: int = 1,
    multiple_of: int = 1,
    predicted: int | None = None,
    line: tuple[int, float] | None = None,
) -> SearchResult:
    """Find the largest batch size that runs on a card of the CUDA stub, where the next one does not, by trying them.

    Args:
        max_batch_size: and the next two: as for `search_simulated`.
        predicted: what the answer is likely to be; None where nothing is known.
        line: what the card has and what a sample takes, in bytes, to search by where the prediction may be far off.

    Raises:
        InvalidValue: there is no such size.
        BatchFinderError: the step could not be taken there.
    """
    smallest, step = -(-min_batch_size // multiple_of) * multiple_of, multiple_of
    # A prediction that is too large is so by little: it is not halved.
    while line is None and predicted is not None and predicted > smallest and not sizes(predicted, shape).fits:
        predicted, step = max(smallest, predicted - step), 2 * step
    limit_bytes, bytes_per_sample = line or (None, 0.0)
    while True:
        search: Search[Any] = Secant(limit_bytes, 0.0, predicted, bytes_per_sample, margin=0.0)
        search = within_limits(search, max_batch_size, min_batch_size, multiple_of)
        result = find_max_batch_size(sizes, shape, search=search)
        size = result.max_batch_size
        if not (size and isinstance(sizes, TriedSizes) and sizes.twice) or sizes.try_again(size, shape).fits:
            return result
        predicted, limit_bytes = max(0, size - multiple_of), None


def predict_full_card(
    probe: SimulatedProbe,
    shape: Shape,
    max_batch_size: int | None = None,
    later: Callable[[int], Sequence[int | None]] = lambda batch_size: (),
) -> Prediction:
    """The largest size with which a card is full and gives no cached memory back, as the start of a search by trials.

    Args:
        max_batch_size: the largest of interest; None for no such bound.
        later: what training does after the recorded steps, as `SimulatedProbe.reserved_over` takes it, for a batch
            size.
    """
    if not probe.traces.is_scaled(shape.seq_len):
        return Prediction(search_simulated(probe, shape, max_batch_size, confirm=False).max_batch_size)
    room = probe.memory.capacity_bytes
    full, _ = fill_card(probe, shape, max_batch_size or DEFAULT_MAX_BATCH_SIZE)
    first = int(FIRST_TRY_SHARE_OF_PREDICTION * full)
    if first < 2:
        return Prediction(full)
    low, high = (probe.unlimited(size, shape).max_allocated_bytes for size in (first, full))
    each = max(1.0, (high - low) / (full - first))

    def over(size: int) -> int:
        return probe.reserved_over(size, shape, later(size)) - room

    too_large = None
    while full > 2 and (excess := over(full)) > 0:
        too_large, full = full, max(2, full - max(1, full // _SMALLEST_SHARE, int(excess / each)))
    while too_large is not None and too_large - full > max(1, full // _SMALLEST_SHARE):
        middle = (too_large + full) // 2
        too_large, full = (middle, full) if over(middle) > 0 else (too_large, middle)
    first = int(FIRST_TRY_SHARE_OF_PREDICTION * full)
    if first < 2:  # a batch of one is a recording of its own
        return Prediction(full)
    slope = -over(first) / (full - first)
    return Prediction(full, min(_MOST_SLOPE * each, max(each / _MOST_SLOPE, slope)))


def check_scaling(probe: SimulatedProbe, shape: Shape, max_batch_size: int | None, multiple_of: int) -> None:
    """Record an eager step at about the size that fills a card, so that no answer of a smaller card needs it.

    Raises:
        RecordingFailed: it failed; `UserCodeFailed` if it was the user's code that did.
    """
    if probe.traces.is_scaled(shape.seq_len):
        most = max_batch_size or DEFAULT_MAX_BATCH_SIZE
        probe.traces.confirm([min(fill_card(probe, shape, most)[1] + multiple_of, most)], shape.seq_len)


def search_cards(
    pickled: bytes, shape: Shape, max_batch_size: int | None, min_batch_size: int, multiple_of: int
) -> list[SearchResult | None]:
    """`search_simulated` for several cards, in a process that cannot record; None where that is needed, or it fails.

    `pickled` is a list of `SimulatedProbe`: a pool would pickle them itself in a thread, while their traces change.
    """
    found: list[SearchResult | None] = []
    for probe in pickle.loads(pickled):
        try:
            limits = max_batch_size, min_batch_size, multiple_of
            found.append(search_simulated(probe, shape, *limits))
        except BatchFinderError:
            found.append(None)
    return found


def _recorded_prediction(probe: SimulatedProbe, shape: Shape, predicted: int) -> int:
    """The prediction, or a size not far below it that runs, where each size is recorded itself."""
    for size in (predicted, max(1, predicted - 1)):
        probe.traces.ask(size, shape.seq_len)
    step = 1
    while predicted > 1 and not probe.steady_state(predicted, shape).fits:
        predicted, step = max(1, predicted - step), 2 * step
    return predicted


@dataclass(frozen=True)
class LengthProbe:
    """Says whether a sequence length runs at one batch size, for a search whose sizes are lengths."""

    probe: SimulatedProbe | TriedSizes
    batch_size: int
    source: ClassVar[str] = "simulated"

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the answers so far leave out, in words."""
        return self.probe.unmodelled

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        return self.probe(self.batch_size, Shape(batch_size))  # the search's size is a length here


def search_seq_len(probe: SimulatedProbe, batch_size: int, step: int, longest: int) -> SearchResult:
    """Find the longest sequence that fits at a batch size; what decides it is recorded at its very length.

    Args:
        probe: for the step and the GPU.
        step: lengths of interest are multiples of this.
        longest: the longest of interest, at least `step`.

    Returns:
        A result whose sizes are lengths.
    """
    traces = probe.traces.for_lengths(step, longest)
    scaled = SimulatedProbe(traces, probe.memory, probe.allocator, probe.unmodelled)
    lengths = LengthProbe(scaled, batch_size)
    predicted: int | None = None
    while True:
        search: Search[Any] = Secant(tolerance=0.0, predicted=predicted, margin=0.0)
        search = within_limits(search, longest, step, step)
        result = find_max_batch_size(lengths, Shape(), search=search)
        answer = result.max_batch_size
        if traces.exact:
            return result
        wanted = {length: length == answer for length in (answer, answer + step) if 0 < length <= longest}
        steady = {length: scaled.steady_state(batch_size, Shape(length), exact=True) for length in wanted}
        if all(steady[length].fits == fits for length, fits in wanted.items()):
            return result
        traces.exact, predicted = True, answer or None
