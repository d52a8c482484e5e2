"""A trace for any size, from as few recordings as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from batchfinder.simulator.scaling import ScaledTrace, fit
from batchfinder.simulator.trace import Trace

Submit = Callable[[int, int | None], "Future[Trace]"]

# Two primes that are unlikely as a model's own dimensions, and one more for sums of two terms. A batch of one is never
# fitted: size-one dimensions make some copies unnecessary, so its events differ.
_BATCH_SIZES = (7, 13, 11)
# Kernels that want a mask's rows aligned pad it, which is one more event: lengths on either side are fitted apart.
_ALIGNMENT = 8


class TraceSource:
    """Answers with a trace at any size: scaled where the recordings allow it, recorded at that very size elsewhere.

    Sequence lengths of one alignment are fitted together from a recording at the shortest and one at the longest. If
    that fails, a third helps; if that fails too, each length is fitted alone; and if not even that works, each size is
    recorded when it is asked for.

    Args:
        submit: asks for a recording at (batch size, sequence length).
        seq_lens: the lengths that will be asked for; others are taken in as they come.

    Attributes:
        recordings: how many recordings have been asked for.
        unscaled: the sizes that had to be recorded themselves.
    """

    def __init__(self, submit: Submit, seq_lens: Iterable[int | None]) -> None:
        self._submit = submit
        self._recorded: dict[tuple[int, int | None], Future[Trace]] = {}
        self._scaled: dict[int | None, ScaledTrace | None] = {}
        self._groups: dict[bool, list[int | None]] = {}
        self.unscaled: list[tuple[int, int | None]] = []
        for seq_len in dict.fromkeys(seq_lens):
            self._groups.setdefault(_aligned(seq_len), []).append(seq_len)

    @property
    def recordings(self) -> int:
        """How many recordings have been asked for."""
        return len(self._recorded)

    def prefetch(self) -> None:
        """Ask for the recordings that will be needed first, without waiting for them."""
        for seq_lens in self._groups.values():
            for point in _points(seq_lens)[:2]:
                self._record(*point)

    def at(self, batch_size: int, seq_len: int | None) -> Trace:
        """The step's trace at one size.

        Args:
            batch_size: samples in a micro-batch, at least 1.
            seq_len: tokens per sample; None for data of one fixed shape.

        Raises:
            RecordingFailed: a recording failed; `UserCodeFailed` if it was the user's code that did.
        """
        scaled = self._fitted(seq_len) if batch_size > 1 else None
        if scaled is not None:
            return scaled.at(batch_size, seq_len)
        if (batch_size, seq_len) not in self.unscaled:
            self.unscaled.append((batch_size, seq_len))
        return self.recorded(batch_size, seq_len)

    def recorded(self, batch_size: int, seq_len: int | None) -> Trace:
        """The step's trace at one size, recorded at that very size."""
        return self._record(batch_size, seq_len).result()

    def _record(self, batch_size: int, seq_len: int | None) -> Future[Trace]:
        size = (batch_size, seq_len)
        if size not in self._recorded:
            self._recorded[size] = self._submit(batch_size, seq_len)
        return self._recorded[size]

    def _fitted(self, seq_len: int | None) -> ScaledTrace | None:
        if seq_len not in self._scaled:
            group = self._groups.setdefault(_aligned(seq_len), [])
            if seq_len not in group:
                group.append(seq_len)
            lengths = [length for length in group if length not in self._scaled]
            scaled = self._fit(lengths)
            if scaled is not None:
                self._scaled.update(dict.fromkeys(lengths, scaled))
            else:
                self._scaled[seq_len] = self._fit([seq_len]) if len(lengths) > 1 else None
        return self._scaled[seq_len]

    def _fit(self, seq_lens: list[int | None]) -> ScaledTrace | None:
        points = _points(seq_lens)
        for count in (2, 3):
            futures = [self._record(*point) for point in points[:count]]
            scaled = fit([future.result() for future in futures], seq_lens)
            if scaled is not None:
                return scaled
        return None


def _aligned(seq_len: int | None) -> bool:
    return (seq_len or 0) % _ALIGNMENT == 0


def _points(seq_lens: list[int | None]) -> list[tuple[int, int | None]]:
    """Where to record: the shortest, the longest, and one between them."""
    ordered = sorted(seq_lens, key=lambda seq_len: seq_len or 0)
    return list(zip(_BATCH_SIZES, (ordered[0], ordered[-1], ordered[len(ordered) // 2]), strict=True))
