"""Records and the file they are exported to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.cache import DamagedRecord, Record, read_export, write_export
from batchfinder.cache.key import canonical_json
from batchfinder.cache.record import decode, encode
from batchfinder.errors import InvalidValue
from batchfinder.results import Measurement, Rate, SearchResult, Shape, StopReason, Throughput, Trial, Verdict

CREATED = datetime(2026, 11, 20, 21, 16, 5, tzinfo=UTC)
FIT = Measurement(Verdict.FITS, 11_000_000_000, 11_200_000_000, 0.25)
OUT = Measurement(Verdict.OUT_OF_MEMORY, message='CUDA out of memory. Tried to allocate 46.00 MiB "here"\nétage 😀')
OUTCOME = SearchResult(
    shape=Shape(128),
    max_batch_size=32,
    stop=StopReason.EXACT,
    measurement=FIT,
    trials=(Trial(32, Shape(128), FIT), Trial(33, Shape(128), OUT)),
    source="simulated",
    unmodelled=("NCCL buffers",),
)


def _sensible(outcome: SearchResult) -> SearchResult:
    """The same as a search has it: one shape, and the largest size that ran the last time it was tried."""
    trials = tuple(dataclasses.replace(trial, shape=outcome.shape) for trial in outcome.trials)
    last = {trial.batch_size: trial.measurement for trial in trials}
    size = max((size for size, seen in last.items() if seen.fits), default=0)
    smallest = last[min(last)] if last else None
    timed = outcome.throughput if size else None
    seen = last.get(size, smallest)
    return dataclasses.replace(outcome, trials=trials, max_batch_size=size, measurement=seen, throughput=timed)


shapes = st.builds(Shape, st.none() | st.integers(1, 1 << 20))
sizes = st.none() | st.integers(0, 1 << 50)
measurements = st.builds(
    Measurement,
    st.sampled_from(Verdict),
    sizes,
    sizes,
    st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    st.text(),
    sizes,
    sizes,
    sizes,
) | st.builds(
    Measurement,
    st.just(Verdict.FITS),
    step_seconds=st.floats(0, 1e9),
    micro_batch_seconds=st.none() | st.floats(0, 1e9),
)
rates = st.builds(Rate, st.just(1), st.floats(1e-9, 1e9), st.floats(0, 1e9))
throughputs = st.builds(
    Throughput,
    batch_size=st.just(1),
    best_batch_size=st.just(1),
    rates=rates.map(lambda rate: (rate,)),
    certain=st.booleans(),
    rounds=st.integers(1, 15),
    error=st.floats(0, 1e9),
)
outcomes = st.builds(
    SearchResult,
    shape=shapes,
    max_batch_size=st.integers(0, 1 << 40),
    stop=st.sampled_from(StopReason),
    measurement=st.none() | measurements,
    trials=st.lists(st.builds(Trial, st.integers(1, 1 << 40), shapes, measurements), max_size=4).map(tuple),
    source=st.sampled_from(["simulated", "measured"]),
    unmodelled=st.lists(st.text(), max_size=3).map(tuple),
    free_bytes=sizes,
    throughput=st.none() | throughputs,
    trained=st.none() | st.tuples(st.integers(1, 1 << 40), sizes, sizes),
).map(_sensible)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(outcome=outcomes)
def test_an_outcome_comes_back_as_it_was(outcome, make_key):
    """Any outcome, written and read, is equal to what it was: every trial, verdict, figure and message of it."""
    record = Record(make_key(seq_len=outcome.shape.seq_len, total_bytes=1 << 50), outcome, CREATED)
    assert decode(encode(record)) == record


def test_no_field_of_an_outcome_is_forgotten():
    """The record writes every field there is; a new one has to be added here, and read where it is missing."""
    names = {
        cls: tuple(item.name for item in dataclasses.fields(cls)) for cls in (SearchResult, Measurement, Trial, Shape)
    }
    assert names == {
        SearchResult: (
            "shape",
            "max_batch_size",
            "stop",
            "measurement",
            "trials",
            "source",
            "unmodelled",
            "free_bytes",
            "throughput",
            "trained",
        ),
        Measurement: (
            *("verdict", "peak_allocated_bytes", "peak_reserved_bytes", "seconds", "message", "needed_bytes"),
            *("resting_bytes", "forward_bytes", "step_seconds", "micro_batch_seconds"),
        ),
        Trial: ("batch_size", "shape", "measurement"),
        Shape: ("seq_len",),
    }


def test_a_record_explains_itself(make_key):
    """The file is plain JSON, one member per line, with the whole key, readable names and the time of writing."""
    text = encode(Record(make_key(), OUTCOME, CREATED)).decode()
    body = json.loads(text)
    assert list(body) == ["schema", "created", "label", "key", "outcome", "checksum"]
    assert body["schema"] == 7
    assert body["created"] == "2026-11-20T21:16:05+00:00"
    assert body["key"]["gpu"] == "Titan X"
    assert body["outcome"]["stop"] == "EXACT"
    assert body["outcome"]["source"] == "simulated"
    assert body["outcome"]["trials"][0] == [32, 128, "FITS", 11_000_000_000, 11_200_000_000, 0.25, "", None, None, None]
    assert text.count("\n") == 8


def _all_damage(data: bytes):
    for length in range(len(data)):
        yield data[:length]
    for position in range(len(data)):
        for bit in range(8):
            yield data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def test_every_bit_flip_and_every_truncation_is_found(make_key):
    """A record with any one bit changed, or cut at any length, is damaged; not one is read as some other outcome."""
    data = encode(Record(make_key(), OUTCOME, CREATED))
    survivors = []
    for damaged in _all_damage(data):
        try:
            survivors.append(decode(damaged))
        except DamagedRecord:
            continue
    assert survivors == []


@settings(derandomize=True, max_examples=300, deadline=None)
@given(data=st.data())
def test_every_changed_byte_is_found(data, make_key):
    """A record with any byte replaced, removed, doubled or added is damaged."""
    good = encode(Record(make_key(), OUTCOME, CREATED))
    at = data.draw(st.integers(0, len(good) - 1))
    removed = data.draw(st.integers(0, 3))
    damaged = good[:at] + data.draw(st.binary(max_size=3)) + good[at + removed :]
    if damaged != good:
        with pytest.raises(DamagedRecord):
            decode(damaged)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text().map(str.encode) | st.integers(500, 200_000).map(lambda n: b"[" * n))
def test_rubbish_is_damage_and_nothing_else(data):
    """Bytes that never were a record raise `DamagedRecord`, not some parser's error."""
    with pytest.raises(DamagedRecord):
        decode(data)


