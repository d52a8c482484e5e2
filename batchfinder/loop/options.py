"""The loop as the user has it, and the arguments that the functions for loops share."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from batchfinder.errors import CacheFailed, InvalidValue
from batchfinder.snapshot.training_state import TrainingState


@dataclass(frozen=True)
class Phases:
    """What a training does besides steps of full batches. A trial takes each once, in the order of these attributes.

    Attributes:
        restore: puts in what a checkpoint has, before the first step; None where training starts anew.
        others: given a size, makers of batches of other lengths that an epoch has; None where no length differs, and
            where nothing tells.
        evaluate: takes a few batches of an evaluation; None for a training that has none.
        samples: of an epoch on one device, whose last batch may be smaller; None where it never is, and where nothing
            tells.
    """

    restore: Callable[[], object] | None = None
    others: Callable[[int], list[Callable[[], Any]]] | None = None
    evaluate: Callable[[], object] | None = None
    samples: int | None = None

    @property
    def described(self) -> list[bool]:
        """Which of them there are, for a key."""
        return [getattr(self, each.name) is not None for each in fields(self)]


@dataclass(frozen=True)
class LoopConfig:
    """A training loop as the user has it.

    Attributes:
        train_step: takes a batch, or with a target the micro-batches of one optimizer step.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as a loader would.
        state: what the user has named of all that `train_step` changes.
        device: where the model is.
        caller: the function that the user called, for messages.
        left_alone: what can be reached and is not to be put back, such as data in memory.
        phases: what training does besides; the cache is emptied before and after an evaluation.
    """

    train_step: Callable[[Any], object]
    make_batch: Callable[[int, int | None], Any]
    state: tuple[Any, ...]
    device: torch.device
    caller: str = "tune_batch_size"
    left_alone: tuple[Any, ...] = ()
    phases: Phases = Phases()

    @property
    def label(self) -> str:
        """What lists of cached results call it: the classes of its modules, or else the function."""
        modules = ", ".join(type(each).__name__ for each in self.state if isinstance(each, nn.Module))
        return modules or str(getattr(self.train_step, "__name__", ""))

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that the user has named."""
        return [item for item in self.state if isinstance(item, Optimizer)]

    @property
    def replicas(self) -> list[DistributedDataParallel]:
        """The models that DDP keeps alike, among those that the user has named."""
        modules = (part for item in self.state if isinstance(item, nn.Module) for part in item.modules())
        return [part for part in modules if isinstance(part, DistributedDataParallel)]

    def capture(self, left_alone: Sequence[Any] = ()) -> TrainingState:
        """Copy all that a step changes, but for objects and classes in `left_alone` and the loop's own."""
        functions = [self.train_step, self.make_batch, *filter(None, [self.phases.evaluate])]
        owners = [owner for owner in (getattr(one, "__self__", None) for one in functions) if owner is not None]
        return TrainingState.capture(*self.state, *owners, *functions, left_alone=[*left_alone, *self.left_alone])


def world_size() -> int:
    """How many processes train together."""
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if started else 1


def check_single_process() -> None:
    """Refuse to try sizes in one of several processes that train together.

    Raises:
        InvalidValue: there are others.
    """
    if world_size() > 1:
        raise InvalidValue(
            "processes that train together",
            world_size(),
            "one, since the others would hang when it runs out of memory; find the size on one device, and give it to "
            "plan_accumulation(target_batch_size, size, num_devices)",
        )


def check_arguments(option: str, function: Callable[..., object], *given: str) -> None:
    """Refuse a function that cannot be called with so many positional arguments, which are named in the message.

    Raises:
        InvalidValue: it takes fewer, or more.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        expected = f"a function that is called with {' and '.join(given)}{', and ' if given else ''}nothing else"
        raise InvalidValue(option, f"{name}{signature}", f"{expected} ({error})") from None


def warn_not_cached(error: CacheFailed) -> None:
    """Warn that the cache cannot be used."""
    warnings.warn(f"{error} Results of this run are not cached.", stacklevel=2)


def device_of(device: torch.device | str | None, state: Sequence[Any]) -> torch.device:
    """The device that trains.

    Where none was asked for, it is where the model in `state` is.

    Raises:
        InvalidValue: its memory cannot be limited and measured, or there is no such device here.
    """
    expected = "cpu, cuda or cuda:N, whose memory can be limited and measured"
    if device is None:
        parameters: list[torch.Tensor] = []
        for item in state:
            if isinstance(item, nn.Module):
                parameters += item.parameters()
            elif isinstance(item, Optimizer):
                parameters += (parameter for group in item.param_groups for parameter in group["params"])
        if not parameters:
            raise InvalidValue("device", None, f"{expected}, since state= holds no model to take it from")
        chosen = parameters[0].device
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError:
            raise InvalidValue("device", device, expected) from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidValue("device", str(chosen), expected)
    if chosen.type == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus <= (chosen.index or 0):
        expected = f"a device that PyTorch {torch.__version__} can use; it sees {gpus} CUDA devices here"
        raise InvalidValue("device", str(chosen), expected)
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)
