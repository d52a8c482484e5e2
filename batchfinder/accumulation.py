"""A target batch size made of micro-batches that fit: micro-batch x accumulation x devices."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.errors import InvalidValue, OutOfMemory


@dataclass(frozen=True, slots=True)
class AccumulationPlan:
    """Micro-batches, accumulated on each of several devices, in place of one large batch.

    Attributes:
        target_batch_size: the samples per optimizer step that were asked for.
        micro_batch_size: samples per forward and backward on one device.
        accumulation: micro-batches per optimizer step on one device.
        num_devices: devices that train side by side.
    """

    target_batch_size: int
    micro_batch_size: int
    accumulation: int
    num_devices: int = 1

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.accumulation * self.num_devices

    @property
    def deviation(self) -> int:
        """Samples per optimizer step above the target; negative below it."""
        return self.effective_batch_size - self.target_batch_size

    @property
    def exact(self) -> bool:
        """Whether the target is met."""
        return self.deviation == 0

    def __str__(self) -> str:
        devices = "" if self.num_devices == 1 else f" x {self.num_devices} devices"
        made = f"{self.micro_batch_size} x {self.accumulation}{devices} = {self.effective_batch_size}"
        if self.exact:
            return made
        off = f"{abs(self.deviation)} {'more' if self.deviation > 0 else 'fewer'}"
        return f"{made} ({off} than the target of {self.target_batch_size})"


def plan_accumulation(target_batch_size: int, max_batch_size: int, num_devices: int = 1) -> AccumulationPlan:
    """Plan micro-batch x accumulation x devices as near to the target as it goes.

    Whenever the target is a multiple of the devices it is met exactly, with the largest micro-batch that divides each
    device's share: the fewest accumulations. That can be slow: 257 is prime, so with at most 100 at a time it takes 257
    micro-batches of 1. The target is never changed for speed; a caller who may change it should ask for 256.

    When the target is not a multiple of the devices, the nearest multiple is made instead. Of two that are equally near
    the one with the larger micro-batch is taken, which never takes more accumulations.

    Args:
        target_batch_size: samples per optimizer step.
        max_batch_size: the largest micro-batch that fits on one device.
        num_devices: devices that train side by side, each with the same micro-batch.

    Raises:
        OutOfMemory: `max_batch_size` is 0, so that there is nothing to accumulate.
        InvalidValue: an argument is out of range.
    """
    if target_batch_size < 1:
        raise InvalidValue("target_batch_size", target_batch_size, "a size of at least 1")
    if num_devices < 1:
        raise InvalidValue("num_devices", num_devices, "at least 1 device")
    if max_batch_size < 0:
        raise InvalidValue("max_batch_size", max_batch_size, "the largest size that fits, or 0 when none does")
    if max_batch_size == 0:
        raise OutOfMemory(1, f"there is no micro-batch to accumulate to {target_batch_size}")
    share = target_batch_size // num_devices
    plans = []
    for per_device in (share, share + 1) if share else (1,):
        micro = next(size for size in range(min(per_device, max_batch_size), 0, -1) if per_device % size == 0)
        plans.append(AccumulationPlan(target_batch_size, micro, per_device // micro, num_devices))
    return min(plans, key=lambda plan: (abs(plan.deviation), -plan.micro_batch_size))
