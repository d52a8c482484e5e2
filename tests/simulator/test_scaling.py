"""Traces at any size from recordings."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchfinder.errors import RecordingFailed
from batchfinder.simulator.scaling import ScaledTrace, TraceSource, between_gpus, fit
from batchfinder.simulator.trace import Trace, TraceStructure

PADDINGS = (1, 8, 32, 64, 128)
POINTS = ((7, 64), (13, 512), (11, 256))
SEQ_LENS = (64, 128, 256, 320, 384, 512)
# A term: bytes, power of the batch size, and for each power of the length what that is rounded up to.
Term = tuple[int, int, tuple[int, ...]]


def value(terms: tuple[Term, ...], batch_size: int, seq_len: int) -> int:
    """Bytes of a sum of terms, written independently of the code under test."""
    total = 0
    for coefficient, power, paddings in terms:
        product = coefficient * batch_size**power
        for padding in paddings:
            product *= (seq_len + padding - 1) // padding * padding
        total += product
    return total


def trace(sizes: tuple[int, ...], batch_size: int, seq_len: int | None, order: tuple[int, ...] | None = None) -> Trace:
    """A trace of blocks without names."""
    blank = ("",) * len(sizes)
    return Trace(batch_size, seq_len, TraceStructure(order or tuple(range(len(sizes))), (), blank, blank, blank), sizes)


def traces(blocks: list[tuple[Term, ...]], points: tuple[tuple[int, int], ...]) -> list[Trace]:
    """The same blocks at several sizes."""
    return [trace(tuple(value(terms, *point) for terms in blocks), *point) for point in points]


plain = st.tuples(st.integers(1, 1 << 24), st.integers(0, 2), st.sampled_from([(), (1,), (1, 1)]))
padded = st.tuples(
    st.integers(1, 1 << 16), st.integers(0, 2), st.lists(st.sampled_from(PADDINGS), max_size=2).map(tuple)
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(plain), min_size=1, max_size=6), st.integers(2, 4096), st.sampled_from(SEQ_LENS))
def test_single_terms_from_two(blocks: list[tuple[Term, ...]], batch_size: int, seq_len: int) -> None:
    """Two recordings of single plain terms give every other size exactly; where they do not fit they say so."""
    scaled = fit(traces(blocks, POINTS[:2]), SEQ_LENS)
    assume(scaled is not None)
    assert isinstance(scaled, ScaledTrace)
    assert scaled.at(batch_size, seq_len) == traces(blocks, ((batch_size, seq_len),))[0]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(plain)
def test_plain_terms_are_found(term: Term) -> None:
    """Powers are not confused with one another: primes as batch sizes tell every plain term from every other."""
    assert fit(traces([(term,)], POINTS[:2]), SEQ_LENS) is not None


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.tuples(padded), st.tuples(plain, plain)), min_size=1, max_size=4),
    st.lists(st.sampled_from((37, 63, 65, 100, 127, 129, 250, 511)), min_size=1, max_size=3, unique=True),
    st.integers(2, 300),
)
def test_never_a_wrong_trace(blocks: list[tuple[Term, ...]], seq_lens: list[int], batch_size: int) -> None:
    """Sums and paddings, at lengths that are no multiples of anything: right at every length asked for, or None."""
    ordered = sorted(seq_lens)
    points = ((7, ordered[0]), (13, ordered[-1]), (11, ordered[len(ordered) // 2]))
    for count in (2, 3):
        scaled = fit(traces(blocks, points[:count]), seq_lens)
        if scaled is not None:
            for seq_len in seq_lens:
                assert scaled.at(batch_size, seq_len) == traces(blocks, ((batch_size, seq_len),))[0]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(plain, plain, st.integers(2, 4096))
def test_sums_need_three(one: Term, other: Term, batch_size: int) -> None:
    """A class token beside a sequence is a sum of two terms: three recordings find it."""
    assume(one[1:] != other[1:])
    scaled = fit(traces([(one, other)], POINTS), SEQ_LENS)
    assume(scaled is not None)
    assert isinstance(scaled, ScaledTrace)
    assert all(
        scaled.at(batch_size, seq_len) == traces([(one, other)], ((batch_size, seq_len),))[0] for seq_len in SEQ_LENS
    )


def test_class_token() -> None:
    """768 numbers for each of `seq_len + 1` tokens: not from two recordings, but from three."""
    terms = (((3072, 1, (1,)), (3072, 1, ())),)
    assert fit(traces(list(terms), POINTS[:2]), SEQ_LENS) is None
    scaled = fit(traces(list(terms), POINTS), SEQ_LENS)
    assert scaled is not None
    assert scaled.at(100, 320).sizes == (100 * 321 * 3072,)


def test_fixed_shape() -> None:
    """Data without a sequence length scales in the batch size alone."""
    scaled = fit([trace((7 * 12, 40), 7, None), trace((13 * 12, 40), 13, None)], [None])
    assert scaled is not None
    assert scaled.at(5, None) == trace((60, 40), 5, None)


@pytest.mark.parametrize(
    "sizes",
    [
        ((700, 700 + 6 * 50 + 1)),  # affine, but for one byte
        ((7 * 64 * 4, 13 * 512 * 4 + 4)),
        ((2**7, 2**13)),
    ],
)
def test_unfit_is_none(sizes: tuple[int, int]) -> None:
    """What no polynomial gives is not approximated."""
    assert fit([trace((size,), *point) for size, point in zip(sizes, POINTS, strict=False)], SEQ_LENS) is None


def test_ambiguous_is_none() -> None:
    """One length recorded, another asked for: a constant times the length or not cannot be told apart."""
    recorded = [trace((4 * size * 64,), size, 64) for size in (7, 13)]
    assert fit(recorded, [64]) is not None
    assert fit(recorded, [64, 128]) is None


def test_padded_is_ambiguous_where_it_matters() -> None:
    """At multiples of 64 a length padded to 32 is the length itself; asked for beyond, it is not known."""
    recorded = traces([((4, 1, (1,)),)], ((7, 64), (13, 512)))
    assert fit(recorded, [64, 512]) is not None
    assert fit(recorded, [64, 500, 512]) is None


def test_other_structure_is_none() -> None:
    """Recordings whose events differ are not of one family: in order, in names or in number."""
    first, second = traces([((4, 1, ()),), ((8, 1, ()),)], POINTS[:2])
    assert fit([first, second], SEQ_LENS) is not None
    assert fit([first, replace(second, structure=replace(second.structure, order=(0, ~0, 1)))], SEQ_LENS) is None
    assert fit([first, replace(second, structure=replace(second.structure, operators=("x", "")))], SEQ_LENS) is None


def test_unmodelled_is_kept_once() -> None:
    """What any recording left out is said of all sizes, each once."""
    first, second = traces([((4, 1, ()),)], POINTS[:2])
    scaled = fit([replace(first, unmodelled=("a", "b")), replace(second, unmodelled=("b", "c"))], SEQ_LENS)
    assert scaled is not None
    assert scaled.at(9, 64).unmodelled == ("a", "b", "c")


Sizes = Callable[[int, int], tuple[int, ...]]


class Recordings:
    """What a recording process would answer; it remembers what it was asked."""

    def __init__(self, sizes: Sizes, name: Callable[[int, int], str] = lambda b, s: "") -> None:
        self.sizes = sizes
        self.name = name
        self.asked: list[tuple[int, int | None]] = []

    def __call__(self, batch_size: int, seq_len: int | None) -> Future[Trace]:
        self.asked.append((batch_size, seq_len))
        future: Future[Trace] = Future()
        sizes = self.sizes(batch_size, seq_len or 1)
        names = (self.name(batch_size, seq_len or 1),) * len(sizes)
        structure = TraceStructure(tuple(range(len(sizes))), (), names, names, names)
        future.set_result(Trace(batch_size, seq_len, structure, sizes))
        return future


def clean(batch_size: int, seq_len: int) -> tuple[int, ...]:
    """A weight, an activation and attention scores."""
    return (4096, 3072 * batch_size * seq_len, 48 * batch_size * seq_len**2)


class CompiledRecordings(Recordings):
    """What is recorded of a compiled step."""

    def __call__(self, batch_size: int, seq_len: int | None) -> Future[Trace]:
        future: Future[Trace] = Future()
        future.set_result(replace(super().__call__(batch_size, seq_len).result(), compiled=True))
        return future


def split(batch_size: int, seq_len: int) -> tuple[int, ...]:
    """A weight, an activation and, for more than 200 samples, a reduction in two kernels."""
    return (4096, 3072 * batch_size * seq_len, *((4 * batch_size,) if batch_size > 200 else ()))


def test_a_compiled_answer_is_recorded_itself() -> None:
    """A compiled step is fitted to large batches; what is confirmed is recorded, and others scaled from that."""
    recordings = CompiledRecordings(split)
    source = TraceSource(recordings, [32], compiled=True)
    assert source.at(150, 32).sizes == (4096, 3072 * 150 * 32, 4 * 150)  # scaled from 1021 and 2053
    assert source.confirm([150, 151], 32)
    assert not source.confirm([150, 151], 32)
    assert source.at(150, 32).sizes == split(150, 32)
    assert source.at(149, 32).sizes == split(149, 32)  # scaled from the two that were confirmed
    assert recordings.asked == [(1021, 32), (2053, 32), (150, 32), (151, 32)]
    assert source.unscaled == [(150, 32), (151, 32)]


def test_a_compiled_step_may_fit_no_polynomial() -> None:
    """Splits of a reduction go in steps: they are put on a line, and recorded where they count."""

    def sizes(batch_size: int, seq_len: int) -> tuple[int, ...]:
        return (3072 * batch_size * seq_len, 4096 * (batch_size // 16 + 1))

    source = TraceSource(CompiledRecordings(sizes), [128], compiled=True)
    large, small = source.at(400, 128).sizes
    assert large == 3072 * 400 * 128
    assert small == pytest.approx(4096 * 26, rel=0.05)
    assert source.confirm([400], 128)
    assert source.at(400, 128).sizes == sizes(400, 128)


def test_an_eager_step_is_recorded_at_the_largest_answer() -> None:
    """One recording at the most samples and tokens confirms all smaller answers; up to 13 none is needed."""
    recordings = Recordings(clean)
    source = TraceSource(recordings, SEQ_LENS)
    assert not source.confirm([12, 13], 128)
    assert len(recordings.asked) == 2
    assert not source.confirm([64, 65], 128)
    assert recordings.asked[2:] == [(65, 128)]
    assert not source.confirm([64, 65], 128)
    assert not source.confirm([32, 33], 256)  # fewer samples, and hardly more tokens
    assert recordings.asked[2:] == [(65, 128)]
    assert not source.confirm([37], 256)  # more tokens
    assert not source.confirm([66], 64)  # more samples
    assert recordings.asked[3:] == [(37, 256), (66, 64)]
    assert source.unscaled == []


def test_an_eager_step_that_differs_at_the_answer_is_recorded_at_every_size() -> None:
    """A second chunk that begins at 40 samples is one more block: no size is scaled any more, at no length."""

    def chunks(batch_size: int, seq_len: int) -> tuple[int, ...]:
        return (3072 * batch_size * seq_len, 4096 if batch_size < 40 else 8192)

    recordings = Recordings(chunks)
    source = TraceSource(recordings, SEQ_LENS)
    assert source.at(64, 128).sizes != chunks(64, 128)
    assert source.confirm([64, 65], 128)
    assert not source.is_scaled(128)
    assert not source.is_scaled(256)
    assert source.at(64, 128).sizes == chunks(64, 128)
    assert (64, 128) in source.unscaled
    assert not source.confirm([64, 65], 128)


def test_blocks_of_no_bytes_do_not_differ() -> None:
    """A kernel's scratch that is nothing here is a block in the recording of another compute capability."""

    def with_nothing(batch_size: int, seq_len: int) -> tuple[int, ...]:
        return (3072 * batch_size * seq_len, 0) if batch_size < 40 else (3072 * batch_size * seq_len,)

    source = TraceSource(Recordings(with_nothing), SEQ_LENS)
    assert source.at(64, 128).sizes == (3072 * 64 * 128, 0)
    assert not source.confirm([64, 65], 128)
    assert source.is_scaled(128)


