"""One measured trial: steps are taken under the memory's limit, measured, and undone.

Beside the peak it says whether the allocator had to give its cache back, what is held between steps and what the first
forward takes, which show a search the way where the peak is flat.

A traceback holds the frames of a failed step, and these hold its tensors: a failure is turned into a verdict and a text
at once, and its memory is given back before anything else is tried.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from batchfinder.measure.allocator_history import AllocatorHistory
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.oom import classify, find_pattern
from batchfinder.results import Measurement, Verdict
from batchfinder.snapshot.training_state import TrainingState
from batchfinder.training.spec import PEAK_STEPS

_MOST_TIMED, _TIMED_SECONDS = 20, 0.05
"""Steps are timed up to this number while they take less than so much in all: the clock and what a process does
besides count for more in a short step."""

_MOST_SETTLING_STEPS = 10
"""How many steps a phase of a training takes at most until the allocator reserves no more: each may leave its cache in
other pieces."""

_NEARLY_FULL = 0.9
"""Share of what may be reserved above which batches of other lengths are tried in further orders."""

_EMPTY_SHARE = 0.01
"""Share of a step below which no micro-batch ran between two batches: they were made one after another."""


class TrialSteps:
    """What a trial's steps tell as they go: how often the allocator gave its cache back, and how long they took.

    The steps before `goes_on` is asked for the first time are the warm-up. Each one that it asks for may be timed, from
    one question to the next, without what is `loading` meanwhile.

    Args:
        retries: says how often the allocator has given its cache back.
        timed_steps: how many steps to time at least.
        device: which to wait for before the clock is read; None for none, as on a CPU.
        history: of the allocator, where the first steps are recorded, which are all then; None for a trial.
        settling_steps: how many more to take at most until one goes by in which the allocator kept its cache; None
            where it has to keep it from the first, since training is not one step over and over.

    Attributes:
        before_first_batch: called once, before the first batch is made.
        settled: whether the last step that was taken for `settling_steps` was one in which it kept its cache.
        peaked_later: whether something that came after the first steps took more, which these then say nothing about.
    """

    def __init__(
        self,
        retries: Callable[[], int],
        timed_steps: int = 0,
        device: torch.device | None = None,
        settling_steps: int | None = None,
        history: AllocatorHistory | None = None,
    ) -> None:
        self.history = history
        self._retries = retries
        self._retries_before = self._retries_last = retries()
        self._settling_steps = settling_steps
        self.before_first_batch: Callable[[], object] = lambda: None
        self.settled = False
        # cuDNN tries all algorithms for a shape, catches that some have no memory, and keeps to the best it could run.
        self._tries_algorithms = device is not None and device.type == "cuda" and torch.backends.cudnn.benchmark
        self._loaded = 0
        self._peaks_before: list[tuple[int | None, int | None]] = []
        self.peaked_later = False
        self._timed_steps = timed_steps
        self._device = device
        self._since: float | None = None  # when what is timed began; None before the first step that is
        self._parts: list[float] = []  # of the step that runs: what lies between its batches
        self._batches = 0
        self._steps: list[tuple[float, float | None]] = []  # seconds of a last micro-batch, and of one before it

    def goes_on(self) -> bool:
        """Whether the trial takes another step: to be asked after the least it takes, and after each one more."""
        more_to_time = self._timed_steps > 0 and self._step_ended()
        return self._settles() or more_to_time

    def _settles(self) -> bool:
        """Whether the allocator gave its cache back since this was asked the last time, and may yet keep it."""
        if self._settling_steps is None:
            return False
        last, self._retries_last = self._retries_last, self._retries()
        self.settled = self._retries_last == last
        self._settling_steps -= 1
        return not self.settled and self._settling_steps >= 0

    def times_cache_given_back(self) -> int:
        """How often the allocator had to empty its cache for a request; 0 where it settled.

        Training that does so is slow, and what it does after the next batch of another size is anyone's guess: near a
        full card it may settle, or run out of memory some steps later. The trial's first batch in cuDNN's benchmark
        mode does not count.
        """
        return 0 if self.settled and self._retries() == self._retries_last else self._retries() - self._retries_before

    @contextmanager
    def apart(self, memory: Memory) -> Iterator[None]:
        """A context around what is tried with the steps, and whose peak says nothing of them, as an evaluation's."""
        self._peaks_before.append(memory.peaks())
        yield
        memory.reset_peak()

    def peaks(self, memory: Memory) -> tuple[int | None, int | None]:
        """The most bytes allocated and reserved, but for what was `apart`; None for what is not measured."""
        both = zip(*self._peaks_before, memory.peaks(), strict=True)
        allocated, reserved = (max((one for one in each if one is not None), default=None) for each in both)
        return allocated, reserved

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context around the making of each batch, which is not part of a step's time."""
        if self._loaded == 0:
            self.before_first_batch()
        elif self._loaded == 1 and self._tries_algorithms:
            self._retries_before = self._retries()
        self._loaded += 1
        if self.history is not None:
            self.history.batch_begins()
        if self._since is not None:
            self.micro_batch_ended()
            self._batches += 1
        yield
        if self._since is not None:
            self._since = self._now()

    def micro_batch_ended(self) -> None:
        """Say that a micro-batch has ended, where its step has made the next one before."""
        if self._since is not None:
            now = self._now()
            self._parts.append(now - self._since)
            self._since = now

    def seconds(self) -> tuple[float | None, float | None]:
        """`step_seconds` and `micro_batch_seconds` of a `Measurement`."""
        if not self._steps:
            return None, None
        earlier = [seconds for _, seconds in self._steps if seconds is not None]
        return statistics.median(last for last, _ in self._steps), statistics.median(earlier) if earlier else None

    def _step_ended(self) -> bool:
        """Note the step's time, if it was to be timed, and say whether another one is."""
        if self._since is not None:
            self.micro_batch_ended()
            total = sum(self._parts)
            ran = [part for part in self._parts if part > _EMPTY_SHARE * total]
            if self._batches < 2:
                self._steps.append((total, None))
            else:  # two micro-batches stand for any number
                earlier = ran[0] if len(ran) > 1 else total / self._batches
                self._steps.append((total - (self._batches - 1) * earlier, earlier))
        self._parts, self._batches, self._since = [], 0, self._now()
        timed = sum(last + (earlier or 0.0) for last, earlier in self._steps)
        few = len(self._steps) < self._timed_steps
        return few or (timed < _TIMED_SECONDS and len(self._steps) < _MOST_TIMED)

    def _now(self) -> float:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(eq=False)
