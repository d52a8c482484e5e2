"""Tests of batchfinder/simulator/scaling.py: what is fitted is right, and what cannot be known is not guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchfinder.simulator.scaling import ScaledTrace, fit
from batchfinder.simulator.trace import Structure, Trace

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
    return Trace(batch_size, seq_len, Structure(order or tuple(range(len(sizes))), (), blank, blank, blank), sizes)


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