def test_recordings_tell_that_a_step_is_compiled() -> None:
    """A factory that compiles is seen by its first recordings, and fitted to large batches where those do not fit."""
    recordings = CompiledRecordings(clean)
    source = TraceSource(recordings, [128])
    assert source.at(64, 128).compiled
    assert recordings.asked == [(7, 128), (13, 128)]
    assert source.confirm([64], 128)

    recordings = CompiledRecordings(clean, name=lambda b, s: "small" if b < 10 else "large")
    source = TraceSource(recordings, [128])
    assert source.at(64, 128).sizes == clean(64, 128)
    assert recordings.asked == [(7, 128), (13, 128), (257, 128), (509, 128)]


def test_two_recordings_do() -> None:
    """A clean model is recorded twice for six lengths and any number of batch sizes."""
    recordings = Recordings(clean)
    source = TraceSource(recordings, SEQ_LENS)
    for seq_len in SEQ_LENS:
        for batch_size in (2, 3, 6, 64, 1000):
            assert source.at(batch_size, seq_len).sizes == clean(batch_size, seq_len)
    assert recordings.asked == [(7, 64), (13, 512)]
    assert source.recordings == 2
    assert source.unscaled == []


def test_batch_of_one_is_recorded() -> None:
    """Dimensions of size one change the events, so a batch of one is recorded itself, once, and said to be."""
    recordings = Recordings(clean, name=lambda b, s: "view" if b == 1 else "copy")
    source = TraceSource(recordings, SEQ_LENS)
    assert source.at(1, 64).structure.operators[0] == "view"
    assert source.at(2, 64).structure.operators[0] == "copy"
    assert source.at(1, 64).structure.operators[0] == "view"
    assert source.unscaled == [(1, 64)]
    assert recordings.asked.count((1, 64)) == 1


