"""The tuner on made-up memory curves: what it looks up, certifies, searches, plans, caches and says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.cache.validity import lower
from batchfinder.errors import CacheFailed, InvalidValue, OutOfMemory
from batchfinder.measure.tuner import SearchLimits, Tuner, TuningResult
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict
from batchfinder.search import Bounds, Prediction
from batchfinder.units import GIB

MESSAGE = "no room"


class CacheEntry:
    """A place for one result."""

    def __init__(self) -> None:
        self.result: SearchResult | None = None

    def get(self) -> SearchResult | None:
        return self.result

    def put(self, result: SearchResult) -> None:
        self.result = result


class Device:
    """`free` bytes, of which a size takes `peak(size)`; `leaks` bytes are gone for good with each trial."""

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(self, peak: Callable[[int], int], free: int = 1000, leaks: int = 0, reserve: int = 0) -> None:
        self.peak, self.free, self.leaks, self.reserve = peak, free, leaks, reserve
        self.sizes: list[int] = []
        self.left = 0

    def free_bytes(self) -> int:
        return self.free

    def open(self) -> tuple[Device, int]:
        return self, self.free - self.reserve - self.left

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        self.sizes.append(batch_size)
        peak, limit = self.peak(batch_size), self.open()[1]
        self.left += self.leaks
        if peak > limit:
            return Measurement(Verdict.OUT_OF_MEMORY, message=MESSAGE)
        return Measurement(Verdict.FITS, peak_reserved_bytes=peak)

    def tuner(self, hint: Any = None, warn: Any = None, **limits: Any) -> Tuner:
        """A tuner with exact answers."""
        given = SearchLimits(**{"tolerance": 0.0, "reserve_bytes": self.reserve, **limits})
        return Tuner(self.free_bytes, given, self.open, hint=hint, warn=warn)


def affine(size: int) -> int:
    """100 bytes for the model and 7 for each sample: 128 of them in 1000 bytes."""
    return 100 + 7 * size


def sizes_of(found: TuningResult) -> list[int]:
    """What was tried in this start."""
    return [trial.batch_size for trial in found.result.trials]


class NeedsTwo(Device):
    """Raises where it is given fewer than `least` samples, as BatchNorm does."""

    least = 2
    error: Exception = ValueError("Expected more than 1 value per channel when training")

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        if batch_size < self.least:
            self.sizes.append(batch_size)
            raise self.error
        return super().__call__(batch_size, shape)


def test_where_one_sample_raises_and_two_run_the_search_goes_on_from_two() -> None:
    """The summary says so; a second start certifies the answer."""
    entry, device = CacheEntry(), NeedsTwo(affine)
    found = device.tuner().find(Shape(), entry)
    assert (device.sizes[:3], found.result.max_batch_size) == ([1, 2, 1], 128)
    assert "; from 2 on, since batch size 1 raised ValueError: Expected more than 1 value per channel" in str(found)
    again = device.tuner().find(Shape(), entry)
    assert (sizes_of(again), again.result.source, again.raised) == ([128], "cache", "")


def test_where_two_run_out_of_memory_nothing_fits() -> None:
    """2 is the smallest size then."""
    found = NeedsTwo(lambda size: 2000).tuner().find(Shape())
    assert found.result.max_batch_size == 0
    with pytest.raises(OutOfMemory, match="batch size 2 does not fit"):
        found.raise_if_nothing_fits()


def test_it_does_not_go_on_from_two_where_a_single_sample_will_be_met() -> None:
    """As where batches are split, and the last micro-batch is what is left."""
    device = NeedsTwo(affine)
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        Tuner(device.free_bytes, SearchLimits(from_two=False), device.open).find(Shape())
    assert device.sizes == [1]


@pytest.mark.parametrize("limits", [{}, {"max_batch_size": 1}, {"min_batch_size": 2}])
def test_what_raises_at_any_size_is_raised_as_it_was(limits: dict[str, int]) -> None:
    """With its own words and causes, and not for another size than was asked for."""
    device = NeedsTwo(affine)
    device.least, cause = 1000, KeyError("labels")
    device.error = ValueError("the labels are wrong")
    device.error.__cause__ = cause
    with pytest.raises(ValueError, match="the labels are wrong") as caught:
        device.tuner(**limits).find(Shape())
    assert caught.value is device.error
    assert caught.value.__cause__ is cause
    assert device.sizes == ([1, 2] if not limits else [device.sizes[0]])


def test_what_one_sample_raises_once_is_raised() -> None:
    """An error that does not come again with the same size is not for want of samples."""

    class Once(NeedsTwo):
        def __call__(self, batch_size: int, shape: Shape) -> Measurement:
            self.least = 1 if self.sizes else 2
            return super().__call__(batch_size, shape)

    device = Once(affine)
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        device.tuner().find(Shape())
    assert caught.value is device.error
    assert device.sizes == [1, 2, 1]


def test_a_wrong_value_is_no_want_of_samples() -> None:
    """Our own errors are raised at once."""
    device = NeedsTwo(affine)
    device.error = InvalidValue("state", [], "the optimizer among them")
    with pytest.raises(InvalidValue):
        device.tuner().find(Shape())
    assert device.sizes == [1]


def test_the_summarys_figures_agree() -> None:
    """What ran with a peak shows that there was as much, whatever was said to be free as the start began."""
    seen = Measurement(Verdict.FITS, None, 11 * GIB)
    assert "peak 11.00 GiB of 11.00 GiB" in str(
        TuningResult(replace(FOUND, measurement=seen), None, None, 1, 10 * GIB, 0)
    )


def test_where_nothing_fits_the_limit_and_what_was_held_are_named() -> None:
    """Beside the device's own words."""
    device = Device(lambda size: 2000)
    tuner = Tuner(device.free_bytes, SearchLimits(), device.open, held_bytes=400)
    with pytest.raises(
        OutOfMemory, match=r"no room\. The limit is 1000 B, of which 400 B were held before the first try"
    ):
        tuner.find(Shape()).raise_if_nothing_fits()


