"""A card near whose limit the allocator gives its cache back in the first steps of a size, or in all of them.

Up to 80 samples run at once, which is the answer, up to 90 after some steps in which the cache is given back, up to 95
only by giving it back in each step; above that memory runs out, for 87 and 88 in the fourth step.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

STEPS_UNTIL_KEPT = {81: 1, 82: 2, 83: 3, 84: 4, 85: 5, 86: 6, 89: 2, 90: 8}
ANSWER = 80


class Steps:
    """What no search puts back, as it is of a class: the size of the last step, steps at that size, and the retries."""

    size = 0
    at_size = 0
    retries = 0


class SettlingCard:
    """batchfinder's `Memory` of it."""

    name = "settling"
    total_bytes = allowance_bytes = 1050

    def __init__(self) -> None:
        Steps.size = Steps.at_size = Steps.retries = 0

    def free_bytes(self) -> int:
        return self.total_bytes

    def max_peak_bytes(self, held_bytes: int) -> int:
        return self.total_bytes

    def held_bytes(self) -> int:
        return 100

    def limited(self, reserve_bytes: int, held_bytes: int) -> nullcontext[None]:
        return nullcontext()

    def reset_peak(self) -> None:
        Steps.size = 0

    def peaks(self) -> tuple[int | None, int | None]:
        peak = 100 + 10 * Steps.size
        return peak, peak

    def retries(self) -> int:
        return Steps.retries


def step(size: int) -> None:
    """Take a step's memory.

    Raises:
        torch.OutOfMemoryError: there is too little.
    """
    Steps.at_size = Steps.at_size + 1 if size == Steps.size else 1
    Steps.size = size
    if size > 95 or (size in (87, 88) and Steps.at_size == 4):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    if size > 80 and Steps.at_size <= STEPS_UNTIL_KEPT.get(size, 1 << 30):
        Steps.retries += 1
