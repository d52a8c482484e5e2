"""Whether a size trains: the user's own steps, taken, measured and undone, and their optimizer steps counted."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchfinder.distributed.agreement import can_reduce_alone, local_collectives, reduce_alone
from batchfinder.errors import InvalidValue
from batchfinder.loop.options import LoopConfig
from batchfinder.loop.result import MicroBatches
from batchfinder.measure.allocator_history import AllocatorHistory
from batchfinder.measure.trial import (
    TrialSession,
    TrialSteps,
    further_orders,
    give_back_cache,
    prepare_cache,
    run_trial,
    until_reserved_stays,
)
from batchfinder.measure.tuner import SearchLimits
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import MAX_BATCHES_WITHOUT_STEP, PEAK_MICRO_BATCHES, PEAK_STEPS

_CALLS_AS_OFTEN = 8
"""Times the calls of earlier trials that one may take until all optimizers have stepped: a loss scaler skips some."""
_EPOCHS = 2
"""Ends of epochs that a try on a GPU has: each may leave the cache in other pieces."""


class StepCounter:
    """Counts the calls in which each optimizer stepped, and refuses what the session's copy could not put back.

    Attributes:
        idle: ids of the optimizers that did not step in `MAX_BATCHES_WITHOUT_STEP` calls.
        stopped_stepping: whether optimizers stepped less often in this trial than in earlier ones, however many calls
            were made.
    """

    def __init__(self, session: TrialSession, config: LoopConfig) -> None:
        self._session = session
        self._config = config
        self.idle: set[int] = set()
        self._calls = 0
        self._steps: dict[int, int] = {}
        self._in_this_call: set[int] = set()
        self._stepped_before: set[int] = set()
        self._most_calls = 0
        self.stopped_stepping = False
        self._checked_modules = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context around the calls of one trial.

        Raises:
            InvalidValue: something would be changed that the copy does not hold.
        """
        self._calls, self._steps, self._in_this_call, self.stopped_stepping = 0, {}, set(), False
        state, named = self._session.open(), [type(item).__name__ for item in self._config.state]
        replicas = self._config.replicas

        def unnamed(item: object, does: str) -> InvalidValue:
            expected = f"the {type(item).__name__} that train_step {does} among them, so that it can be put back"
            return InvalidValue("state", named, expected)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not state.reaches(optimizer):
                raise unnamed(optimizer, "steps")

        def no_reduction(replica: nn.Module, args: Any) -> None:
            cast(DistributedDataParallel, replica).require_backward_grad_sync = False

        def before_forward(module: nn.Module, args: Any) -> None:
            if isinstance(module, DistributedDataParallel) and module not in replicas:
                raise unnamed(module, "runs")
            if state.reaches(module):
                return
            # A loss made inside the step holds nothing, and a frozen teacher is not changed.
            learns = any(parameter.requires_grad for parameter in module.parameters())
            if learns or (module.training and any(True for _ in module.buffers())):
                raise unnamed(module, "runs")

        with ExitStack() as hooks:
            for replica in replicas:
                if can_reduce_alone(replica):
                    reduce_alone(replica)  # from a first forward on, as training: buckets are built anew in the second
                else:
                    hooks.callback(replica.register_forward_pre_hook(no_reduction).remove)
            hooks.callback(register_optimizer_step_pre_hook(before_step).remove)
            after = register_optimizer_step_post_hook(lambda optimizer, *_: self._in_this_call.add(id(optimizer)))
            hooks.callback(after.remove)
            if not self._checked_modules:
                hooks.callback(register_module_forward_pre_hook(before_forward).remove)
            hooks.enter_context(local_collectives())
            yield
        self._checked_modules = True

    def needs_another_call(self) -> bool:
        """Count a call of the step, and say whether some optimizer has to step again."""
        self._calls += 1
        for optimizer in self._in_this_call:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._stepped_before |= self._in_this_call
        self._in_this_call.clear()
        named = {id(one) for one in self._config.optimizers}
        expected = named - self.idle | self._steps.keys()
        if self._calls < PEAK_STEPS or any(self._steps.get(one, 0) < PEAK_STEPS for one in expected):
            enough = _CALLS_AS_OFTEN * self._most_calls or MAX_BATCHES_WITHOUT_STEP
            if self._calls < min(enough, MAX_BATCHES_WITHOUT_STEP):
                return True
            self.idle |= named - self._stepped_before
            self.stopped_stepping = self._most_calls > 0
            return False
        self._most_calls = max(self._most_calls, self._calls)
        return False