@pytest.mark.parametrize("reserve", [0, 100])
def test_the_largest_size_whose_peak_leaves_the_headroom(reserve: int) -> None:
    """With every trial in order."""
    device = Device(affine, reserve=reserve)
    found = device.tuner().find(Shape())
    assert (found.result.max_batch_size, found.result.stop) == ((900 - reserve) // 7, StopReason.EXACT)
    assert sizes_of(found) == device.sizes
    assert (found.limit_bytes, found.reserve_bytes) == (1000, reserve)


def test_a_cached_answer_is_certified_with_one_trial() -> None:
    """However much memory is free; the trials of earlier starts are kept beside it."""
    entry, device = CacheEntry(), Device(affine)
    first = device.tuner().find(Shape(), entry)
    again = device.tuner().find(Shape(), entry)
    assert (sizes_of(again), again.result.max_batch_size, again.result.source) == ([128], 128, "cache")
    assert again.earlier_trials == first.result.trials
    device.free = 998
    assert sizes_of(device.tuner().find(Shape(), entry)) == [128]
    assert entry.result is not None
    assert (entry.result.free_bytes, entry.result.source) == (998, "measured")


def test_without_certifying_a_cached_answer_is_used_while_as_much_is_free() -> None:
    """With less free it is tried all the same."""
    entry, device = CacheEntry(), Device(affine)
    device.tuner().find(Shape(), entry)
    device.sizes.clear()
    again = device.tuner(certify=False).find(Shape(), entry)
    assert (again.result.max_batch_size, again.result.source, device.sizes) == (128, "cache", [])
    device.free = 980
    assert sizes_of(device.tuner(certify=False).find(Shape(), entry))[0] == 128


def test_below_a_cached_answer_that_fails_is_searched() -> None:
    """From the failure down, without trying it again; what is found replaces the record, and the reason is said."""
    entry, device = CacheEntry(), Device(affine)
    device.tuner().find(Shape(), entry)
    device.free = 980
    device.sizes.clear()
    found = device.tuner().find(Shape(), entry)
    assert device.sizes[:2] == [128, 128]  # it is believed when it comes twice
    assert max(device.sizes[2:]) < 128
    assert (found.result.max_batch_size, found.result.source, found.result.stop) == (125, "measured", StopReason.EXACT)
    assert entry.result is not None
    assert (entry.result.max_batch_size, entry.result.free_bytes) == (125, 980)
    assert "; lowered from 128, which ran before; when it was tried again the device ran out of memory; " in str(found)
    device.free = 300
    device.sizes.clear()
    assert device.tuner().find(Shape(), entry).result.max_batch_size == 28
    assert sum(device.peak(size) > 300 for size in set(device.sizes)) <= 3


def test_a_cached_answer_that_fails_by_accident_is_kept() -> None:
    """The second trial is believed."""
    entry = CacheEntry()
    Device(affine).tuner(max_batch_size=100).find(Shape(), entry)
    peaks = iter([2000])
    device = Device(lambda size: next(peaks, 800))
    again = device.tuner(max_batch_size=100).find(Shape(), entry)
    assert (device.sizes, again.result.max_batch_size, again.result.source) == ([100, 100], 100, "cache")
    assert again.lowered_by is None


def test_an_answer_found_with_less_memory_is_searched_again() -> None:
    """A neighbour on the device bounded it; one that a cap bounded is only certified."""
    entry, device = CacheEntry(), Device(affine, free=500)
    device.tuner().find(Shape(), entry)
    device.free = 1000
    grown = device.tuner().find(Shape(), entry)
    assert (grown.result.max_batch_size, grown.result.source, grown.lowered_by) == (128, "measured", None)
    entry, device = CacheEntry(), Device(affine, free=500)
    device.tuner(max_batch_size=50).find(Shape(), entry)
    device.free = 1000
    assert sizes_of(device.tuner(max_batch_size=50).find(Shape(), entry)) == [50]


@pytest.mark.parametrize("capped", [False, True])
def test_an_answer_that_has_become_too_small_is_found_out_as_it_is_certified(capped: bool) -> None:
    """The user's step takes less than it did: the search goes on from the cached size; one that a cap bounded stays."""
    entry, device = CacheEntry(), Device(affine)
    limits = {"max_batch_size": 128} if capped else {}
    device.tuner(**limits).find(Shape(), entry)
    device.peak = lambda size: 100 + 3 * size
    device.sizes.clear()
    found = device.tuner(**limits).find(Shape(), entry)
    if capped:
        assert (device.sizes, found.result.max_batch_size) == ([128], 128)
        return
    assert (device.sizes[0], found.result.max_batch_size, found.result.source) == (128, 300, "measured")
    assert min(device.sizes) == 128
    assert sum(size > 300 for size in device.sizes) == 1
    assert len(device.sizes) <= 5, device.sizes
    assert sizes_of(device.tuner().find(Shape(), entry)) == [300]


@pytest.mark.parametrize("share", [0.96, 1.0, 1.004])
def test_a_peak_that_differs_a_little_costs_no_further_tries(share: float) -> None:
    """As it does from one start to the next, on a CPU above all."""
    entry, device = CacheEntry(), Device(affine)
    device.tuner().find(Shape(), entry)
    device.peak = lambda size: int(share * affine(size))
    assert sizes_of(device.tuner().find(Shape(), entry)) == [128]


def test_a_checkpoints_size_stays_though_a_step_takes_less() -> None:
    """It is not to change in the middle of a run: what a checkpoint has says nothing of free memory."""
    entry, device = CacheEntry(), Device(affine)
    device.tuner().find(Shape(), entry)
    assert entry.result is not None
    entry.result = replace(entry.result, free_bytes=None)
    device.peak = lambda size: 100 + 3 * size
    assert sizes_of(device.tuner().find(Shape(), entry)) == [128]


def test_a_cached_0_is_tried_again() -> None:
    """It may have been somebody else's memory; while nothing fits, each start says so in the device's words."""
    entry, device = CacheEntry(), Device(lambda size: 2000)
    for tries in (2, 4):
        found = device.tuner().find(Shape(512), entry)
        assert (found.result.max_batch_size, len(device.sizes)) == (0, tries)
        with pytest.raises(OutOfMemory) as caught:
            found.raise_if_nothing_fits()
        assert str(caught.value) == (
            "batch size 1 does not fit: no room. The limit is 1000 B. Try a smaller model or sequences shorter "
            "than 512, a lower precision, activation checkpointing or an optimizer with less state."
        )
    device.peak = affine
    assert device.tuner(certify=False).find(Shape(512), entry).result.max_batch_size == 128


def test_a_lowered_record_is_tried_at_a_multiple() -> None:
    """5 % less than a multiple of 8 is none."""
    entry, device = CacheEntry(), Device(affine)
    device.tuner(multiple_of=8).find(Shape(), entry)
    assert lower(entry, 128, MESSAGE) == 121
    for certify in (False, True):
        found = device.tuner(multiple_of=8, certify=certify).find(Shape(), entry)
        assert (sizes_of(found)[0], found.result.max_batch_size, found.result.source) == (120, 120, "cache")


@pytest.mark.parametrize(("leaks", "tolerance"), [(1, 0.0), (4, 0.0), (4, 0.01), (10, 0.05)])
def test_an_answer_runs_with_what_trials_have_left(leaks: int, tolerance: float) -> None:
    """Where they have left less than it took it is tried again; where it fails, the search goes on between what ran
    and the failure, and nothing is cached, since a larger size ran.
    """
    entry, device = CacheEntry(), Device(affine, leaks=leaks)
    found = device.tuner(tolerance=tolerance).find(Shape(), entry)
    answer = found.result.max_batch_size
    again = [trial for trial in found.result.trials if trial.batch_size == answer]
    last = len(found.result.trials) - 1 - found.result.trials[::-1].index(again[-1])
    assert affine(answer) <= 1000 - leaks * last
    ran = [trial.batch_size for trial in found.result.trials if trial.fits]
    assert (entry.result is None) == (max(ran) > answer)
    if found.lowered_by is not None:
        assert found.lowered_by.batch_size > answer >= 0.8 * found.lowered_by.batch_size


def test_an_answer_is_never_far_below_what_ran() -> None:
    """Repeated, with noise in peaks and in what trials leave, answers lie within 3 % of what the memory allows."""
    draw = random.Random(2)
    answers = []
    for _ in range(50):
        noise = random.Random(draw.random())
        device = Device(lambda size, n=noise: 200_000 + 4_000 * size + n.randrange(4_000), free=1_000_000, leaks=500)
        found = device.tuner(tolerance=0.01).find(Shape())
        answers.append(found.result.max_batch_size)
    assert min(answers) >= 194
    assert max(answers) <= 200


def test_where_the_only_size_that_ran_fails_in_the_end_the_error_says_how() -> None:
    """It is tried again since trials have left less memory than it takes, and it is the failure that is told."""
    found = Device(lambda size: 100 * size, free=150, leaks=30).tuner().find(Shape())
    assert [(trial.batch_size, trial.fits) for trial in found.result.trials] == [(1, True), (2, False), (1, False)]
    assert found.result.max_batch_size == 0
    with pytest.raises(OutOfMemory, match="batch size 1 does not fit: no room"):
        found.raise_if_nothing_fits()


class Loses(Device):
    """With the trial of this number a tenth of the memory is gone for good; `told` is the share that is known of."""

    def __init__(self, losing: int, told: float) -> None:
        super().__init__(lambda size: 100 + 10 * size, free=10_000)  # 990 samples, and then 890
        self.losing, self.told = losing, told

    def open(self) -> tuple[Device, int]:
        return self, int(self.told * (self.free - self.left))

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        self.sizes.append(batch_size)
        if len(self.sizes) == self.losing:
            self.left = 1_000
        if self.peak(batch_size) > self.free - self.left:
            return Measurement(Verdict.OUT_OF_MEMORY, message=MESSAGE)
        return Measurement(Verdict.FITS, peak_reserved_bytes=self.peak(batch_size))


@pytest.mark.parametrize("told", [1.0, 0.95])
@pytest.mark.parametrize("tolerance", [0.01, 0.05])
def test_memory_that_is_gone_at_once_costs_no_more_than_itself(tolerance: float, told: float) -> None:
    """Whichever trial loses it, and however many sizes had run before: the answer is near the largest that runs then.

    A limit of the address space leaves more than resident memory lets expect, so that many sizes near the answer run.
    """
    for losing in range(1, 30):
        device = Loses(losing, told)
        answer = device.tuner(tolerance=tolerance).find(Shape()).result.max_batch_size
        assert answer >= 0.95 * 890, (losing, device.sizes)
        assert len(device.sizes) <= 36, (losing, device.sizes)
        again = len(device.sizes) - device.sizes[::-1].index(answer)
        assert answer <= (890 if again >= losing else 990)


def test_a_plans_micro_batch_is_tried_itself() -> None:
    """A smaller size may take more: the next divisor that runs is taken."""
    device = Device(lambda size: 2000 if size == 90 else affine(size))
    found = device.tuner(target_batch_size=180).find(Shape())
    assert (found.result.max_batch_size, found.plan) == (128, AccumulationPlan(180, 60, 3))
    assert device.sizes[-2:] == [90, 60] or device.sizes[-3:] == [90, 90, 60]


def test_a_target_that_no_size_divides_is_refused() -> None:
    """Where the floor forbids the micro-batch of 1 that a prime needs."""
    with pytest.raises(
        InvalidValue, match=r"target_batch_size: .*131.*a multiple of any size from 2 to 128, which fit"
    ):
        Device(affine).tuner(target_batch_size=131, min_batch_size=2, exact=True).find(Shape())


def test_a_target_that_no_large_size_divides() -> None:
    """It is nearly met with a micro-batch that was tried, and said so; or exactly, where that is asked for."""
    device = Device(affine)
    found = device.tuner(target_batch_size=262).find(Shape())
    assert found.plan == AccumulationPlan(262, 87, 3)
    assert device.sizes[-1] == 87
    assert "; accumulation 87 x 3 = 261 (1 fewer than the target of 262); " in str(found)
    assert Device(affine).tuner(target_batch_size=262, exact=True).find(Shape()).plan == AccumulationPlan(262, 2, 131)
    stepped = Device(affine).tuner(target_batch_size=8 * 31, multiple_of=8).find(Shape()).plan
    assert stepped == AccumulationPlan(248, 128, 2)


def test_a_target_is_made_up_by_all_devices() -> None:
    """Each takes its part, and no size above a part is tried."""
    device = Device(affine)
    found = device.tuner(target_batch_size=720, num_devices=4).find(Shape())
    assert (found.plan, found.batch_size) == (AccumulationPlan(720, 90, 2, 4), 90)
    roomy = Device(affine, free=5000)
    assert roomy.tuner(target_batch_size=720, num_devices=4).find(Shape()).batch_size == max(roomy.sizes) == 180


def test_a_hint_saves_tries_and_failures() -> None:
    """With a hint that is up to a quarter low, 6 tries and 1 failure do, on a process as it is.

    Over 500 curves whose peaks differ by up to half a percent of the memory from one look to the next, and of which
    each try keeps a tenth of a percent for good, 97 % of searches stay within that.
    """
    draw, total = random.Random(1), 64_000_000
    seen: Counter[bool] = Counter()
    for _ in range(500):
        answer, fixed = draw.randint(10, 1000), int(total * draw.uniform(0.0, 0.3))
        each, noise = (total - fixed) // answer, random.Random(draw.random())
        device = Device(
            lambda size, f=fixed, e=each, n=noise: f + e * size + n.randrange(total // 200), total, total // 1000
        )
        hinted = int(answer * draw.uniform(0.75, 1.0))
        found = (
            device.tuner(hint=lambda shape, bounds, limit, h=hinted: Prediction(h), tolerance=0.05).find(Shape()).result
        )
        failed = sum(not trial.fits for trial in found.trials)
        assert 0.9 * answer <= found.max_batch_size <= answer
        seen[len(found.trials) <= 6 and failed == 1] += 1
    assert seen[True] >= 0.97 * 500


def test_a_search_starts_from_a_hint() -> None:
    """It is given what a peak may come to; where a cached answer has failed, that says more."""
    entry, device, asked = CacheEntry(), Device(affine, reserve=20), []

    def hint(shape: Shape, bounds: Bounds, max_peak_bytes: int) -> Prediction:
        asked.append((shape.seq_len, max_peak_bytes))
        return Prediction(120)

    found = device.tuner(hint=hint).find(Shape(8), entry)
    assert (asked, device.sizes[0], found.result.max_batch_size) == ([(8, 980)], 102, 125)
    device.free = 900
    assert device.tuner(hint=hint).find(Shape(8), entry).result.max_batch_size == 111
    assert len(asked) == 1


def test_nothing_is_opened_for_what_needs_no_trial() -> None:
    """A probe copies the training state."""
    entry, device = CacheEntry(), Device(affine)
    device.tuner().find(Shape(), entry)
    opened: list[int] = []
    limits = SearchLimits(tolerance=0.0, certify=False)
    Tuner(device.free_bytes, limits, lambda: opened.append(1) or device.open()).find(Shape(), entry)
    assert opened == []


@pytest.mark.parametrize("reads", [True, False])
def test_a_cache_that_fails_is_told_of_once(reads: bool) -> None:
    """At reading, or at writing where it could be read; each length is still answered. Without `warn` it is raised."""

    class Failing(CacheEntry):
        def get(self) -> SearchResult | None:
            return super().get() if reads else self.put(None)

        def put(self, result: SearchResult | None) -> None:
            raise CacheFailed("s3://bucket", "no credentials")

    told: list[CacheFailed] = []
    several = Device(affine).tuner(warn=told.append)
    for seq_len in (8, 4):
        assert several.find(Shape(seq_len), Failing()).result.max_batch_size == 128
    assert [error.url for error in told] == ["s3://bucket"]
    with pytest.raises(CacheFailed):
        Device(affine).tuner().find(Shape(), Failing())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"target_batch_size": 0}, r"target_batch_size: .*0.*a size of at least 1"),
        ({"min_batch_size": 0}, r"min_batch_size: .*0.*a size of at least 1"),
        ({"max_batch_size": -1}, r"max_batch_size: .*-1.*a size of at least 1"),
        ({"multiple_of": 0}, r"multiple_of: .*0.*a size of at least 1"),
        (
            {"target_batch_size": 100, "multiple_of": 8},
            r"target_batch_size: .*100.*a multiple of 8, as multiple_of asks",
        ),
        ({"target_batch_size": 4, "min_batch_size": 5}, r"target_batch_size: .*4.*at least the min_batch_size of 5"),
        ({"tolerance": 1.0}, r"tolerance: .*1.0.*a share from 0"),
    ],
)
def test_wrong_limits_are_refused(wrong: dict[str, Any], text: str) -> None:
    """Each names the option, the value and what would do."""
    with pytest.raises(InvalidValue, match=text):
        SearchLimits(**wrong)