class StageReadings:
    """Reads the memory as the stages of a step begin.

    At small sizes a step's peak is the optimizer's, whatever the size. These two are not: what stays between steps is
    where the peaks of large sizes begin, and the first forward takes nearly what a sample adds to them.

    Attributes:
        held: says what is held now.
        peak: says the most that was held.
        resting_bytes: held as the last micro-batch of a later step begins; None before.
        forward_bytes: the most the first forward, loss included, took beyond what was held before; None before.
    """

    held: Callable[[], int]
    peak: Callable[[], int]
    resting_bytes: int | None = None
    forward_bytes: int | None = None
    _before_bytes: int | None = field(default=None, init=False)

    def __call__(self, step: int, stage: str, micro_batch: int) -> None:
        """Called as each stage begins, as `on_stage` of `Step.run`; steps and micro-batches count from 0."""
        if stage == "batch" and step == 0 and micro_batch == 0:
            self._before_bytes = self.held()
        elif stage == "batch" and step > 0:
            self.resting_bytes = self.held()
        elif stage == "backward" and step == 0 and micro_batch == 0 and self._before_bytes is not None:
            self.forward_bytes = max(0, self.peak() - self._before_bytes)


@contextmanager
def read_stages(memory: Memory) -> Iterator[StageReadings]:
    """Read what stays between steps and what the first forward takes, while a user's own steps run.

    The forward has ended where `torch.autograd.backward` is called, which `Tensor.backward` does as well; a step that
    calls `torch.autograd.grad` alone is not read. No hooks on modules: a compiled one would be compiled again for them.
    Where the memory does not count what is allocated, nothing is read.
    """
    readings = StageReadings(memory.held_bytes, lambda: memory.peaks()[0] or 0)
    if memory.peaks()[0] is None:
        yield readings
        return
    readings(0, "batch", 0)
    backward, first = torch.autograd.backward, True

    def read_and_go_on(*arguments: Any, **options: Any) -> None:
        nonlocal first
        if first:
            first = False
            readings(0, "backward", 0)
        backward(*arguments, **options)

    # Gradients are alive after an optimizer step, as they are at the peak of the steps to come.
    hook = register_optimizer_step_post_hook(lambda *_: readings(1, "batch", 0))
    torch.autograd.backward = read_and_go_on
    try:
        yield readings
    finally:
        torch.autograd.backward = backward
        hook.remove()