def _forge(make_key, **changes) -> bytes:
    """A record with a right checksum over wrong members: what a bug or an editor with good intentions writes."""
    body = json.loads(encode(Record(make_key(), OUTCOME, CREATED)))
    body.pop("checksum")
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = body
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    body["checksum"] = hashlib.sha256(canonical_json(body).encode()).hexdigest()
    lines = ",\n".join(f'"{name}": {canonical_json(value)}' for name, value in body.items())
    return f"{{\n{lines}\n}}\n".encode()


def test_the_forger_forges_well(make_key):
    """The tests below fail for the reason they name: an unchanged forgery is accepted."""
    assert decode(_forge(make_key)) == Record(make_key(), OUTCOME, CREATED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 1}, "its schema is 1; this version reads 7"),
        ({"schema": True}, "its schema is True; this version reads 7"),
        ({"schema": "2"}, "its schema is '2'; this version reads 7"),
        ({"author": "me"}, "it is JSON, but not a cache record"),
        ({"created": 5}, "its created is 5"),
        ({"created": "yesterday"}, "it cannot be read back: Invalid isoformat string: 'yesterday'"),
        ({"created": "20261120T211605Z"}, "it is not written the way batchfinder writes it"),
        ({"key": []}, "its key is []"),
        ({"key": {"gpu": "K80"}}, "its key has other fields than this version's: gpu"),
        (
            {"key__accumulation": "1"},
            "it cannot be read back: cache key's accumulation: invalid value '1'; expected a whole number.",
        ),
        ({"outcome": None}, "its outcome is None"),
        ({"outcome": {"seq_len": 1}}, "its outcome is {'seq_len': 1}"),
        ({"outcome__max_batch_size": "32"}, "its max_batch_size is '32'"),
        ({"outcome__max_batch_size": True}, "its max_batch_size is True"),
        ({"outcome__max_batch_size": 32.0}, "its max_batch_size is 32.0"),
        ({"outcome__seq_len": False}, "its seq_len is False"),
        ({"outcome__stop": "WHIM"}, "its stop is 'WHIM'"),
        ({"outcome__stop": ["EXACT"]}, "its stop is ['EXACT']"),
        ({"outcome__measurement": [1]}, "its measurement is [1]"),
        ({"outcome__measurement": ["fits", 1, 2, 0.5, "", None, None, None]}, "its verdict is 'fits'"),
        ({"outcome__measurement": ["FITS", 1, 2.5, 0.5, "", None, None, None]}, "its peak_reserved_bytes is 2.5"),
        ({"outcome__measurement": ["FITS", 1, 2, 1, "", None, None, None]}, "its seconds is 1"),
        ({"outcome__measurement": ["FITS", 1, 2, 0.5, None, None, None, None]}, "its message is None"),
        ({"outcome__trials": {}}, "its trials is {}"),
        ({"outcome__trials": [[8, 128]]}, "its trial is [8, 128]"),
        ({"outcome__unmodelled": [3]}, "its unmodelled is 3"),
        ({"outcome__source": None}, "its source is None"),
        (
            {"outcome__source": "cache"},
            "it cannot be read back: source of a result to be cached: invalid value 'cache'; "
            "expected simulated or measured, where it came from.",
        ),
    ],
)
def test_wrong_members_are_named(changes, reason, make_key):
    """A record whose checksum is right but whose members are not is damaged, and the reason names the member."""
    with pytest.raises(DamagedRecord) as caught:
        decode(_forge(make_key, **changes))
    assert (caught.value.reason, str(caught.value)) == (reason, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-100], "it is cut short or not JSON"),
        (lambda data: b"", "it is cut short or not JSON"),
        (lambda data: data.replace(b'"schema"', b'"sch\xe9ma"'), "it is cut short or not JSON"),
        (lambda data: b"[1, 2]", "it is JSON, but not a cache record"),
        (lambda data: data.replace(b'"max_batch_size":32', b'"max_batch_size":33'), "its checksum does not match"),
        (
            lambda data: data.replace(b'"max_batch_size":32', b'"max_batch_size":NaN'),
            "it is cut short or not JSON",
        ),
        (lambda data: data.replace(b",\n", b", \n"), "it is not written the way batchfinder writes it"),
    ],
)
def test_damage_is_described(change, reason, make_key):
    """The reason says what is wrong with the bytes."""
    with pytest.raises(DamagedRecord) as caught:
        decode(change(encode(Record(make_key(), OUTCOME, CREATED))))
    assert caught.value.reason == reason