def test_a_headroom_is_bytes_or_a_share_of_what_is_free() -> None:
    """Bytes stay as they are."""
    assert SearchLimits(headroom=0.05).with_memory(1000).reserve_bytes == 50
    assert SearchLimits(headroom=30).with_memory(1000).reserve_bytes == 30


SEEN = Measurement(Verdict.FITS, 9 * GIB, 10 * GIB)
SHAPE = Shape(512)
FOUND = SearchResult(SHAPE, 216, StopReason.EXACT, SEEN, (Trial(200, SHAPE, SEEN), Trial(216, SHAPE, SEEN)))


def test_as_text_it_is_one_line() -> None:
    """Size, length, peak, headroom, accumulation, tries and seconds."""
    found = TuningResult(FOUND, plan_accumulation(1024, 128), None, 1.234, 12 * GIB, GIB)
    assert str(found) == (
        "batch size 216 at seq_len 512; peak 10.00 GiB of 12.00 GiB; headroom 1.00 GiB; accumulation 128 x 8 = 1024; "
        "2 probes in 1.23 s"
    )


def test_what_is_not_there_is_not_said() -> None:
    """Without a length, a peak, a headroom and a target, and with one try."""
    unknown = replace(FOUND, shape=Shape(), measurement=None, trials=FOUND.trials[:1])
    assert str(TuningResult(unknown, None, None, 0.5, 12 * GIB, 0)) == (
        "batch size 216; limit 12.00 GiB; 1 probe in 0.50 s"
    )