_NOT_STEPPED = "no optimizer stepped, as they do at other sizes: the step may have caught an out-of-memory error"


@dataclass(eq=False)
class SteppingCheck:
    """Whether an optimizer stepped in a trial, as one did in an earlier trial: given to each in turn.

    A step that catches an out-of-memory error and goes on without an optimizer step would otherwise seem to fit. An
    optimizer without a gradient, which Lightning steps after a `training_step` that returned None, has not stepped.

    Attributes:
        stopped: whether none stepped in the last trial, though one did in an earlier trial.
        counts: whether a step now is one of the size that is tried; set while batches of another size are.
    """

    stopped: bool = False
    counts: bool = True
    _stepped: bool = False
    _stepped_before: bool = False
    _compared: bool = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the optimizer steps meanwhile."""

        def note(optimizer: Optimizer, arguments: object, options: object) -> None:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._stepped |= self.counts and any(parameter.grad is not None for parameter in parameters)

        self._stepped, self.counts = False, True
        hook = register_optimizer_step_post_hook(note)
        try:
            yield
        finally:
            hook.remove()
        self.stopped = self._stepped_before and not self._stepped
        self._stepped_before = self._stepped_before or self._stepped

    def compared(self, seen: Measurement, try_smallest: Callable[[], object]) -> Measurement:
        """What a first trial saw, which has no earlier one to be compared with, unless the smallest size steps.

        Args:
            try_smallest: tries the smallest size; called once at most, where no optimizer has stepped yet.
        """
        if not seen.fits or self._stepped_before or self._compared:
            return seen
        self._compared = True
        with suppress(Exception):  # it may need a second sample; whatever it is, this size did not raise it
            try_smallest()
        return replace(seen, verdict=Verdict.OUT_OF_MEMORY, message=_NOT_STEPPED) if self._stepped_before else seen


def run_trial(
    steps: Callable[[TrialSteps], object],
    memory: Memory,
    device: torch.device,
    restore: Callable[[], object] = lambda: None,
    reserve_bytes: int = 0,
    held_bytes: int = 0,
    readings: StageReadings | None = None,
    stepping: SteppingCheck | None = None,
    timed_steps: int = 0,
    settling_steps: int | None = None,
    spare_bytes: int = 0,
    history: AllocatorHistory | None = None,
) -> Measurement:
    """Take steps from a clean slate, put everything back, and say what they took.

    Args:
        steps: takes them, and more for as long as `goes_on` of what it is given says so.
        memory: whose limit holds meanwhile.
        restore: puts back what they changed, however they end.
        held_bytes: held on the device by what training will not have, such as the copies that `restore` needs.
        readings: read by the steps themselves; None to read them by hooks on backward and on optimizers.
        stepping: of these trials, where a user's own steps might catch an out-of-memory error.
        timed_steps: how many steps to time at least, after the others; see `TrialSteps`.
        settling_steps: in how many more the allocator may come to keep its cache; see there.
        spare_bytes: of the device, held by a tensor meanwhile: a limit would refuse what only extends a segment.
        history: records the steps; None for a trial.

    Raises:
        Exception: whatever the steps raised that is not about the size, unchanged, after `restore`.
    """
    clear(device)
    memory.reset_peak()
    raised, ooms_before = RaisedErrors(), _ooms(device)
    # `Memory.retries` leaves out requests that failed. Those whose error a step caught count against the size.
    taken = TrialSteps(lambda: memory.retries() + raised.count, timed_steps, device, settling_steps, history)
    started = time.perf_counter()

    def limited() -> None:
        with memory.limited(reserve_bytes, held_bytes), nullcontext() if stepping is None else stepping.watched():
            spare: list[torch.Tensor] = []
            if spare_bytes:
                spare.append(torch.empty(spare_bytes, dtype=torch.uint8, device=device))
            try:
                with nullcontext() if history is None else history.recording(), raised.counted():
                    steps(taken)
                if device.type == "cuda":  # here, where what a kernel failed with is still this trial's failure
                    torch.cuda.synchronize(device)
            finally:
                spare.clear()

    try:
        with read_stages(memory) if readings is None else nullcontext(readings) as stages:
            if readings is None:  # what is held by then, as DDP's buckets are, is nothing that a forward takes
                taken.before_first_batch = lambda: stages(0, "batch", 0)
            failure = attempt(limited, device.type)
        seconds = time.perf_counter() - started
        held_bytes += spare_bytes
        allocated, reserved = (None if peak is None else peak - held_bytes for peak in taken.peaks(memory))
        retries, ooms = taken.times_cache_given_back(), _ooms(device) - ooms_before
    finally:
        restore()
    clear(device)
    if isinstance(failure, Failure):
        _leave_onednn_if_it_fails(failure)
        return Measurement(failure.verdict, seconds=seconds, message=failure.message)
    if retries and raised.count:
        message = f"it ran out of memory {_times(raised.count)}, and the step caught the error and went on"
        return Measurement(Verdict.OUT_OF_MEMORY, seconds=seconds, message=message)
    if ooms > raised.count and not taken.settled:
        return Measurement(Verdict.FELL_BACK, allocated, reserved, seconds, Verdict.FELL_BACK.value)
    if retries:
        message = f"it ran, but only by giving back all cached memory {_times(retries)}"
        return Measurement(Verdict.THRASHING, allocated, reserved, seconds, message)
    if stepping is not None and stepping.stopped:
        return Measurement(Verdict.OUT_OF_MEMORY, allocated, reserved, seconds, _NOT_STEPPED)
    resting, forward = stages.resting_bytes, stages.forward_bytes
    resting = None if resting is None or taken.peaked_later else resting - held_bytes
    step, micro_batch = taken.seconds()
    seen = Measurement(Verdict.FITS, allocated, reserved, seconds, resting_bytes=resting, forward_bytes=forward)
    return replace(seen, step_seconds=step, micro_batch_seconds=micro_batch)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _ooms(device: torch.device) -> int:
    """How often the device's allocator has raised, since the process began."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0


