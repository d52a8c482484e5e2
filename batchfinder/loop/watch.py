"""What the optimizers and modules of a loop do while a size is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchfinder.errors import InvalidValue
from batchfinder.probing.state import TrainingState

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