def test_the_text_says_where_it_comes_from() -> None:
    """From the cache, as it is or certified."""
    cached = replace(FOUND, source="cache", trials=())
    head = "batch size 216 at seq_len 512; peak 10.00 GiB of 12.00 GiB; from the cache"
    assert str(TuningResult(cached, None, None, 0.01, 12 * GIB, 0)) == f"{head} in 0.01 s"
    certified = replace(cached, trials=FOUND.trials[1:])
    assert str(TuningResult(certified, None, None, 0.01, 12 * GIB, 0)) == f"{head}, certified with 1 probe in 0.01 s"


class TimedDevice(Device):
    """Trains `rate(size)` samples a second where it is to time steps; the optimizer takes a second more."""

    def __init__(self, rate: Callable[[int], float], **settings: Any) -> None:
        super().__init__(affine, **settings)
        self.rate, self.timed_steps = rate, 0
        self.fails: set[int] = set()

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        if not self.timed_steps:
            return super().__call__(batch_size, shape)
        if batch_size in self.fails:
            return Measurement(Verdict.OUT_OF_MEMORY, message=MESSAGE)
        seconds = batch_size / self.rate(batch_size)
        return Measurement(Verdict.FITS, step_seconds=seconds + 1.0, micro_batch_seconds=seconds)

    def tuner(self, hint: Any = None, warn: Any = None, **limits: Any) -> Tuner:
        """With the goal of throughput, unless another is given."""
        given = SearchLimits(**{"tolerance": 0.0, "goal": "throughput", **limits})

        def time_steps(steps: int) -> None:
            self.timed_steps = steps

        return Tuner(self.free_bytes, given, self.open, time_steps=time_steps)


