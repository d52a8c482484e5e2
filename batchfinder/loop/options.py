"""What is tried, the size aside.

Checking what was asked, before anything is tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchfinder.cache import Store
from batchfinder.errors import InvalidValue
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.tuner import SearchLimits
from batchfinder.search import Bounds
from batchfinder.search.base import check_tolerance
from batchfinder.units import parse_bytes

MICRO_BATCHES = 2
"""The second micro-batch of a step runs with the gradients of the first alive; a third adds nothing."""


@dataclass(frozen=True)
class Setting:
    """A loop as the user has it.

    Attributes:
        train_step: takes a batch, or with a target the micro-batches of one optimizer step.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as a loader would.
        state: what the user has named of all that `train_step` changes.
        device: where the model is.
        target_batch_size: samples per optimizer step; None without a target.
        min_batch_size: the smallest size of use.
        multiple_of: the granularity of sizes.
        asked_by: the function that the user called, for messages.
        left_alone: what can be reached and is not to be put back: bulk data.
        made_before: says whether a model or an optimizer was there before the tries; None for any that is used.
    """

    train_step: Callable[[Any], object]
    make_batch: Callable[[int, int | None], Any]
    state: tuple[Any, ...]
    device: torch.device
    target_batch_size: int | None
    min_batch_size: int
    multiple_of: int
    asked_by: str = "tune_batch_size"
    left_alone: tuple[Any, ...] = ()
    made_before: Callable[[object], bool] | None = None

    @property
    def smallest(self) -> int:
        """The smallest size that may be tried."""
        return Bounds(min_batch_size=self.min_batch_size, multiple_of=self.multiple_of).first

    @property
    def name(self) -> str:
        """What people call it: the classes of its modules, or else the function."""
        modules = ", ".join(type(each).__name__ for each in self.state if isinstance(each, torch.nn.Module))
        return modules or str(getattr(self.train_step, "__name__", ""))

    def micro_batches(self, batch_size: int) -> int:
        """How many micro-batches of this size to try in one optimizer step.

        Args:
            batch_size: samples in a micro-batch.
        """
        return MICRO_BATCHES if self.target_batch_size is not None and batch_size < self.target_batch_size else 1


def check_sizes(
    seq_lens: Sequence[int] | None,
    target_batch_size: int | None,
    min_batch_size: int,
    max_batch_size: int | None,
    multiple_of: int,
    tolerance: float,
) -> None:
    """Refuse sizes that cannot be meant, and a target that the granularity cannot make.

    Args:
        seq_lens: lengths to find sizes for.
        target_batch_size: samples per optimizer step.
        min_batch_size: the smallest size of use.
        max_batch_size: the largest size of use.
        multiple_of: the granularity.
        tolerance: share of the answer that may be left on the table.

    Raises:
        InvalidValue: says which, and what would do.
    """
    for option, value in (
        ("target_batch_size", target_batch_size),
        ("min_batch_size", min_batch_size),
        ("max_batch_size", max_batch_size),
        ("multiple_of", multiple_of),
    ):
        if value is not None and value < 1:
            raise InvalidValue(option, value, "a size of at least 1")
    if seq_lens is not None and (not seq_lens or min(seq_lens) < 1):
        raise InvalidValue("seq_lens", seq_lens, "lengths of at least 1, or None for data of one fixed shape")
    if target_batch_size is not None and target_batch_size % multiple_of:
        raise InvalidValue(
            "target_batch_size", target_batch_size, f"a multiple of {multiple_of}, as multiple_of asks of each size"
        )
    if target_batch_size is not None and target_batch_size < min_batch_size:
        raise InvalidValue("target_batch_size", target_batch_size, f"at least the min_batch_size of {min_batch_size}")
    check_tolerance(tolerance)


def check_alone() -> None:
    """Refuse to try sizes in one of several processes that train together.

    Raises:
        InvalidValue: there are others.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    processes = torch.distributed.get_world_size()
    if processes > 1:
        raise InvalidValue(
            "processes that train together",
            processes,
            "one, since the others wait for ever when it runs out of memory; find the size on one device, and give it "
            "to plan_accumulation(target_batch_size, size, num_devices)",
        )


def headroom_of(headroom: float | int | str) -> float | int:
    """Read how much memory to leave free.

    Args:
        headroom: a share (a float, or text such as `5%`), or bytes (a whole number, or text such as `1GiB`).

    Returns:
        A share from 0.0 to below 1.0, or a number of bytes.

    Raises:
        InvalidValue: it cannot be meant.
    """
    expected = "a share from 0.0 to below 1.0 or such as '5%', or a number of bytes or such as '1GiB'"
    value = headroom
    if isinstance(headroom, str):
        share = headroom.strip().removesuffix("%")
        if share == headroom.strip():
            return parse_bytes(headroom, option="headroom")
        try:
            value = float(share) / 100
        except ValueError:
            raise InvalidValue("headroom", headroom, expected) from None
    if not isinstance(value, int | float) or not value >= 0 or (isinstance(value, float) and value >= 1):
        raise InvalidValue("headroom", headroom, expected)
    return value


def budget_of(budget: int | str | None) -> int | None:
    """Read the most memory that may be used, in bytes; None for as much as there is.

    Args:
        budget: a number of bytes, or text such as `12GiB`.

    Raises:
        InvalidValue: it cannot be meant.
    """
    return None if budget is None else parse_bytes(str(budget), option="budget")


def limits_of(
    memory: Memory,
    headroom: float | int,
    tolerance: float,
    max_batch_size: int | None,
    target_batch_size: int | None,
) -> SearchLimits:
    """What bounds a search.

    Args:
        memory: the device's memory.
        headroom: from `headroom_of`.
        tolerance: share of the answer that may be left on the table.
        max_batch_size: the largest size of use.
        target_batch_size: samples per optimizer step, which no micro-batch exceeds.
    """
    reserve = headroom if isinstance(headroom, int) else int(headroom * memory.free_bytes())
    caps = [cap for cap in (max_batch_size, target_batch_size) if cap is not None]
    return SearchLimits(min(caps, default=None), tolerance, reserve, headroom)


def store_of(cache: str | os.PathLike[str] | Store | bool | None) -> Store | None:
    """The store that was asked for; None for none.

    Args:
        cache: a place or a store; None or True for the default place, False for none.
    """
    if cache is False:
        return None
    if isinstance(cache, Store):
        return cache
    return Store(None if cache is True else cache)


def device_of(device: torch.device | str | None, state: Sequence[Any]) -> torch.device:
    """The device that trains.

    Args:
        device: as it was asked for; None for where the model is.
        state: what the user has named.

    Raises:
        InvalidValue: it is no device whose memory can be limited and measured, or there is none to be seen.
    """
    expected = "cpu, cuda or cuda:N, whose memory can be limited and measured"
    if device is None:
        found = next(_parameters(state), None)
        if found is None:
            raise InvalidValue("device", None, f"{expected}, since state= holds no model to see it from")
        chosen = found.device
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError:
            raise InvalidValue("device", device, expected) from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidValue("device", str(chosen), expected)
    if chosen.type == "cpu":
        return torch.device("cpu")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cards <= (chosen.index or 0):
        expected = f"a device that PyTorch {torch.__version__} can use here; it sees {cards} of CUDA's"
        raise InvalidValue("device", str(chosen), expected)
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)


def _parameters(state: Sequence[Any]) -> Any:
    for item in state:
        if isinstance(item, nn.Module):
            yield from item.parameters()
        elif isinstance(item, Optimizer):
            yield from (parameter for group in item.param_groups for parameter in group["params"])
