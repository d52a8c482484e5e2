"""What training costs on rented GPUs that reach a stated share of their peak FLOP/s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """What a million tokens or samples cost, by a utilisation that the user states: nothing of it is measured.

    Attributes:
        mfu: the share of the peak FLOP/s that the training reaches, above 0 and at most 1.
        usd_per_hour: for all the GPUs together.
        gpus: how many train, each on samples of its own.
        peak_flops: FLOP/s of one of them, in the precision of the training; None where it is not known.
        sample_flops: FLOPs of a sample's training, what is recomputed among them; 0 where none were counted.
        tokens: in a sample; None where the cost is of samples.
    """

    mfu: float
    usd_per_hour: float
    gpus: int
    peak_flops: float | None
    sample_flops: float
    tokens: int | None = None

    @property
    def unit(self) -> str:
        """What it is a million of: `tokens` or `samples`."""
        return "samples" if self.tokens is None else "tokens"

    @property
    def usd_per_million(self) -> float | None:
        """US dollars for a million tokens or samples; None where the peak or the FLOPs are not known."""
        if not self.peak_flops or not self.sample_flops:
            return None
        samples_per_hour = 3600 * self.gpus * self.mfu * self.peak_flops / self.sample_flops
        return 1e6 * self.usd_per_hour / samples_per_hour / (self.tokens or 1)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with the figures that it is made of."""
        return {
            "mfu": self.mfu,
            "peak_flops": self.peak_flops,
            "sample_flops": self.sample_flops or None,
            f"usd_per_million_{self.unit}": self.usd_per_million,
        }