def test_the_original_source_survives(make_key):
    """A simulated figure is still known to be simulated, and a measured one measured, when it comes from the cache."""
    for source in ("simulated", "measured"):
        outcome = dataclasses.replace(OUTCOME, source=source)
        assert decode(encode(Record(make_key(), outcome, CREATED))).result.source == source


def test_a_cached_answer_is_not_cached_again(make_key):
    """Writing an outcome that says `cache` is refused: the record would forget where its figure came from."""
    with pytest.raises(InvalidValue) as caught:
        encode(Record(make_key(), dataclasses.replace(OUTCOME, source="cache"), CREATED))
    assert str(caught.value) == (
        "source of a result to be cached: invalid value 'cache'; expected simulated or measured, where it came from."
    )


def test_what_json_cannot_hold_is_refused(make_key):
    """An outcome with an infinite time is refused when it is written, not when it is read."""
    outcome = SearchResult(Shape(), 1, StopReason.CAP, Measurement(Verdict.FITS, seconds=float("inf")))
    with pytest.raises(InvalidValue) as caught:
        encode(Record(make_key(), outcome, CREATED))
    said = str(caught.value)
    assert said.startswith(f"result to be cached: invalid value {outcome!r}"[:150])
    assert said.endswith("; expected text, whole numbers of bytes and finite seconds.")


EXPORTED_FIT = Measurement(Verdict.FITS, 11_000, 12_000, 0.25, "étage\n")
EXPORTED = SearchResult(
    Shape(128), 32, StopReason.EXACT, EXPORTED_FIT, (Trial(32, Shape(128), EXPORTED_FIT),), "measured", ("NCCL",), 99
)


def _records(make_key):
    created = datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)
    trials = tuple(dataclasses.replace(trial, shape=Shape(64)) for trial in EXPORTED.trials)
    shorter = dataclasses.replace(EXPORTED, shape=Shape(64), trials=trials)
    exported = {64: shorter, 128: EXPORTED}
    return [Record(make_key(seq_len=length), outcome, created, "bert") for length, outcome in exported.items()]


def test_records_come_back_as_they_were(make_key):
    """With their keys, outcomes, times and labels; also when the file was formatted anew, and when there are none."""
    records = _records(make_key)
    text = write_export(records)
    assert list(read_export(text)) == records
    assert list(read_export(json.dumps(json.loads(text), indent=4))) == records
    assert list(read_export(write_export([]))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-30], "it is cut short or not JSON"),
        (lambda text: "[]", "it is JSON, but not an exported cache"),
        (lambda text: '{"records": 3}', "it is JSON, but not an exported cache"),
        (lambda text: text.replace('cache": 1', 'cache": 2'), "its format is 2; this version reads 1"),
        (lambda text: text.replace("Titan X", "Titan Y", 1), "record 1 of 2: its checksum does not match"),
        (lambda text: text.replace("11000", "11001", 1), "record 1 of 2: its checksum does not match"),
        (lambda text: '{"batchfinder_cache": 1, "records": [3]}', "record 1 of 1: it is JSON, but not a cache record"),
    ],
)  # fmt: skip
def test_damage_is_named(change, said, make_key):
    """A file that is not what was written is refused, with the record that is damaged."""
    changed = change(write_export(_records(make_key)))
    with pytest.raises(DamagedRecord) as caught:
        list(read_export(changed))
    assert str(caught.value) == said