def busy_from_16(size: int) -> float:
    """Samples per second of a device that is busy with 16, where an optimizer step takes a second more."""
    return size / (max(1.0, size / 16) * 20 - 1.0)


def test_the_smallest_size_at_full_speed_is_what_training_gets() -> None:
    """The largest stays the answer of the search, which is what the cache certifies; both are in the summary."""
    entry, device = CacheEntry(), TimedDevice(busy_from_16)
    found = device.tuner().find(Shape(), entry)
    assert (found.result.max_batch_size, found.batch_size) == (128, 16)
    assert "batch size 128; peak 996 B of 1000 B; full speed from 16 on, at 0.8 ± 0.0 % samples/s; " in str(found)
    assert device.timed_steps == 0
    assert {trial.batch_size for trial in found.result.trials} == set(device.sizes)
    again = device.tuner().find(Shape(), entry)
    assert (again.batch_size, sizes_of(again), again.timings) == (16, [128], 0)


def test_a_search_for_memory_neither_uses_nor_forgets_the_speed() -> None:
    """It answers with the largest; the next search for speed finds what was timed before."""
    entry, device = CacheEntry(), TimedDevice(busy_from_16)
    device.tuner().find(Shape(), entry)
    largest = device.tuner(goal="memory").find(Shape(), entry)
    assert (largest.batch_size, largest.throughput) == (128, None)
    assert device.tuner().find(Shape(), entry).timings == 0
    assert lower(entry, 16, MESSAGE) == 15
    assert entry.result is not None
    assert entry.result.throughput is None