class RaisedErrors:
    """Counts the out-of-memory errors that Python code is given, whoever catches them.

    The allocator's `num_ooms` has also those that PyTorch's own code catches and makes up for, as cuDNN's convolutions
    do for want of a workspace: the next kernel of its list takes less, and is taken from then on.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count them meanwhile, in all threads."""
        kind: Any = torch.OutOfMemoryError
        own, initialize = "__init__" in vars(kind), kind.__init__

        def count_and_initialize(error: Any, *arguments: Any, **options: Any) -> None:
            self.count += 1
            initialize(error, *arguments, **options)

        kind.__init__ = count_and_initialize
        try:
            yield
        finally:
            if own:
                kind.__init__ = initialize
            else:
                del kind.__init__


class TrialSession(AbstractContextManager["TrialSession"]):
    """A copy of the training state, made when something is tried for the first time, and let go of at the end.

    `held_bytes` are what the copy takes on the device, which training will not have; 0 before. `stepping` is for its
    trials, each of which times `timed_steps` at least, and leaves `spare_bytes` of the device free.
    """

    def __init__(
        self, memory: Memory, device: torch.device, reserve_bytes: int, capture: Callable[[], TrainingState]
    ) -> None:
        self.memory = memory
        self.device = device
        self.reserve_bytes = reserve_bytes
        self.spare_bytes = 0
        self.held_bytes = 0
        self.stepping = SteppingCheck()
        self.timed_steps = 0
        self._capture = capture
        self._state: TrainingState | None = None
        self._start_bytes = 0
        self._froze = False

    def __exit__(self, *error: object) -> None:
        """Let go of the copy, and of all memory that is not in use."""
        if self._froze:
            gc.unfreeze()
            self._froze = False
        if self._state is not None:
            self._state = None
            clear(self.device)

    def open(self) -> TrainingState:
        """Return the copy; the first call makes it."""
        if self._state is None:
            clear(self.device)
            if gc.get_freeze_count() == 0:
                # The collection after each trial then looks at what the trials made alone: 250 ms less.
                gc.freeze()
                self._froze = True
            before = self.memory.held_bytes()
            self._state = self._capture()
            self._start_bytes = self.memory.held_bytes()
            self.held_bytes = min(self._state.nbytes, max(0, self._start_bytes - before))
        return self._state

    def time_steps(self, steps: int) -> None:
        """Time so many steps at least in each trial from now on; none for 0."""
        self.timed_steps = steps

    def max_peak_bytes(self) -> int:
        """What a peak may come to now: the limit, less the headroom and what earlier trials have left behind."""
        self.open()
        left_bytes = max(0, self.memory.held_bytes() - self._start_bytes)
        max_peak_bytes = self.memory.max_peak_bytes(self.held_bytes - left_bytes)
        return max(1, max_peak_bytes - self.held_bytes - self.reserve_bytes - self.spare_bytes)


