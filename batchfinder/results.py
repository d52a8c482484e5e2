"""Frozen records: a sample's shape, the measurement of one size, the result of a search."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from batchfinder.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class Shape:
    """One sample, without the batch dimension.

    Attributes:
        seq_len: tokens per sample (for images, the side in pixels); None for data of one fixed shape.
    """

    seq_len: int | None = None

    def __str__(self) -> str:
        return "one sample" if self.seq_len is None else f"seq_len {self.seq_len}"


class Verdict(enum.Enum):
    """The verdict on one probed size. The value is the text a person reads.

    An error in the user's code is not a verdict: it propagates unchanged.
    """

    FITS = "fits"
    OUT_OF_MEMORY = "the device ran out of memory"
    FELL_BACK = "a kernel had no memory for its workspace, and another took its place"
    SIZE_CEILING = "a kernel cannot index a tensor this large"
    THRASHING = "every further step would have to release the allocator's cache (thrashing)"
    HOST_OUT_OF_MEMORY = "the host ran out of memory"
    HEADROOM = "it fits, but leaves less than the headroom free"

    @property
    def fits(self) -> bool:
        """Whether a size with this verdict may be reported."""
        return self is Verdict.FITS

    @property
    def is_transient(self) -> bool:
        """Whether another try may end otherwise: fragmentation, or another process, may be the cause.

        Or the first steps with a shape are, in which cuDNN asks for one workspace after another until there is memory
        for one. It remembers which: the next try, and training in the same process, ask for no more.
        """
        return self in (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY, Verdict.FELL_BACK)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one probe of one size measured.

    Attributes:
        verdict: fits, or how it failed.
        peak_allocated_bytes: most bytes held by live blocks (`torch.cuda.max_memory_allocated`); None if unknown.
        peak_reserved_bytes: most bytes taken from the device (`torch.cuda.max_memory_reserved`); None if unknown.
        seconds: time the probe took.
        message: the device's own words for a failure; empty when it fits.
        needed_bytes: what a size that failed would have taken, where that is known.
        resting_bytes: held as a later step begins: weights, optimizer state, live gradients; None if unknown.
        forward_bytes: the most the first forward, loss included, took beyond what was held before; None if unknown.
        step_seconds: the median time of a step of one micro-batch, its optimizer step included and the making of its
            batch left out; None where steps were not timed.
        micro_batch_seconds: that of a micro-batch which is followed by another one in its step; None where a step had
            a single one. A step of k takes `(k - 1) * micro_batch_seconds + step_seconds`.
    """

    verdict: Verdict
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    seconds: float = 0.0
    message: str = ""
    needed_bytes: int | None = None
    resting_bytes: int | None = None
    forward_bytes: int | None = None
    step_seconds: float | None = None
    micro_batch_seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the size ran."""
        return self.verdict.fits

    def raise_for_verdict(self, batch_size: int | None = None) -> None:
        """Raise `OutOfMemory` unless the size ran, for those who prefer exceptions.

        Raises:
            OutOfMemory: the verdict is not `FITS`.
        """
        if not self.fits:
            raise OutOfMemory(batch_size, self.message or self.verdict.value)


@dataclass(frozen=True, slots=True)
class Trial:
    """One probed size and its measurement."""

    batch_size: int
    shape: Shape
    measurement: Measurement

    @property
    def fits(self) -> bool:
        """Whether the size ran."""
        return self.measurement.fits


class StopReason(enum.Enum):
    """Why a search ended."""

    EXACT = "the next size up was probed and failed"
    CAP = "the cap was reached"
    TOLERANCE = "the next failing size is within the tolerance"


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one size trains.

    Attributes:
        batch_size: samples in a micro-batch.
        samples_per_second: the median of its timings, in steps of one device: forward, backward and optimizer step.
        spread: how far timings lie from it, as a share: their scaled median absolute deviation, which is the standard
            deviation of normal ones.
    """

    batch_size: int
    samples_per_second: float
    spread: float

    @property
    def figures(self) -> str:
        """Samples per second and their spread."""
        rate = self.samples_per_second
        return f"{f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} ± {100 * self.spread:.1f} %"


@dataclass(frozen=True, slots=True)
class Throughput:
    """The smallest size at full speed, of the sizes up to the largest that fits.

    Attributes:
        batch_size: the smallest within 3 % of the best; where that is not certain, the largest that was timed.
        best_batch_size: the size with the highest rate.
        rates: of all sizes that were timed, by size.
        certain: whether the timings were steady enough to tell.
        rounds: how often each size was timed that was near the best.
        error: standard error of the comparison that decided, as a share.
    """

    batch_size: int
    best_batch_size: int
    rates: tuple[Rate, ...]
    certain: bool
    rounds: int
    error: float

    def rate(self, batch_size: int) -> Rate:
        """The rate of a size that was timed."""
        return next(rate for rate in self.rates if rate.batch_size == batch_size)

    @property
    def scatter(self) -> float:
        """How far timings lie from each other where it is decided, as a share: what gives `error` over all rounds.

        The standard error of a median of n normal values is sqrt(pi / 2 / n) times their standard deviation.
        """
        return self.error * math.sqrt(max(1, self.rounds - 1) / (math.pi / 2))

    def __str__(self) -> str:
        if not self.certain:
            return f"full speed: cannot tell, the timings scatter by {100 * self.scatter:.1f} %"
        chosen, best = self.rate(self.batch_size), self.rate(self.best_batch_size)
        said = f"full speed from {chosen.batch_size} on, at {chosen.figures} samples/s"
        return said if chosen is best else f"{said} (best: {best.figures} at {best.batch_size})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        max_batch_size: the largest size that was probed and ran; 0 when not even one sample fits.
        stop: why the search ended.
        measurement: the probe of `max_batch_size`; of the smallest size that failed when that is 0.
        trials: every probe, in order; empty when the answer came from the cache.
        source: `simulated`, `measured`, `cache`, or `checkpoint` where a Lightning run went on from one.
        unmodelled: what a simulated figure leaves out, in words.
        free_bytes: what was free on a real device when the search began; None on a simulated one.
        throughput: the smallest size at full speed; None where sizes were not timed.
        trained: batch size, peak allocated and peak reserved bytes of the last training that ended; None before.
    """

    shape: Shape
    max_batch_size: int
    stop: StopReason
    measurement: Measurement | None
    trials: tuple[Trial, ...] = ()
    source: str = "measured"
    unmodelled: tuple[str, ...] = ()
    free_bytes: int | None = None
    throughput: Throughput | None = None
    trained: tuple[int, int | None, int | None] | None = None
