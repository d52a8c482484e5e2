"""Which sizes a search may try: from a floor to a cap, in steps, under a byte limit."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.errors import InvalidValue

DEFAULT_MAX_BATCH_SIZE = 1 << 20
"""The cap where none was asked for, so that a memory curve without end still ends the search."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The sizes that may be tried, in samples whatever the step. Wrappers narrow them on the way in.

    Attributes:
        min_batch_size: no smaller size is tried; when it does not run, the answer is 0.
        max_batch_size: no larger size is tried; None for `DEFAULT_MAX_BATCH_SIZE`.
        multiple_of: every size tried is a multiple of this.
        limit_bytes: a peak above this is as good as a failure; None when no wrapper has said.

    Raises:
        InvalidValue: no size is left to try.
    """

    min_batch_size: int = 1
    max_batch_size: int | None = None
    multiple_of: int = 1
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.last < self.first:
            step = "" if self.multiple_of == 1 else f" and a multiple of {self.multiple_of}"
            raise InvalidValue(
                "max_batch_size",
                self._cap,
                f"at least {self.first}, the smallest size that is at least {self.min_batch_size}{step}",
            )

    @property
    def _cap(self) -> int:
        return DEFAULT_MAX_BATCH_SIZE if self.max_batch_size is None else self.max_batch_size

    @property
    def first(self) -> int:
        """The smallest size that may be tried."""
        return -(-self.min_batch_size // self.multiple_of) * self.multiple_of

    @property
    def last(self) -> int:
        """The largest size that may be tried."""
        return self._cap // self.multiple_of * self.multiple_of

    def floor(self, size: int) -> int:
        """The largest size that may be tried and is at most `size`; 0 when there is none."""
        below = min(size, self.last) // self.multiple_of * self.multiple_of
        return below if below >= self.first else 0

    def after(self, size: int) -> int:
        """The next size up from `size`; beyond `last` where `size` is the last."""
        return max(self.first, (size // self.multiple_of + 1) * self.multiple_of)
