"""An optimizer's update, applied once or not at all."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch
from torch.optim import LBFGS, Optimizer

from batchfinder.errors import HalfUpdated, OutOfMemory
from batchfinder.measure.cleanup import Failure, attempt, clear
from batchfinder.measure.one_update import OneUpdate, Raised
from batchfinder.measure.optimizer_copy import OptimizerCopy
from batchfinder.units import format_bytes

_STAY = 100  # updates before a place that had no room is tried again: a copy that fails is not cheap on a GPU
Place = Literal["device", "host", "nowhere"]
_REPEATS = "runs the forward and backward several times within a step"
_COMMUNICATES = "exchanges parameters with other processes within a step"


class AtomicUpdate:
    """Wraps an optimizer's `step` so that an update is applied once or not at all, whatever memory does.

    Before the update parameters, gradients and the optimizer's state are copied: on the device, where the activations
    have just made room, else to the host. If the update then runs out of memory, everything is put back bit for bit,
    memory is released, the copy moved away (to the host, or from there to a temporary file), and the update runs once
    more. Fails it again, everything is put back and `OutOfMemory` raised.
    Where there is no room for a copy at all, the update runs without; if it fails then, it is run again only where none
    of its tensors has changed. The copy is freed as the step returns.

    A closure runs once, before the copy, as torch's own optimizers call it; so do hooks on the step. What fails in
    these, or in hooks after the update, is not the update's failure and is raised as it is. So is every error that is
    not about memory, with the state that it left.

    Args:
        optimizer: one of torch's or built on it. Later patches of its `step` (by a scheduler, by Accelerate) go on top.
        host: whether to copy to the host where the device has no room; with a slow connection that takes longer than
            the update itself.
        on_recovery: told in a sentence when an update had to be run again.

    Attributes:
        left_alone: why updates are not protected; None if they are.
        place: where the last copy was.
        copied_bytes: how large it was.
        recoveries: how many updates had to be run again.
    """

    def __init__(
        self, optimizer: Optimizer, *, host: bool = True, on_recovery: Callable[[str], None] | None = None
    ) -> None:
        self.left_alone: str | None = None
        self.place: Place = "device"
        self.copied_bytes = 0
        self.recoveries = 0
        self._host = host
        self._on_recovery = on_recovery
        self._active = True
        self._running = False
        self._stay = 0
        self._failures = 0  # updates in a row that failed at first
        self._before = vars(optimizer).get("step")
        self._optimizer = weakref.ref(optimizer)
        if isinstance(optimizer, LBFGS):
            self._leave_alone(optimizer, _REPEATS)
        elif type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            self._leave_alone(optimizer, _COMMUNICATES)
        below = self._before or type(optimizer).step

        @functools.wraps(below)
        def unbound(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(optimizer, args, kwargs)

        @functools.wraps(below)
        def step(*args: Any, **kwargs: Any) -> Any:
            return unbound(self._optimizer(), *args, **kwargs)  # type: ignore[arg-type]

        # A plain function, which holds the optimizer weakly: it dies as early as without. A scheduler that patches
        # `step` later looks for `__func__`.
        step.__func__ = unbound  # type: ignore[attr-defined]
        self._wrapper = step
        optimizer.step = step  # type: ignore[method-assign]

    def undo(self) -> None:
        """Put back the optimizer's own `step`. Where somebody has wrapped ours since, ours does nothing from now on."""
        self._active = False
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("step") is not self._wrapper:
            return
        if self._before is None:
            del optimizer.step
        else:
            optimizer.step = self._before  # type: ignore[method-assign]

    def __enter__(self) -> AtomicUpdate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def _step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._before or functools.partial(type(optimizer).step, optimizer)
        if not self._active or self.left_alone or self._running:
            return run(*args, **kwargs)
        self._running = True
        try:
            return self._once_or_not_at_all(optimizer, run, args, kwargs)
        finally:
            self._running = False

    def _once_or_not_at_all(
        self, optimizer: Optimizer, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        device = _device_of(optimizer)
        update = OneUpdate(optimizer, run, args, kwargs, lambda: self._copy(optimizer, device))
        try:
            result = self._attempted(update, optimizer, device)
        finally:
            update.forget()
        try:
            if isinstance(result, Raised):
                raise result.error
            return result
        finally:
            del result  # the error's traceback holds this frame

    def _attempted(self, update: OneUpdate, optimizer: Optimizer, device: torch.device) -> Any:
        """What the step returned, or raised; at the second try if memory ran out at the first."""
        result = attempt(update.first, device.type)
        if update.repeated:
            self._leave_alone(optimizer, _REPEATS)
        if isinstance(result, Failure):
            self._recover(update, optimizer, device, result.message)
            result = attempt(update.again, device.type)
            if isinstance(result, Failure):
                self._give_up(update, optimizer, device, result.message)
            self._failures += 1
            if self._failures > 1 and self.place == "device" and self._host and device.type != "cpu":
                self._give_up_place(device)  # what the copy takes is what is missing, each time
        else:
            self._failures = 0
        return result

    def _copy(self, optimizer: Optimizer, device: torch.device) -> OptimizerCopy:
        """A copy where there is room for it. A place that had none is left alone for a while."""
        self._stay -= 1
        if self._stay <= 0:
            self.place = "device"
        while self.place != "nowhere":
            on_host = self.place == "host"
            copy = attempt(lambda on_host=on_host: OptimizerCopy(optimizer, host=on_host), device.type)  # type: ignore[misc]
            if not isinstance(copy, Failure):
                self.copied_bytes = copy.nbytes
                return copy
            self._give_up_place(device)
        self.copied_bytes = 0
        return OptimizerCopy(optimizer, contents=False)

    def _give_up_place(self, device: torch.device) -> None:
        self.place = "host" if self._host and self.place == "device" and device.type != "cpu" else "nowhere"
        self._stay = _STAY

    def _recover(self, update: OneUpdate, optimizer: Optimizer, device: torch.device, message: str) -> None:
        name = type(optimizer).__name__
        if not update.put_back():
            raise HalfUpdated(name, message)
        clear(device)
        update.make_room()
        self.recoveries += 1
        if self._on_recovery is not None:
            self._on_recovery(
                f"{name} ran out of memory within a step. Parameters, gradients and state are as they were before it,"
                f" and it runs once more. The device said: {message}"
            )

    def _give_up(self, update: OneUpdate, optimizer: Optimizer, device: torch.device, message: str) -> None:
        name = type(optimizer).__name__
        if not update.put_back():
            raise HalfUpdated(name, message)
        clear(device)
        held = sum(tensor.nbytes for group in optimizer.param_groups for tensor in group["params"])
        by_one = optimizer.defaults.get("foreach", False) is not False and not optimizer.defaults.get("fused")
        move = f"{name}(foreach=False) takes less at a time" if by_one else "Keep more of the memory free"
        raise OutOfMemory(
            None,
            f"the step of {name} over {format_bytes(held)} of parameters ran out of memory twice, the second time with"
            " all free memory released. Nothing of it is applied: parameters, gradients and state are as they were"
            f" before it. {move}. The device said: {message}",
        )

    def _leave_alone(self, optimizer: Optimizer, reason: str) -> None:
        self.left_alone = (
            f"{type(optimizer).__name__} {reason}. Its updates are not protected: one that runs out of memory may be"
            " left half done."
        )


def _device_of(optimizer: Optimizer) -> torch.device:
    devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
