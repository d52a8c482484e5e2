"""A target batch size made of micro-batches that fit: micro-batch x accumulation x devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchfinder.errors import InvalidValue, OutOfMemory

_NEGLIGIBLE = 0.05
"""Share of the micro-batch that an exact target may cost."""

_WORTH_OF_THE_TARGET = 20
"""How much smaller a micro-batch may be, as a share, for each share by which the target is missed less."""


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

    @property
    def factors(self) -> str:
        """The micro-batch x accumulation, and x devices where there are several, in digits."""
        devices = "" if self.num_devices == 1 else f" x {self.num_devices}"
        return f"{self.micro_batch_size} x {self.accumulation}{devices}"

    def exactly(self, min_batch_size: int = 1, multiple_of: int = 1) -> AccumulationPlan | None:
        """The plan that meets the target with smaller micro-batches; None where this one does, or none does.

        Args:
            min_batch_size: the smallest micro-batch of use.
            multiple_of: micro-batches are multiples of this.
        """
        if self.exact:
            return None
        plan = plan_accumulation(
            self.target_batch_size, self.micro_batch_size, self.num_devices, multiple_of=multiple_of, exact=True
        )
        return plan if plan.exact and plan.micro_batch_size >= min_batch_size else None

    def beside_exact(self, min_batch_size: int = 1, multiple_of: int = 1) -> str:
        """`15 x 17 = 255 (exactly 256: 8 x 32)`: itself, and the plan of `exactly` where there is one."""
        exact = self.exactly(min_batch_size, multiple_of)
        beside = "" if exact is None else f" (exactly {exact.target_batch_size}: {exact.factors})"
        return f"{self.factors} = {self.effective_batch_size}{beside}"

    def in_short_epoch(self, samples: int) -> str:
        """What an epoch makes of a step that needs more micro-batches than it has; empty where it has as many.

        Args:
            samples: of an epoch on one device.
        """
        size, batches = self.micro_batch_size, -(-samples // self.micro_batch_size)
        if batches >= self.accumulation:
            return ""
        has = f"1 micro-batch of {samples} samples on each device"
        if batches > 1:
            has = f"{batches} micro-batches of {size} samples on each device"
            has += f", the last of {samples % size}" if samples % size else ""
        return (
            f"An epoch has {has}, and {self.accumulation} are needed for the target batch size of "
            f"{self.target_batch_size}"
        )

    def __str__(self) -> str:
        devices = "" if self.num_devices == 1 else f" x {self.num_devices} devices"
        made = f"{self.micro_batch_size} x {self.accumulation}{devices} = {self.effective_batch_size}"
        if self.exact:
            return made
        off = f"{abs(self.deviation)} {'more' if self.deviation > 0 else 'fewer'}"
        return f"{made} ({off} than the target of {self.target_batch_size})"


def plan_accumulation(
    target_batch_size: int,
    max_batch_size: int,
    num_devices: int = 1,
    *,
    min_batch_size: int = 1,
    multiple_of: int = 1,
    exact: bool = False,
) -> AccumulationPlan:
    """Plan micro-batch x accumulation x devices, near to the target and without many small micro-batches.

    The exact plan has the largest micro-batch that divides each device's share of the target (where the target is no
    multiple of the devices, the share of the nearest multiple). It is taken where its micro-batch is within 5 % of the
    one that the fewest micro-batches of one size would have. Else it can be slow: 254 with at most 64 at a time would
    take 127 micro-batches of 2, and 257, a prime, 257 of 1. Of it and the nearest plans with about the fewest
    micro-batches that plan is then taken for which this is least:

        share by which the micro-batch is smaller than that one + 20 x share by which the target is missed

    so that one percent of the target is worth twenty percent of the micro-batch, and at most 5 % of it is given up: 254
    becomes 64 x 4 = 256, and 10 with at most 3 at a time stays 2 x 5. Of two that are equally good it is that with the
    larger micro-batch. Where batches are split (`split_batch`, `BatchFinder(split_batches=True)`) the target is met
    with uneven micro-batches instead: 254 as 64 + 64 + 63 + 63, each weighed by its samples.

    Args:
        target_batch_size: samples per optimizer step.
        max_batch_size: the largest micro-batch that fits on one device.
        num_devices: devices that train side by side, each with the same micro-batch.
        min_batch_size: the smallest micro-batch of use.
        multiple_of: the micro-batch is a multiple of this, and the target must be one as well.
        exact: take the exact plan, however slow.

    Raises:
        OutOfMemory: `max_batch_size` is less than `multiple_of`, so that there is nothing to accumulate.
        InvalidValue: an argument is out of range, or micro-batches of at least `min_batch_size` do not make the target
            up, not even nearly.

    Example:
        >>> print(plan_accumulation(254, 64), "or", plan_accumulation(254, 64, exact=True))
        64 x 4 = 256 (2 more than the target of 254) or 2 x 127 = 254
    """
    if multiple_of < 1:
        raise InvalidValue("multiple_of", multiple_of, "a size of at least 1")
    if target_batch_size < 1 or target_batch_size % multiple_of:
        expected = f"a multiple of {multiple_of}, as multiple_of asks" if multiple_of > 1 else "a size of at least 1"
        raise InvalidValue("target_batch_size", target_batch_size, expected)
    if num_devices < 1:
        raise InvalidValue("num_devices", num_devices, "at least 1 device")
    if max_batch_size < 0:
        raise InvalidValue("max_batch_size", max_batch_size, "the largest size that fits, or 0 when none does")
    if max_batch_size < multiple_of:
        raise OutOfMemory(multiple_of, f"there is no micro-batch to accumulate to {target_batch_size}")
    # From here on in units of multiple_of.
    target, fitting = target_batch_size // multiple_of, max_batch_size // multiple_of
    plans = []
    share = target // num_devices
    for per_device in (share, share + 1) if share else (1,):
        micro = next(size for size in range(min(per_device, fitting), 0, -1) if per_device % size == 0)
        plans.append(AccumulationPlan(target, micro, per_device // micro, num_devices))
    best = min(plans, key=lambda plan: (abs(plan.deviation), -plan.micro_batch_size))
    most = -(-target // num_devices)
    fewest = -(-most // fitting)
    largest = -(-most // fewest)
    plans = [best]
    if not exact and best.micro_batch_size < (1 - _NEGLIGIBLE) * largest:
        for count in (max(1, fewest - 1), fewest, fewest + 1):
            below = target // (num_devices * count)
            for micro in (below, below + 1):
                plans.append(AccumulationPlan(target, max(1, min(micro, fitting)), count, num_devices))
    most_missed = abs(best.deviation) + target / _WORTH_OF_THE_TARGET
    allowed = [
        plan
        for plan in plans
        if plan.micro_batch_size * multiple_of >= min_batch_size and abs(plan.deviation) <= most_missed
    ]
    if not allowed:
        expected = f"a multiple of any size from {min_batch_size} to {max_batch_size}, which fit"
        raise InvalidValue("target_batch_size", target_batch_size, expected)

    def cost(plan: AccumulationPlan) -> float:
        smaller = max(0.0, 1 - plan.micro_batch_size / largest)
        return smaller + _WORTH_OF_THE_TARGET * abs(plan.deviation) / target

    best = min(allowed, key=lambda plan: (cost(plan), -plan.micro_batch_size))
    return replace(best, target_batch_size=target_batch_size, micro_batch_size=best.micro_batch_size * multiple_of)
