"""One call of an optimizer's step: where its update begins and ends, and how the update runs once more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from batchfinder.measure.oom import classify
from batchfinder.measure.optimizer_copy import OptimizerCopy
from batchfinder.results import Verdict
from batchfinder.snapshot.process_state import ProcessState

_OUT_OF_MEMORY = (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY)


class Raised:
    """An error of a step other than its update's running out of memory.

    Attributes:
        error: as it was raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class OneUpdate:
    """One call of an optimizer's step.

    The update begins once the closure and all hooks before the step have run, and ends before the hooks after it.

    Args:
        optimizer: whose step it is.
        run: the step.
        args: what it is called with.
        kwargs: what it is called with.
        copy: called as the update begins, for what it changes.

    Attributes:
        repeated: whether the closure was called more than once: no copy can tell then where the update began.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copy: Callable[[], OptimizerCopy],
    ) -> None:
        self.repeated = False
        self._optimizer = optimizer
        self._run = run
        self._make_copy = copy
        self._copy: OptimizerCopy | None = None
        self._process: ProcessState | None = None
        self._args, self._kwargs = args, kwargs
        self._closure = args[0] if args else kwargs.get("closure")
        self._closure_ran = False
        self._loss: Any = None
        self._depth = 0  # a step that calls that of the class above runs the hooks within the hooks
        self._ended = False
        self._hooks_again: Callable[[], None] | None = None
        self._handles: list[RemovableHandle] = []

    def first(self) -> Any:
        """Run the step.

        Returns:
            What it returns, or what it raised if that was not the update's running out of memory.
        """
        return self._ran(None if self._closure is None else self._call_closure)

    def again(self) -> Any:
        """Run the update once more, without what came before it.

        Returns:
            As `first`.
        """
        with _no_hooks_before(self._optimizer) as self._hooks_again:
            return self._ran(None if self._closure is None else lambda: self._loss)

    def put_back(self) -> bool:
        """Undo what the update has changed; False if that cannot be done."""
        if self._copy is None or self._process is None or not self._copy.restore():
            return False
        self._process.restore()
        return True

    def make_room(self) -> None:
        """Move the copy away from where the update needs room."""
        if self._copy is not None:
            self._copy.make_room()

    def forget(self) -> None:
        """Free the copy."""
        self._copy = None

    def _ran(self, closure: Callable[[], Any] | None) -> Any:
        args, kwargs = self._args, self._kwargs
        if closure is not None:
            args, kwargs = (closure, *args[1:]) if args else args, kwargs if args else {**kwargs, "closure": closure}
        self._depth = 0
        self._handles = [self._optimizer.register_step_pre_hook(self._on_begin)]
        after = self._optimizer.register_step_post_hook(self._on_end)
        cast("OrderedDict[int, Any]", self._optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)
        try:
            return self._run(*args, **kwargs)
        except Exception as error:
            if self._copy is None or self._ended or classify(error) not in _OUT_OF_MEMORY:
                return Raised(error)
            raise
        finally:
            for handle in (*self._handles, after):
                handle.remove()

    def _call_closure(self) -> Any:
        assert self._closure is not None
        if self._closure_ran:
            self.repeated = True
            self._copy = None
            return self._closure()
        self._loss = self._closure()
        self._closure_ran = True
        self._begin()
        return self._loss

    def _on_begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1 and self._hooks_again is not None:
            self._hooks_again()  # those of a step within the step are part of the update
            self._handles.append(optimizer.register_step_pre_hook(self._on_begin))
        if self._depth == 1 and self._copy is None:
            # As other hooks have made them, but for the closure: ours holds this object.
            self._args, self._kwargs = args[1:], kwargs
            if self._closure is None:
                self._begin()
            elif self._args:
                self._args = (self._closure, *self._args[1:])
            else:
                self._kwargs = {**kwargs, "closure": self._closure}

    def _on_end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        self._ended = self._depth <= 0

    def _begin(self) -> None:
        self._process = ProcessState()
        self._copy = self._make_copy()


@contextmanager
def _no_hooks_before(optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    """Without the hooks that run before a step: they have run, and may have changed the gradients.

    Yields:
        What puts them back.
    """
    own, shared = optimizer._optimizer_step_pre_hooks, dict(optimizers._global_optimizer_pre_hooks)
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizers._global_optimizer_pre_hooks.clear()

    def put_back() -> None:
        optimizer._optimizer_step_pre_hooks = own
        optimizers._global_optimizer_pre_hooks.update(shared)

    try:
        yield put_back
    finally:
        put_back()
