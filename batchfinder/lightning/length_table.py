"""How many samples a micro-batch may have at each sequence length, and less once that proved too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FIRST_CUT = 0.8
"""Of a size that failed: what is left after the first cut of a batch. Most often a little memory is missing."""

NEXT_CUT = 0.5
"""The same for every further cut."""


class LengthTable:
    """The largest micro-batch by padded length.

    A batch gets the size of the smallest length in the table that is not below its own, so that no size is used that
    was not tried at this length or a longer one. Beyond the longest, sizes go down with the square of the length, as
    attention's memory goes up.

    Args:
        sizes: what a search found for each length; `{None: size}` for data without lengths.
    """

    def __init__(self, sizes: Mapping[int | None, int]) -> None:
        self._fixed = sizes.get(None)
        self._sizes = {length: sizes[length] for length in sorted(key for key in sizes if key is not None)}
        longest = max(self._sizes, default=0)
        self._beyond = self._sizes[longest] * longest**2 if longest else 0

    @property
    def sizes(self) -> dict[int | None, int]:
        """The largest micro-batch of each length, as it is now."""
        sizes: dict[int | None, int] = dict.fromkeys(self._sizes, 0)
        return {length: self.size_for(length) for length in sizes} or {None: self._fixed or 1}

    def size_for(self, seq_len: int | None) -> int:
        """The largest micro-batch for a padded length.

        Args:
            seq_len: in tokens; None where nobody can tell, which gets what the longest gets.
        """
        if not self._sizes:
            return self._fixed or 1
        tabled = self.tabled(seq_len)
        if tabled is not None:
            return self._sizes[tabled]
        assert seq_len is not None
        return max(1, min(self._beyond // seq_len**2, *self._sizes.values()))

    def tabled(self, seq_len: int | None) -> int | None:
        """The length in the table whose size counts; None without lengths, and beyond the longest.

        Args:
            seq_len: a padded length, in tokens.
        """
        if seq_len is None:
            return max(self._sizes, default=None)
        return next((length for length in self._sizes if length >= seq_len), None)

    def lower(self, seq_len: int | None, size: int) -> None:
        """Allow no more than a size at a length, and at longer ones.

        Args:
            seq_len: a padded length, in tokens.
            size: samples, at least 1.
        """
        if not self._sizes:
            self._fixed = min(self._fixed or 1, size)
            return
        tabled = self.tabled(seq_len)
        if tabled is None:
            assert seq_len is not None
            self._beyond = min(self._beyond, size * seq_len**2)
            return
        lowered = [min(limit, size) if length >= tabled else limit for length, limit in self._sizes.items()]
        self.agree([*lowered, self._beyond])

    def values(self) -> list[int]:
        """All of it in numbers, the same count on every rank; the smaller of two is the safer."""
        return [*self._sizes.values(), self._beyond] if self._sizes else [self._fixed or 1]

    def agree(self, values: Sequence[int]) -> None:
        """Take over what all ranks can do.

        Args:
            values: the least of what each rank's `values` said.
        """
        if not self._sizes:
            (self._fixed,) = values
            return
        self._sizes = dict(zip(self._sizes, values[:-1], strict=True))
        longest = max(self._sizes)
        self._beyond = min(values[-1], self._sizes[longest] * longest**2)


def smaller(size: int, cuts: int) -> int:
    """What to try where a size failed.

    Args:
        size: samples of the micro-batch that failed, more than 1.
        cuts: how often this batch's micro-batches were made smaller before.

    Example:
        >>> smaller(10, 0), smaller(8, 1), smaller(2, 0)
        (8, 4, 1)
    """
    return max(1, min(size - 1, int(size * (NEXT_CUT if cuts else FIRST_CUT))))
