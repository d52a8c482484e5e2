"""What the stub tells PyTorch of a card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CARDS = 64
VARIABLE = "BATCHFINDER_CUDA_STUB"
"""The environment variable from which the stub reads what its cards are, as CUDA is initialized."""


@dataclass(frozen=True, slots=True)
class StubCard:
    """One card of a process that runs on the stub.

    Attributes:
        name: as `torch.cuda.get_device_name` says it.
        total_bytes: as `torch.cuda.get_device_properties` and `mem_get_info` report it.
        context_bytes: what the context of each process that uses the card takes of it.
        held_bytes: what something else holds of it.
        compute_capability: major and minor. PyTorch's choice of kernels depends on it.
        multiprocessors: how many; the scratch memory of reductions depends on it.
        l2_bytes: of the L2 cache, which cuDNN's heuristics ask for.
        clock_khz: of the multiprocessors, likewise.
        memory_clock_khz: likewise.
        bus_bits: width of the memory bus.
    """

    name: str = "NVIDIA A100-SXM4-80GB"
    total_bytes: int = 80 << 30
    context_bytes: int = 0
    held_bytes: int = 0
    compute_capability: tuple[int, int] = (8, 0)
    multiprocessors: int = 108
    l2_bytes: int = 40 << 20
    clock_khz: int = 1_410_000
    memory_clock_khz: int = 1_215_000
    bus_bits: int = 5120

    @property
    def setting(self) -> str:
        """The card in the words of `BATCHFINDER_CUDA_STUB`, which sources/cudart/settings.c reads."""
        major, minor = self.compute_capability
        pairs = {
            "name": re.sub(r'[|;="\\]', " ", self.name)[:255],
            "total": self.total_bytes,
            "context": self.context_bytes,
            "held": self.held_bytes,
            "capability": 10 * major + minor,
            "multiprocessors": self.multiprocessors,
            "l2": self.l2_bytes,
            "clock": self.clock_khz,
            "memory_clock": self.memory_clock_khz,
            "bus": self.bus_bits,
        }
        return ";".join(f"{name}={value}" for name, value in pairs.items())


def stub_setting(cards: Sequence[StubCard], **settings: object) -> str:
    """The value of `BATCHFINDER_CUDA_STUB` for a process with these cards.

    Raises:
        ValueError: there are more than `MAX_CARDS` cards.
    """
    if len(cards) > MAX_CARDS:
        raise ValueError(f"the stub has at most {MAX_CARDS} cards, not {len(cards)}")
    own = ";".join(f"{name}={value}" for name, value in settings.items())
    return "|".join([own or "verbose=0", *(card.setting for card in cards)])