def test_where_it_cannot_tell_the_answer_is_the_largest_and_is_not_kept_as_certain() -> None:
    """The next start times again; a run that goes on from a checkpoint keeps its size."""
    numbers, entry = random.Random(1), CacheEntry()
    device = TimedDevice(lambda size: numbers.uniform(1, 10))
    found = device.tuner().find(Shape(), entry)
    assert found.batch_size == 128
    assert "full speed: cannot tell, the timings scatter by " in str(found)
    assert device.tuner().find(Shape(), entry).timings > 0
    assert entry.result is not None
    entry.result = replace(entry.result, free_bytes=None)
    assert device.tuner().find(Shape(), entry).timings == 0


def test_with_a_target_whole_steps_of_its_plans_are_compared() -> None:
    """The optimizer's second counts once a step: 512 of 64 x 8 take 264 s, and of 128 x 4 260 s, as good."""
    device = TimedDevice(lambda size: 2.0 * min(1.0, size / 8))
    found = device.tuner(target_batch_size=512).find(Shape())
    assert found.plan == AccumulationPlan(512, 8, 64)
    assert found.throughput is not None
    assert found.throughput.rate(8).samples_per_second == pytest.approx(512 / (256 + 1))
    again = device.tuner(target_batch_size=512).find(Shape())
    assert again.batch_size == found.batch_size == 8