_unseen_widths = itertools.count(5)


def _leave_onednn_if_it_fails(failure: Failure) -> None:
    """Switch oneDNN off where a failed trial has left it unable to compile for this thread.

    Its code generator keeps the first error of a thread for good, so that after one kernel that had no memory each
    shape that the thread has not met before fails with "could not create a primitive", however much is free.

    Source: `jit_generator_t::create_kernel` in src/cpu/x64/jit_generator.hpp of oneDNN, `Xbyak::GetError`.
    """
    if "could not create a primitive" not in failure.message or not torch.backends.mkldnn.enabled:
        return
    inputs = torch.zeros(16, 8, 5, next(_unseen_widths), device="cpu", dtype=torch.float32)
    weight = torch.zeros(8, 8, 3, 3, device="cpu", dtype=torch.float32)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            torch.nn.functional.conv2d(inputs, weight)
    except RuntimeError:
        torch.backends.mkldnn.set_flags(False)
        warnings.warn(
            "A trial ran out of memory while oneDNN compiled a kernel, after which it compiles no more in this thread. "
            "It is switched off (torch.backends.mkldnn.enabled) for the rest of this process: steps are slower and "
            "take other memory. A higher ulimit -v, or a budget in place of it, avoids this.",
            stacklevel=2,
        )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step did not run, in the device's own words; nothing in it keeps the step alive."""

    verdict: Verdict
    message: str


