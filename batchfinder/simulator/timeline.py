"""What a replay found: memory at the end of each stage, the peaks, and where it failed if it did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The four counters as `torch.cuda` would print them when a stage has ended.

    Attributes:
        step: which optimizer step, from 0; -1 while the model is being built.
        stage: the mark's name: `forward`, `backward`, ...
        micro_batch: which micro-batch of the step.
        allocated_bytes: in live blocks now.
        max_allocated_bytes: the most since the trace began.
        reserved_bytes: taken from the card now.
        max_reserved_bytes: the most since the trace began.
        num_alloc_retries: how often the cache had to be released to go on, since the trace began.
    """

    step: int
    stage: str
    micro_batch: int
    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int
    num_alloc_retries: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """The allocation with which a maximum was first reached.

    Attributes:
        position: of the event in `Structure.order`.
        block: the block that was allocated, by its number.
        step: the optimizer step it falls in.
        stage: the stage it falls in; empty before the first mark.
        micro_batch: the micro-batch it falls in.
    """

    position: int
    block: int
    step: int
    stage: str
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Overflow:
    """The allocation that the card had no room for.

    Attributes:
        moment: which event it was. Nothing after it was replayed.
        requested_bytes: what was asked for.
        tried_bytes: the segment this needed from the card.
        allocated_bytes: in live blocks then.
        reserved_bytes: taken from the card then, after the cache had been released.
        message: what PyTorch would say.
    """

    moment: Moment
    requested_bytes: int
    tried_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    message: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed trace. Running out of memory is part of it, not an exception.

    Attributes:
        stages: the stages that ended, in order.
        max_allocated_bytes: the most in live blocks at one time.
        max_reserved_bytes: the most taken from the card at one time.
        allocated_peak: when `max_allocated_bytes` was first reached; None if nothing was allocated.
        reserved_peak: when `max_reserved_bytes` was first reached.
        num_alloc_retries: how often the cache had to be released to go on.
        oom: the allocation that failed; None when all of the trace fits.
    """

    stages: tuple[StageMemory, ...]
    max_allocated_bytes: int
    max_reserved_bytes: int
    allocated_peak: Moment | None
    reserved_peak: Moment | None
    num_alloc_retries: int
    oom: Overflow | None = None

    @property
    def fits(self) -> bool:
        """Whether all of the trace ran."""
        return self.oom is None
