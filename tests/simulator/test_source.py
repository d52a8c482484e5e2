"""Tests of batchfinder/simulator/scaling.py, with recordings made of formulas."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from batchfinder.errors import RecordingFailed
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import Structure, Trace

SEQ_LENS = (64, 128, 256, 320, 384, 512)
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
        structure = Structure(tuple(range(len(sizes))), (), names, names, names)
        future.set_result(Trace(batch_size, seq_len, structure, sizes))
        return future


def clean(batch_size: int, seq_len: int) -> tuple[int, ...]:
    """A weight, an activation and attention scores."""
    return (4096, 3072 * batch_size * seq_len, 48 * batch_size * seq_len**2)


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
    """Dimensions of size one change the events, so a batch of one is always recorded itself, once, and said to be."""
    recordings = Recordings(clean, name=lambda b, s: "view" if b == 1 else "copy")
    source = TraceSource(recordings, SEQ_LENS)
    assert source.at(1, 64).structure.operators[0] == "view"
    assert source.at(2, 64).structure.operators[0] == "copy"
    assert source.at(1, 64).structure.operators[0] == "view"
    assert source.unscaled == [(1, 64)]
    assert recordings.asked.count((1, 64)) == 1


def test_unaligned_lengths_apart() -> None:
    """Lengths that are no multiples of 8 have one more event: they are fitted among themselves."""
    recordings = Recordings(clean, name=lambda b, s: "padded" if s % 8 else "plain")
    source = TraceSource(recordings, (64, 100, 250, 512))
    assert source.at(5, 64).structure.operators[0] == "plain"
    assert source.at(5, 250).structure.operators[0] == "padded"
    assert source.at(5, 100).sizes == clean(5, 100)
    assert sorted(recordings.asked) == [(7, 64), (7, 100), (13, 250), (13, 512)]
    assert source.unscaled == []


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


def test_fixed_shape() -> None:
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