def test_batches_of_one_are_scaled_between_lengths() -> None:
    """Of many lengths a batch of one is recorded at the one asked for, the shortest and the longest, if they fit."""
    recordings = Recordings(clean, name=lambda b, s: "view" if b == 1 else "copy")
    source = TraceSource(recordings, SEQ_LENS)
    for seq_len in SEQ_LENS[1:]:
        seen = source.at(1, seq_len)
        assert (seen.structure.operators[0], seen.sizes) == ("view", clean(1, seq_len))
    assert [seq_len for size, seq_len in recordings.asked if size == 1] == [SEQ_LENS[1], SEQ_LENS[0], SEQ_LENS[-1]]
    first = Recordings(clean)
    TraceSource(first, SEQ_LENS).at(1, SEQ_LENS[0])
    assert [seq_len for size, seq_len in first.asked if size == 1] == [SEQ_LENS[0], SEQ_LENS[-1]]
    other = Recordings(lambda b, s: (*clean(b, s), 2**s))
    source = TraceSource(other, SEQ_LENS)
    assert [source.at(1, seq_len).sizes[-1] for seq_len in SEQ_LENS] == [2**seq_len for seq_len in SEQ_LENS]


def test_what_is_scaled_goes_to_other_processes() -> None:
    """A pickled source scales as before, and says that it cannot record."""
    source = TraceSource(Recordings(clean), SEQ_LENS)
    assert source.is_scaled(64)
    there = pickle.loads(pickle.dumps(source))
    assert there.at(50, 256) == source.at(50, 256)
    with pytest.raises(RecordingFailed, match="batch size 1 at length 64 cannot be recorded in this process"):
        there.at(1, 64)


