"""Two lists of sizes, laid side by side with as few gaps as possible."""

from __future__ import annotations

from collections.abc import Sequence

MOST_DIFFERENCES = 3000


def align(one: Sequence[int], other: Sequence[int], most: int = MOST_DIFFERENCES) -> list[tuple[int, int]] | None:
    """Pairs of positions whose sizes are equal, in order, so that as few as possible are left over on both sides.

    E. Myers, An O(ND) Difference Algorithm and Its Variations, Algorithmica 1 (1986), figure 2: the furthest point that
    each diagonal reaches with d differences, from which the way back is read.

    Args:
        one: sizes.
        other: sizes.
        most: differences at which to give up.

    Returns:
        The pairs; None where there are more differences.
    """
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for differences in range(min(most, len(one) + len(other)) + 1):
        history.append(dict(furthest))
        for diagonal in range(-differences, differences + 1, 2):
            down = diagonal == -differences or (
                diagonal != differences and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
            )
            x = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            y = x - diagonal
            while x < len(one) and y < len(other) and one[x] == other[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(one) and y >= len(other):
                return _way_back(history, len(one), len(other))
    return None


def _way_back(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for differences in range(len(history) - 1, -1, -1):
        furthest, diagonal = history[differences], x - y
        down = diagonal == -differences or (
            diagonal != differences and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
        )
        before = diagonal + 1 if down else diagonal - 1
        start_x = furthest[before] if differences else 0
        start_y = start_x - before if differences else 0
        while x > start_x and y > start_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start_x, start_y
    return pairs[::-1]
