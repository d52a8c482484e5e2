"""The largest batch size of a GPU, predicted from what its allocator did with small ones, as a search's start.

Each block of a step takes bytes that go with the batch size, so two recordings tell those of any size; replayed by the
allocator's rules, they tell what is reserved for it. A prediction saves tries near the limit, and no more: where there
is none the search does without.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

from batchfinder.errors import RecordingFailed
from batchfinder.recording.answers import predict_full_card
from batchfinder.results import Measurement, Shape, Trial
from batchfinder.search import Bounds, Prediction
from batchfinder.search.secant import PeakModel
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import Line, Polynomial, ScaledTrace, Term, TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace

_SMALL_CAP = 8
"""Up to this largest size no search takes as long as a prediction."""

_SHARE_RECORDED = 0.25
"""Of a size that runs for sure, what is recorded: its kernels are those of the answer, and it takes a fraction of a
try."""
_MOST_RECORDED = 4
"""Sizes that are recorded at most until one is large enough. The smallest say little of what a sample takes."""

log = logging.getLogger(__name__)

Record = Callable[[int], "tuple[Measurement, Trace | None]"]
Later = Callable[[int], "Sequence[int | None]"]


def predict_batch_size(
    record: Record,
    bounds: Bounds,
    max_peak_bytes: int,
    held_bytes: int,
    most_scratch: int,
    later: Later = lambda batch_size: (),
) -> Prediction | None:
    """Predict the largest batch size.

    Args:
        record: takes the first steps with batches of a size, puts everything back, and returns what was measured and
            recorded.
        bounds: the sizes that may be tried.
        max_peak_bytes: what a peak may come to.
        held_bytes: of the device, what training will not have, and recordings had.
        most_scratch: bytes to which the scratch memory of sums grows.
        later: what training does after the recorded steps, as `SimulatedProbe.reserved_over` takes it, for a batch
            size.

    Returns:
        The largest size that gives no cached memory back; a rough guess above the largest of use where far more than
        that fits. None where a step raises, or only a few sizes are in question.
    """
    try:
        if bounds.last <= _SMALL_CAP:
            return None
        size = bounds.after(1)  # a batch of one takes other kernels
        model, traces, runs = PeakModel(), list[Trace](), 0
        while len(traces) < _MOST_RECORDED:
            seen, trace = record(size)
            if trace is None and len(traces) > 1:
                break
            if trace is None:
                log.info("BatchFinder: no prediction: batch size %d does not fit", size)
                return None
            traces.append(trace)
            model = model.add(Trial(size, Shape(), seen))
            runs = model.lower_bound(max_peak_bytes) or model.crossing(max_peak_bytes) or size
            if bounds.max_batch_size is not None and runs > 2 * bounds.last:
                return Prediction(runs)
            larger = _prime(max(int(_SHARE_RECORDED * runs), 2 * size + 1), bounds.multiple_of)
            if len(traces) == 1 and larger > runs:
                # One size alone takes what a forward takes once, as FSDP's gathered weights, for that of its samples.
                larger = _prime(size + 1, bounds.multiple_of)
            if larger > min(runs, bounds.last) or (len(traces) > 1 and size > _SHARE_RECORDED * runs / 2):
                break
            size = larger
        if len(traces) < 2:
            log.info("BatchFinder: no prediction: about batch size %d fits", runs)
            return None
        memory = DeviceMemory(max_peak_bytes + held_bytes, max_peak_bytes + held_bytes)
        source = _Scaled(scaled(traces[-2], traces[-1], most_scratch))
        probe = SimulatedProbe(source, memory, AllocatorSettings.from_environment())
        predicted = predict_full_card(probe, Shape(), later=later)
    except Exception as error:  # of the user's code as well: a trial raises it again, where it counts
        log.info("BatchFinder: no prediction: %s: %s", type(error).__name__, error)
        log.debug("BatchFinder: no prediction", exc_info=True)
        return None
    log.info("BatchFinder: batch size predicted from recorded steps: %d", predicted.batch_size)
    return predicted


def _prime(size: int, of: int) -> int:
    """The smallest multiple of a number by a prime that is at least a size."""
    times = -(-size // of)
    while any(times % divisor == 0 for divisor in range(2, int(times**0.5) + 1)):
        times += 1
    return times * of


def scaled(small: Trace, large: Trace, most_scratch: int) -> ScaledTrace:
    """The larger of two recorded steps at any size: what the smaller one takes tells how each block of it scales.

    Bytes that both take are the same at every size; those of which the smaller takes its part are in proportion to the
    size, or to its square. What is left is scratch memory of kernels that share their work out, which some sizes do not
    take at all: where both have as many such blocks, each lies on a line through two in their order; else they are in
    proportion.

    Args:
        large: its batch size is a prime, or a prime times what sizes are multiples of, as `_prime` gives it: bytes of
            the model's own dimensions are hardly taken for those of a batch.
        most_scratch: bytes to which the scratch memory of sums grows.
    """
    first, last = small.batch_size, large.batch_size
    before = Counter(small.sizes)
    parts: dict[int, tuple[int, int]] = {}  # for each number of bytes in the larger the power, and those in the smaller
    for size, count in Counter(large.sizes).items():
        powers = [power for power in (1, 0, 2) if size * first**power % last**power == 0]
        alike = [(power, size * first**power // last**power) for power in powers]
        alike = [(power, part) for power, part in alike if part in before]
        if alike:  # where several are possible, the one of which there are as many
            parts[size] = next((each for each in alike if before[each[1]] == count), alike[0])
    known = {part for _, part in parts.values()}
    left = [(first, size) for size in small.sizes if size not in known]
    alone = sum(size not in parts for size in large.sizes)
    points = iter(left if len(left) == alone else [(0, 0)] * alone)
    order, sizes = large.structure.order, large.sizes
    # A sum's scratch memory is released after its semaphores, which take less, before anything else is allocated.
    pairs = ((order[at], order[at + 1], order[at + 2 : at + 4]) for at in range(len(order) - 3))
    sums = {outer for outer, inner, after in pairs if after == (~inner, ~outer) and sizes[inner] < sizes[outer]}

    def polynomial(block: int, size: int) -> Polynomial:
        power, start = (1, next(points)) if size not in parts else (parts[size][0], (0, 0))
        if power != 1:
            return (Term(size // last**power, power, ()),)
        # Far beyond that each thread has a part that is large enough, and further blocks of threads begin.
        most = max(size, most_scratch) if block in sums and size < 2 * most_scratch else None
        return (Line(start, (last, size), most),)

    each = [polynomial(block, size) for block, size in enumerate(large.sizes)]
    index = {terms: number for number, terms in enumerate(dict.fromkeys(each))}
    return ScaledTrace(large.structure, tuple(index), tuple([index[terms] for terms in each]), unmodelled=())


class _Scaled(TraceSource):
    """Traces of any size from one that is scaled already."""

    def __init__(self, scaled: ScaledTrace) -> None:
        super().__init__(_refuse, [None])
        self._scaled[None] = scaled


def _refuse(batch_size: int, seq_len: int | None) -> NoReturn:
    raise RecordingFailed(f"batch size {batch_size} was not recorded")