def test_unaligned_lengths_apart() -> None:
    """Lengths that are no multiples of 8 have one more event: they are fitted among themselves."""
    recordings = Recordings(clean, name=lambda b, s: "padded" if s % 8 else "plain")
    source = TraceSource(recordings, (64, 100, 250, 512))
    assert source.at(5, 64).structure.operators[0] == "plain"
    assert source.at(5, 250).structure.operators[0] == "padded"
    assert source.at(5, 100).sizes == clean(5, 100)
    assert sorted(recordings.asked) == [(7, 64), (7, 100), (13, 250), (13, 512)]
    assert source.unscaled == []


def test_no_third_recording_where_events_differ() -> None:
    """What does differ between two recordings differs with a third one as well."""
    recordings = Recordings(clean, name=lambda b, s: str(b))
    source = TraceSource(recordings, [64])
    assert source.two_sizes(64) == (7, 13)
    assert not source.is_scaled(64)
    assert recordings.asked == [(7, 64), (13, 64)]


def test_third_recording_for_sums() -> None:
    """A class token needs a third recording, between the other two."""

    def sizes(batch_size: int, seq_len: int) -> tuple[int, ...]:
        return (3072 * batch_size * (seq_len + 1),)

    recordings = Recordings(sizes)
    source = TraceSource(recordings, SEQ_LENS)
    assert source.at(20, 128).sizes == sizes(20, 128)
    assert recordings.asked == [(7, 64), (13, 512), (11, 320)]
    assert source.unscaled == []


