"""What the optimizers and modules of a loop do while a size is tried.

Whether a size trains: the user's own step, taken, measured, and undone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchfinder.errors import InvalidValue
from batchfinder.loop.options import Setting
from batchfinder.loop.result import MicroBatches
from batchfinder.measure.apart import at_home
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.trial import SteadyStateCheck, tried
from batchfinder.results import Measurement, Shape
from batchfinder.snapshot.training_state import TrainingState

LEAST_CALLS = 2
"""Adam's state appears at the end of the first step, so the peak comes in the second."""

MOST_CALLS = 64
"""An optimizer that does not step for this many calls (a GradScaler skips a few at first) is taken not to step."""


class Watch:
    """Counts the calls in which each optimizer stepped, and refuses what could not be put back.

    Args:
        state: what will be put back.
        names: classes of what the user has named, for a message.
        optimizers: the optimizers that the user has named.
        made_before: says whether a model or an optimizer was there before the tries; one that a try has made goes with
            it. None where all are taken to have been there.
    """

    def __init__(
        self,
        state: TrainingState,
        names: list[str],
        optimizers: list[Optimizer],
        made_before: Callable[[object], bool] | None = None,
    ) -> None:
        self._state = state
        self._names = names
        self._optimizers = optimizers
        self._made_before = made_before
        self._idle: set[int] = set()
        self._calls = 0
        self._stepped: dict[int, int] = {}
        self._in_this_call: set[int] = set()
        self._seen_all = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context around the calls of one try.

        Raises:
            InvalidValue: something that the state does not reach would have been changed.
        """
        self._calls, self._stepped, self._in_this_call = 0, {}, set()
        with ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
            if not self._seen_all:
                hooks.callback(register_module_forward_pre_hook(self._before_forward).remove)
            yield
        self._seen_all = True

    def called(self) -> bool:
        """Count a call of the step.

        Returns:
            Whether another is needed.
        """
        self._calls += 1
        for optimizer in self._in_this_call:
            self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
        self._in_this_call.clear()
        if self._calls >= MOST_CALLS:
            self._idle |= {id(one) for one in self._optimizers if not self._stepped.get(id(one))}
            return False
        expected = {id(one) for one in self._optimizers} - self._idle | self._stepped.keys()
        if not expected and self._made_before is not None:
            return True  # those that the try makes are not known before they step
        return self._calls < LEAST_CALLS or any(self._stepped.get(one, 0) < LEAST_CALLS for one in expected)

    @property
    def idle(self) -> list[str]:
        """Classes of the optimizers that did not step in `MOST_CALLS` calls."""
        return [type(one).__name__ for one in self._optimizers if id(one) in self._idle]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_safe(optimizer):
            raise self._unnamed(optimizer, "steps")

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_this_call.add(id(optimizer))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        # A loss made inside the step holds nothing, and a frozen teacher is not changed.
        if self._is_safe(module):
            return
        learns = any(parameter.requires_grad for parameter in module.parameters())
        if learns or (module.training and any(True for _ in module.buffers())):
            raise self._unnamed(module, "runs")

    def _is_safe(self, item: object) -> bool:
        """Whether nothing is left of what a step does to a model or an optimizer."""
        return self._state.reaches(item) or (self._made_before is not None and not self._made_before(item))

    def _unnamed(self, item: object, does: str) -> InvalidValue:
        if self._made_before is not None:
            return InvalidValue(
                "what the function trains",
                type(item).__name__,
                "an argument of the function, something that it makes itself, or a variable of an enclosing function, "
                "so that it can be put back after a try; names of the module cannot be reached",
            )
        return InvalidValue(
            "state",
            self._names,
            f"the {type(item).__name__} that train_step {does} among them, so that it can be put back",
        )


class LoopProbe:
    """Tries a size with a step of the user's, and leaves no trace.

    Args:
        setting: what is tried.
        state: what to put back after each try.
        watch: counts the optimizers' steps.
        memory: the device's memory.
        reserve_bytes: to keep free.
        held_bytes: what `state` takes on the device.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self, setting: Setting, state: TrainingState, watch: Watch, memory: Memory, reserve_bytes: int, held_bytes: int
    ) -> None:
        self._setting = setting
        self._state = state
        self._watch = watch
        self._memory = memory
        self._reserve_bytes = reserve_bytes
        self._held_bytes = held_bytes
        self._warned = False

    def warm_up(self, shape: Shape) -> None:
        """Let the process take what it takes once, which would be taken for what samples take. No size is judged by it.

        Args:
            shape: one sample's shape.
        """
        if self._memory.first_step_overhead:
            self(self._setting.smallest, shape)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Args:
            batch_size: samples in the micro-batch.
            shape: one sample's shape.

        Raises:
            InvalidValue: the step uses something that could not be put back, or leaves micro-batches out.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        try:
            seen = tried(
                lambda settling: self._steps(batch_size, shape, settling),
                self._state,
                self._memory,
                self._setting.device,
            )
        except InvalidValue:
            raise
        except Exception as error:
            at = "" if shape.seq_len is None else f" at seq_len {shape.seq_len}"
            error.add_note(f"Raised while {self._setting.asked_by} tried batch size {batch_size}{at}.")
            if "MicroBatches" in str(error):
                error.add_note(
                    "With target_batch_size, train_step is given an iterable of the micro-batches of one optimizer "
                    "step, whose length is how many there are."
                )
            raise
        if self._watch.idle and not self._warned:
            self._warned = True
            warnings.warn(
                f"{', '.join(self._watch.idle)} did not step in {MOST_CALLS} calls of train_step, so sizes are tried "
                "without the memory its steps take. train_step should take a whole optimizer step; leave the optimizer "
                "out of state= if it is not meant to step.",
                stacklevel=2,
            )
        return seen

    def _steps(self, batch_size: int, shape: Shape, settling: SteadyStateCheck) -> None:
        setting = self._setting
        # As in a loop, a batch lives until the next one has been made.
        with self._memory.limited(self._reserve_bytes, self._held_bytes), self._watch.watching():
            accumulates = setting.target_batch_size is not None
            for given in (self._windows if accumulates else self._batches)(batch_size, shape):
                setting.train_step(given)
                if accumulates:
                    self._check_all_taken(given)
                if not self._watch.called() and not settling.goes_on():
                    break
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)

    def _batches(self, batch_size: int, shape: Shape) -> Iterator[Any]:
        while True:
            yield at_home(lambda: self._setting.make_batch(batch_size, shape.seq_len))

    def _windows(self, batch_size: int, shape: Shape) -> Iterator[MicroBatches]:
        while True:
            yield MicroBatches(lambda: self._batches(batch_size, shape), self._setting.micro_batches(batch_size))

    def _check_all_taken(self, micro_batches: MicroBatches) -> None:
        if micro_batches.given < len(micro_batches):
            train_step = self._setting.train_step
            raise InvalidValue(
                "train_step",
                getattr(train_step, "__qualname__", type(train_step).__qualname__),
                f"a function that goes through all {len(micro_batches)} micro-batches it is given, "
                f"not {micro_batches.given}",
            )