def attempt(step: Callable[[], T], device: str = "cuda") -> T | Failure:
    """Run a step; return what it returns, or how it failed.

    When this returns a failure, no reference is left to the exception, those it was chained to, their tracebacks and
    frames: every tensor that only the failed step knew is dead already, without a garbage collection, unless the user's
    own objects formed a cycle. The step itself should hold nothing that is to die.

    Raises:
        Exception: whatever the step raised that is not about the size, unchanged.
    """
    try:
        return step()
    except Exception as error:
        verdict = classify(error, device=device)
        if verdict is None:
            raise
        # The text is that of the error itself or of the cause that was recognised.
        pattern, cause = find_pattern(error), error.__cause__
        said: BaseException = error
        while cause is not None and find_pattern(cause) is pattern:
            said, cause = cause, cause.__cause__
        text = str(said).strip() or type(said).__name__
        if pattern is not None and not pattern.sure:
            text += f" ({pattern.library} says the same of faults other than a full memory.)"
        # Clear the frames of the error and of all it is chained to: a frame that holds its own exception is a cycle.
        waiting: list[BaseException] = [error]
        seen: set[int] = set()
        while waiting:
            current = waiting.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            waiting.extend(link for link in (current.__cause__, current.__context__) if link is not None)
            if isinstance(current, BaseExceptionGroup):
                waiting.extend(current.exceptions)
            if current.__traceback__ is not None:
                traceback.clear_frames(current.__traceback__)
                current.__traceback__ = None
    return Failure(verdict, text)


def until_reserved_stays(device: torch.device) -> Iterator[None]:
    """Yield before each step to be taken, until two in a row had a GPU's allocator reserve no more."""
    before, quiet = torch.cuda.memory_reserved(device), 0
    for _ in range(_MOST_SETTLING_STEPS):
        yield
        reserved = torch.cuda.memory_reserved(device)
        quiet = quiet + 1 if reserved <= before else 0
        if quiet == PEAK_STEPS:
            return
        before = reserved


def further_orders(batches: Sequence[T], memory: Memory) -> Iterator[list[T]]:
    """Orders, beside the first, in which batches of other lengths leave the cache in other pieces.

    Near a full card there are more: training meets many that a try does not, and some may have no room there.
    """

    def strided(stride: int) -> list[T]:
        return [each for start in range(stride) for each in batches[start::stride]]

    yield strided(2)
    for stride in (3, 4):
        if (memory.peaks()[1] or 0) > _NEARLY_FULL * memory.free_bytes():
            yield strided(stride)


def give_back_cache(device: torch.device, workspaces: bool = False) -> None:
    """Empty a GPU's cache, as training does where one of its phases ends, so that the next finds it as a trial does.

    Args:
        workspaces: whether cuBLAS's go as well. Where a training has begun they stay: a CUDA graph that it has captured
            may write to them.
    """
    if device.type != "cuda":
        return
    # Private, but what PyTorch's own CUDA graph trees call; absent from builds without CUDA.
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if workspaces and clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()


def prepare_cache(device: torch.device) -> None:
    """Empty a GPU's cache before training, and have cuBLAS take its workspaces, in segments of their own.

    The first step would take them where a block is free, in the midst of a segment that is then never given back: of
    some gigabytes where it is a convolution's. One is for this thread's forward, one for autograd's backward.
    """
    if device.type != "cuda":
        return
    give_back_cache(device, workspaces=True)
    with torch.cuda.device(device), torch.enable_grad():
        value = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(_TakesWorkspaces.apply(value), value)  # type: ignore[no-untyped-call]


class _TakesWorkspaces(torch.autograd.Function):
    """Asks for cuBLAS's handle, with which its workspace comes, in both passes."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return gradient


def clear(device: torch.device) -> None:
    """Give back all memory that is not in use, on the device and on the host.

    Call it outside any `except` block, after `attempt`. Besides the caching allocator's free segments these go: the
    casts that autocast keeps, and cuBLAS's workspaces, which live in the same pool for good once taken, so that each
    probe counts its own as the first step of a training run does. Peak statistics start anew.

    Raises:
        RuntimeError: the device's context is dead; only a new process can use it again.
    """
    gc.collect()
    torch.clear_autocast_cache()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        give_back_cache(device, workspaces=True)
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type in ("mps", "xpu"):
        getattr(torch, device.type).empty_cache()
    with suppress(AttributeError, OSError, TypeError):  # C libraries other than glibc have no such call
        ctypes.CDLL(None).malloc_trim(0)