def test_a_size_that_fails_while_it_is_timed_is_not_the_answer() -> None:
    """Neither the largest, where it does so, nor one below."""
    device = TimedDevice(lambda size: float(size))
    device.fails = {128}
    found = device.tuner().find(Shape())
    assert (found.result.max_batch_size, found.batch_size) == (128, 91)
    device.fails = set(range(1, 129))
    assert (device.tuner().find(Shape()).batch_size, device.timed_steps) == (128, 0)


def test_an_unknown_goal_is_refused() -> None:
    """With the two that there are."""
    with pytest.raises(InvalidValue, match="goal: invalid value 'speed'; expected one of memory, throughput"):
        SearchLimits(goal="speed")


class Deals(Device):
    """Refuses sizes that are no multiple of `number`."""

    number = 4

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        if batch_size % self.number:
            self.sizes.append(batch_size)
            raise ValueError(f"cannot deal out {batch_size} samples")
        return super().__call__(batch_size, shape)


@pytest.mark.parametrize(("number", "hinted"), [(2, 101), (3, 100), (4, 100), (4, 107), (6, 60)])
def test_a_size_that_a_step_refuses_is_not_the_end(number: int, hinted: int) -> None:
    """Multiples are searched, to the largest that fits, and the summary says of what and why."""
    device = Deals(affine)
    device.number = number
    found = device.tuner(hint=lambda shape, bounds, limit: Prediction(hinted)).find(Shape())
    assert found.result.max_batch_size == 128 - 128 % number
    assert f"; in multiples of {number}, since batch size " in str(found)
    assert "raised ValueError: cannot deal out" in str(found)


def test_an_error_that_is_of_no_size_is_raised() -> None:
    """Where the nearest smaller size raises as well, or one that is no multiple has run."""

    class Breaks(Device):
        def __call__(self, batch_size: int, shape: Shape) -> Measurement:
            if batch_size > 40:
                raise ValueError("more than there are labels")
            return super().__call__(batch_size, shape)

    with pytest.raises(ValueError, match="more than there are labels"):
        Breaks(affine).tuner().find(Shape())


def test_a_hint_is_asked_for_once_where_a_size_is_refused() -> None:
    """It may be a recording of the step, which a process that has run a backward on a GPU cannot make any more."""
    device, asked = Deals(affine), []

    def hint(shape: Shape, bounds: Bounds, limit: int) -> Prediction:
        asked.append(limit)
        return Prediction(101)

    assert device.tuner(hint=hint).find(Shape()).result.max_batch_size == 128
    assert len(asked) == 1