def test_each_length_alone() -> None:
    """Where lengths have nothing in common, each is fitted in the batch size."""

    def sizes(batch_size: int, seq_len: int) -> tuple[int, ...]:
        return (batch_size * {64: 1000, 128: 17, 512: 90}[seq_len],)

    source = TraceSource(Recordings(sizes), (64, 128, 512))
    for seq_len in (64, 128, 512):
        assert source.at(30, seq_len).sizes == sizes(30, seq_len)
    assert source.unscaled == []


def test_each_size_alone() -> None:
    """Where nothing fits, every size is recorded at the size itself, and is counted."""

    def sizes(batch_size: int, seq_len: int) -> tuple[int, ...]:
        return (batch_size**3 * seq_len + 1,)

    recordings = Recordings(sizes)
    source = TraceSource(recordings, (64,))
    for batch_size in (4, 5, 4):
        assert source.at(batch_size, 64).sizes == sizes(batch_size, 64)
    assert source.unscaled == [(4, 64), (5, 64)]
    assert recordings.asked.count((4, 64)) == 1


def test_lengths_may_come_later() -> None:
    """A length that was not announced is answered all the same, and rightly."""
    source = TraceSource(Recordings(clean), (64, 512))
    assert source.at(5, 64).sizes == clean(5, 64)
    assert source.at(5, 200).sizes == clean(5, 200)
    assert source.at(5, 1024).sizes == clean(5, 1024)


def test_source_of_a_fixed_shape() -> None:
    """Data of one shape is scaled in the batch size."""
    recordings = Recordings(lambda b, s: (b * 40, 9))
    source = TraceSource(recordings, [None])
    assert source.at(5, None).sizes == (200, 9)
    assert recordings.asked == [(7, None), (13, None)]


def test_prefetch_asks_without_waiting() -> None:
    """The first recordings are asked for at once, and not again."""
    asked: list[tuple[int, int | None]] = []

    def never(batch_size: int, seq_len: int | None) -> Future[Trace]:
        asked.append((batch_size, seq_len))
        return Future()

    source = TraceSource(never, SEQ_LENS)
    source.prefetch()
    assert asked == [(7, 64), (13, 512)]
    source.prefetch()
    assert len(asked) == 2


def test_recorded_is_never_scaled() -> None:
    """`recorded` is a recording at the size itself, even where a scaled trace would do."""
    recordings = Recordings(clean)
    source = TraceSource(recordings, SEQ_LENS)
    source.at(9, 64)
    source.recorded(9, 64)
    assert recordings.asked[-1] == (9, 64)


def test_failures_pass_through() -> None:
    """A recording that fails fails the question with its own error."""

    def failing(batch_size: int, seq_len: int | None) -> Future[Trace]:
        future: Future[Trace] = Future()
        future.set_exception(RecordingFailed("no"))
        return future

    source = TraceSource(failing, SEQ_LENS)
    for batch_size in (1, 2):
        with pytest.raises(RecordingFailed, match="no"):
            source.at(batch_size, 64)


def test_between_two_numbers_of_gpus() -> None:
    """Shards go with one over the number of GPUs, all else stays; what does neither is not guessed."""
    few, many = trace((640, 64, 0), 2, 8), trace((10, 64, 0), 2, 8)
    between = between_gpus((8, few), (512, many), 64)
    assert between is not None
    assert between.sizes == (80, 64, 0)
    assert between_gpus((8, few), (512, many), 8) == few
    assert between_gpus((8, few), (512, many), 512) == many
    assert between_gpus((8, few), (512, many), 96) is None
    assert between_gpus((8, few), (512, many), 4) is None
    assert between_gpus((8, few), (512, trace((11, 64, 0), 2, 8)), 64) is None
    assert between_gpus((8, few), (512, trace((10, 64, 0), 2, 8, (0, 2, 1))), 64) is None