FITS = ["FITS", 11_000, 12_000, 0.25, "", None, None, None]
FULL = ["OUT_OF_MEMORY", None, None, 0.25, "", None, None, None]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome__max_batch_size": -5}, "its max_batch_size is -5, where 0 to 1099511627776 make sense"),
        ({"outcome__max_batch_size": 10**9}, "its own trials contradict its result of 1000000000"),
        ({"outcome__max_batch_size": 33}, "its own trials contradict its result of 33"),
        ({"outcome__max_batch_size": 0}, "its measurement fits, and its result is 0"),
        (
            {"outcome__max_batch_size": 64, "key__max_batch_size": 48},
            "its max_batch_size is 64, where 0 to 48 make sense",
        ),
        ({"outcome__measurement": FULL}, "its measurement does not fit, and its result is 32"),
        ({"outcome__measurement": None}, None),  # lowered from 33
        ({"outcome__measurement": None, "outcome__max_batch_size": 34}, "its own trials contradict its result of 34"),
        ({"outcome__trials": [[40, 128, *FULL]]}, None),
        ({"outcome__trials": [[20, 128, *FULL]]}, "its own trials contradict its result of 32"),
        ({"outcome__trials": [[20, 128, *FITS]]}, "its own trials contradict its result of 32"),
        (
            {"outcome__trials": [[-1, 128, *FITS]]},
            "its batch_size in trial 1 is -1, where 1 to 1099511627776 make sense",
        ),
        ({"outcome__trials": [[32, 64, *FITS]]}, "its sequence length is not that of its key"),
        ({"outcome__seq_len": 0, "key__seq_len": 0}, "its seq_len is 0, where 1 to 1099511627776 make sense"),
        ({"key__seq_len": 64}, "its sequence length is not that of its key"),
        ({"key__total_bytes": -1}, f"its total_bytes is -1, where 0 to {1 << 60} make sense"),
        ({"key__total_bytes": 10_000_000_000}, "a size that fits took more than the device has"),
        ({"key__accumulation": 0}, "its accumulation is 0, where 1 to 1099511627776 make sense"),
        ({"outcome__free_bytes": 1 << 61}, f"its free_bytes is {1 << 61}, where 0 to {1 << 60} make sense"),
        (
            {"outcome__measurement": ["FITS", -1, 2, 0.5, "", None, None, None]},
            "it has a number of bytes that no device has",
        ),
        ({"outcome__measurement": ["FITS", 1, 2, -0.5, "", None, None, None]}, "a trial took less than no time"),
        ({"created": "2026-11-20T21:16:05"}, "its time has no time zone"),
    ],
)
def test_what_makes_no_sense_is_no_record(changes, reason, make_key):
    """Whoever wrote it with a right checksum: figures out of bounds, and results that their own trials contradict."""
    forged = _forge(make_key, **changes)
    if reason is None:
        assert decode(forged).result.max_batch_size == 32
        return
    with pytest.raises(DamagedRecord) as caught:
        decode(forged)
    assert caught.value.reason == reason


def test_a_number_of_thousands_of_digits(make_key):
    """It is damage whether or not Python reads so many digits, and the reason does not repeat them."""
    for digits in (4_000, 5_000):
        with pytest.raises(DamagedRecord) as caught:
            decode(_forge(make_key).replace(b'"max_batch_size":32', b'"max_batch_size":' + b"9" * digits))
        assert len(caught.value.reason) < 600
    with pytest.raises(DamagedRecord) as caught:
        decode(_forge(make_key, outcome__max_batch_size=10**4000))
    assert len(caught.value.reason) < 600


def test_values_nested_deeply(make_key):
    """In an exported file they are damage, and no end of Python's stack."""
    text = write_export(_records(make_key)).replace('"extra":{}', '"extra":' + '{"a":' * 900 + "1" + "}" * 900, 1)
    with pytest.raises(DamagedRecord, match="record 1 of 2: "):
        list(read_export(text))
    with pytest.raises(DamagedRecord, match="it is cut short or not JSON"):
        list(read_export("[" * 100_000))