class LoopProbe:
    """Tries a size with steps of the user's, and puts everything back. With a target, steps take micro-batches."""

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(self, config: LoopConfig, limits: SearchLimits, session: TrialSession) -> None:
        self._config = config
        self._target = limits.target_batch_size
        self._each = -(-(limits.target_batch_size or 1) // limits.num_devices)  # of an optimizer step, on this device
        self._smallest = limits.bounds.after(1)  # one sample may raise where two run
        self._session = session
        self._counter = StepCounter(session, config)
        self._warned = False
        self._evaluates = True  # unless the evaluation does not fit beside the smallest size
        self._evaluated_beside_smallest = False
        self._evaluating = False  # whether the last trial's evaluation did not fit

    def record(self, batch_size: int, shape: Shape) -> tuple[Measurement, Trace | None]:
        """Take the first steps of a size, and record what the GPU's allocator does, for `predict_batch_size`.

        Raises:
            Exception: as for a try.
        """
        history = AllocatorHistory(self._session.device)
        seen = self._take_steps(batch_size, shape, history)
        return seen, history.trace(batch_size) if seen.fits else None

    def later_steps(self, batch_size: int) -> list[int | None]:
        """What a try takes after the first steps, as `SimulatedProbe.reserved_over` has it."""
        phases, steps = self._config.phases, list[int | None]()
        if phases.evaluate is not None:
            steps += [None, batch_size, batch_size]
        left = 0 if phases.samples is None else phases.samples % (self._accumulated(batch_size) * batch_size)
        if left:
            steps += _EPOCHS * [left % batch_size or batch_size, batch_size, batch_size]
        return steps

    def _accumulated(self, batch_size: int) -> int:
        """How many micro-batches of a size a step of training has."""
        return -(-self._each // batch_size) if batch_size < (self._target or 0) else 1

    def _take_steps(self, batch_size: int, shape: Shape, history: AllocatorHistory | None = None) -> Measurement:
        """Take all that a try takes, or with a history the first steps alone."""
        session, config, target = self._session, self._config, self._target
        phases = config.phases if self._evaluates else replace(config.phases, evaluate=None)
        # In segments of a fixed size what lies in pieces stays so, and a later step may run out of memory.
        settles = phases.others is not None and AllocatorSettings.from_environment().expandable_segments
        self._evaluating, on_gpu = False, session.device.type == "cuda"
        accumulated = self._accumulated(batch_size)

        def steps(taken: TrialSteps) -> None:
            others = [] if phases.others is None else phases.others(batch_size)
            waiting: list[Callable[[], Any]] = []

            def full() -> Any:
                return config.make_batch(batch_size, shape.seq_len)

            def batches() -> Iterator[Any]:
                while True:  # as in a loop, a batch lives until the next has been made
                    with taken.loading():
                        batch = (waiting.pop(0) if waiting else full)()
                    yield batch

            one, most = batches(), PEAK_MICRO_BATCHES if batch_size < (target or 0) else 1

            def step(count: int = most, of: int = accumulated if history is None else most) -> None:
                given = next(one) if target is None else MicroBatches(batches, count, taken.micro_batch_ended, of)
                config.train_step(given)
                if isinstance(given, MicroBatches) and given.given < count:
                    name = getattr(config.train_step, "__qualname__", type(config.train_step).__qualname__)
                    expected = f"a function that goes through all {count} micro-batches it is given"
                    raise InvalidValue("train_step", name, f"{expected}, not {given.given}")

            def end_of_epoch(samples: int) -> None:
                """The last step of an epoch that is no whole number of steps, and the first steps of the next; twice.

                The cache stays as it is: what an optimizer's state shares segments with could not be given back.
                """
                left = samples % (accumulated * batch_size)
                if left == 0:
                    return
                count = min(most, -(-left // batch_size))
                smaller = left % batch_size
                for _ in range(_EPOCHS if on_gpu else 1):
                    if smaller:
                        waiting.extend([*[full] * (count - 1), lambda: config.make_batch(smaller, shape.seq_len)])
                    step(count, -(-left // batch_size))
                    go_on()

            def go_on() -> None:
                """Steps until two reserve no more; two micro-batches without a GPU."""
                for _ in until_reserved_stays(session.device) if on_gpu else range(-(-PEAK_STEPS // most)):
                    step()

            with self._counter.counting():
                if phases.restore is not None:
                    phases.restore()
                prepare_cache(session.device)
                step()
                while self._counter.needs_another_call():
                    step()
                if history is not None:
                    # One more: the first made the optimizer's state. Beside the second DDP's first buckets are held.
                    for _ in range(2 if config.replicas else 1):
                        step()
                    return
                while taken.goes_on():
                    step()
                for order in itertools.chain([others], further_orders(others, session.memory)):
                    waiting.extend(order)
                    while waiting:
                        step()
                    if order:
                        step()  # of the longest again: the others have left the cache in pieces
                if phases.evaluate is not None:
                    give_back_cache(session.device)
                    self._evaluating, retries = True, session.memory.retries()
                    with taken.apart(session.memory):
                        phases.evaluate()
                        give_back_cache(session.device)
                    self._evaluating = session.memory.retries() > retries
                    go_on()
                if phases.samples is not None:
                    end_of_epoch(phases.samples)

        try:
            return run_trial(
                steps,
                session.memory,
                session.device,
                session.open().restore,
                session.reserve_bytes,
                session.held_bytes,
                stepping=session.stepping,
                timed_steps=session.timed_steps,
                settling_steps=PEAK_STEPS if settles else None,
                spare_bytes=session.spare_bytes if history is None else 0,
                history=history,
            )
        except InvalidValue:
            raise
        except Exception as error:
            at = "" if shape.seq_len is None else f" at seq_len {shape.seq_len}"
            error.add_note(f"Raised while {self._config.caller} tried batch size {batch_size}{at}.")
            if isinstance(error, TypeError) and target is None:
                error.add_note("train_step is given what make_batch(batch_size, seq_len) returns, as one argument.")
            if "MicroBatches" in str(error):
                error.add_note(
                    "With target_batch_size, train_step is given an iterable of the micro-batches of one optimizer "
                    "step, whose length is how many there are."
                )
            raise

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Raises:
            InvalidValue: the step uses something that could not be put back, or leaves micro-batches out.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        session, config = self._session, self._config
        seen = self._take_steps(batch_size, shape)
        if not seen.fits and self._evaluating and not self._evaluation_runs(batch_size, shape):
            return self(batch_size, shape)
        if seen.fits and self._counter.stopped_stepping:
            message = "optimizers stopped stepping, as they do not at other sizes: the step may catch an out-of-memory"
            return replace(seen, verdict=Verdict.OUT_OF_MEMORY, message=message)
        if config.optimizers and batch_size > self._smallest:
            seen = session.stepping.compared(seen, lambda: self(self._smallest, shape))
            if not seen.fits:
                self._counter.idle.clear()
        if self._counter.idle and not self._warned:
            self._warned = True
            idle = [type(one).__name__ for one in config.optimizers if id(one) in self._counter.idle]
            warnings.warn(
                f"{', '.join(idle)} did not step in {MAX_BATCHES_WITHOUT_STEP} calls of train_step, "
                "so sizes are tried without the memory its steps take. train_step should take a whole optimizer step; "
                "leave the optimizer out of state= if it is not meant to step.",
                stacklevel=2,
            )
        return seen

    def _evaluation_runs(self, batch_size: int, shape: Shape) -> bool:
        """Whether the evaluation, which did not fit, does where training takes the least; else it is left out."""
        if batch_size > self._smallest:
            if not self._evaluated_beside_smallest:
                self._evaluated_beside_smallest = True
                self(self._smallest, shape)
        else:
            self._evaluates = False
            warnings.warn(
                "An evaluation does not fit with its own batches, whatever the size to train with, so sizes are tried "
                f"without it. {self._config.caller} does not change the evaluation: give it smaller batches.",
                stacklevel=2,
            )
        return self._evaluates
