"""Places that no search can put back.

batchfinder restores whatever a training step can reach, a counter of steps among it. Module-level names it does not
reach, so what counts its tries is kept behind one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

_PLACES: list[object] = []


class Kept(Generic[T]):
    """Knows the number of a place.

    Args:
        value: what to keep there.
    """

    def __init__(self, value: T) -> None:
        self._number = len(_PLACES)
        _PLACES.append(value)

    def __reduce__(self) -> tuple[type[Kept[T]], tuple[T]]:
        """In another process it is another place, with the same in it."""
        return Kept, (self.value,)

    @property
    def value(self) -> T:
        """What is there now."""
        return _PLACES[self._number]  # type: ignore[return-value]

    @value.setter
    def value(self, value: T) -> None:
        _PLACES[self._number] = value
