"""A record: a key, its result and a checksum over both, as JSON; and the file that records are exported to."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from types import NoneType
from typing import Any

from batchfinder.cache.key import CacheKey, Json, canonical_json
from batchfinder.errors import BatchFinderError, InvalidValue, shortened, shown
from batchfinder.results import Measurement, Rate, SearchResult, Shape, StopReason, Throughput, Trial, Verdict

SCHEMA = 7
"""Raised, too, when what counts as fitting or the meaning of a key changes: 7 has the oldest of equal free blocks."""


MAX_BATCH_SIZE = 1 << 40
"""A larger one makes no sense, nor does a longer sequence: no device has a byte for each sample."""
MAX_BYTES = 1 << 60
MAX_RECORD_BYTES = 16 << 20
"""Many times the largest record: what is larger was not written by a store."""


class DamagedRecord(BatchFinderError):
    """A record's bytes are not what was written. `Store` turns it into a warning."""

    def __init__(self, reason: str) -> None:
        self.reason = shortened(reason)
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True)
class Record:
    """The result kept for one key.

    Attributes:
        created: when it was written, with a time zone.
        label: the model's name, for lists; the key has its fingerprint. Empty where none was given.
    """

    key: CacheKey
    result: SearchResult
    created: datetime
    label: str = ""


def encode(record: Record) -> bytes:
    """Write a record: one member per line, so that a person can read it too.

    Raises:
        InvalidValue: the result came from a cache itself, or holds a value that JSON does not have.
    """
    result = record.result
    if result.source == "cache":
        raise InvalidValue("source of a result to be cached", "cache", "simulated or measured, where it came from")
    try:
        body: dict[str, Json] = {
            "schema": SCHEMA,
            "created": record.created.isoformat(),
            "label": record.label,
            "key": record.key.as_dict(),
            "outcome": result_as_json(result),
        }
        body["checksum"] = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        return write_members(body)
    except (TypeError, ValueError) as error:
        raise InvalidValue("result to be cached", result, "text, whole numbers of bytes and finite seconds") from error


def result_as_json(result: SearchResult) -> dict[str, Json]:
    """A search's result as a record has it; what few records have is left out of the others."""
    trained = result.trained
    return {
        "seq_len": _index(result.shape.seq_len),
        "max_batch_size": operator.index(result.max_batch_size),
        "stop": result.stop.name,
        "measurement": None if result.measurement is None else measurement_as_json(result.measurement),
        "trials": [
            [operator.index(trial.batch_size), _index(trial.shape.seq_len), *measurement_as_json(trial.measurement)]
            for trial in result.trials
        ],
        "source": result.source,
        "unmodelled": list(result.unmodelled),
        "free_bytes": _index(result.free_bytes),
        **({} if result.throughput is None else {"throughput": throughput_as_json(result.throughput)}),
        **({} if trained is None else {"trained": [_index(value) for value in trained]}),
    }


def throughput_as_json(found: Throughput) -> dict[str, Json]:
    """The smallest size at full speed as a record has it; a rate is [batch_size, samples_per_second, spread]."""
    return {
        "batch_size": operator.index(found.batch_size),
        "best_batch_size": operator.index(found.best_batch_size),
        "rates": [[operator.index(rate.batch_size), rate.samples_per_second, rate.spread] for rate in found.rates],
        "certain": found.certain,
        "rounds": found.rounds,
        "error": found.error,
    }


def measurement_as_json(seen: Measurement) -> list[Json]:
    """[verdict, peak_allocated_bytes, peak_reserved_bytes, seconds, message, needed_bytes, resting_bytes,
    forward_bytes], and where steps were timed step_seconds and micro_batch_seconds; in a trial the batch size and the
    sequence length stand before them.
    """
    peaks = _index(seen.peak_allocated_bytes), _index(seen.peak_reserved_bytes)
    more = _index(seen.needed_bytes), _index(seen.resting_bytes), _index(seen.forward_bytes)
    timed = [] if seen.step_seconds is None else [seen.step_seconds, seen.micro_batch_seconds]
    return [seen.verdict.name, *peaks, float(seen.seconds), seen.message, *more, *timed]


def _index(value: int | None) -> int | None:
    return None if value is None else operator.index(value)  # NumPy's whole numbers become Python's


def write_members(body: Mapping[str, Json]) -> bytes:
    """Write a record's members as a file has them, one per line."""
    lines = ",\n".join(f'"{name}": {canonical_json(value)}' for name, value in body.items())
    return f"{{\n{lines}\n}}\n".encode("ascii")


def decode(data: bytes) -> Record:
    """Read a record back.

    Raises:
        DamagedRecord: the bytes differ in any way from what `encode` wrote.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    if len(data) > MAX_RECORD_BYTES:
        raise DamagedRecord(f"it is larger than {MAX_RECORD_BYTES} bytes")
    try:
        body = json.loads(data.decode("ascii"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedRecord("it is cut short or not JSON") from error
    if type(body) is not dict or "schema" not in body:
        raise DamagedRecord("it is JSON, but not a cache record")
    if type(body["schema"]) is not int or body["schema"] != SCHEMA:
        raise DamagedRecord(f"its schema is {shown(body['schema'])}; this version reads {SCHEMA}")
    if set(body) != {"schema", "created", "label", "key", "outcome", "checksum"}:
        raise DamagedRecord("it is JSON, but not a cache record")
    checksum = body.pop("checksum")
    try:
        if checksum != hashlib.sha256(canonical_json(body).encode()).hexdigest():
            raise DamagedRecord("its checksum does not match")
        created = datetime.fromisoformat(_of(body["created"], "created", str))
        label, key = _of(body["label"], "label", str), _of(body["key"], "key", dict)
        if set(key) != {item.name for item in fields(CacheKey)}:
            raise DamagedRecord(f"its key has other fields than this version's: {', '.join(sorted(key))}")
        record = Record(CacheKey(**key), result_from_json(body["outcome"]), created, label)
        # The checksum covers the values; this covers the bytes between them as well.
        if encode(record) != data:
            raise DamagedRecord("it is not written the way batchfinder writes it")
        _check_sense(record)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedRecord(f"it cannot be read back: {error}") from error
    return record


def _check_sense(record: Record) -> None:
    """Refuse what no search finds, whoever wrote it with a right checksum.

    Raises:
        DamagedRecord: a figure is out of bounds, or the result contradicts its key or its own trials.
    """
    key, result = record.key, record.result
    most_samples = MAX_BATCH_SIZE if key.max_batch_size is None else key.max_batch_size
    numbers = {
        "max_batch_size": (result.max_batch_size, 0, most_samples),
        "seq_len": (result.shape.seq_len, 1, MAX_BATCH_SIZE),
        "free_bytes": (result.free_bytes, 0, MAX_BYTES),
        **{name: (getattr(key, name), 0, MAX_BYTES) for name in ("total_bytes", "usable_bytes", "headroom_bytes")},
        **{name: (getattr(key, name), 1, MAX_BATCH_SIZE) for name in ("accumulation", "floor", "multiple_of")},
    }
    if result.trained is not None:
        bounds = ((1, MAX_BATCH_SIZE), (0, MAX_BYTES), (0, MAX_BYTES))
        names = ("batch size", "peak allocated", "peak reserved")
        for name, value, (least, most) in zip(names, result.trained, bounds, strict=True):
            numbers[f"{name} in training"] = (value, least, most)
    for number, trial in enumerate(result.trials, 1):
        numbers[f"batch_size in trial {number}"] = (trial.batch_size, 1, MAX_BATCH_SIZE)
    for name, (value, least, most) in numbers.items():
        if value is not None and not least <= value <= most:
            raise DamagedRecord(f"its {name} is {shown(value)}, where {least} to {most} make sense")
    for seen in (result.measurement, *(trial.measurement for trial in result.trials)):
        if seen is None:
            continue
        sizes = (seen.peak_allocated_bytes, seen.peak_reserved_bytes, seen.needed_bytes, seen.resting_bytes)
        if any(size is not None and not 0 <= size <= MAX_BYTES for size in (*sizes, seen.forward_bytes)):
            raise DamagedRecord("it has a number of bytes that no device has")
        if seen.fits and key.total_bytes and (seen.peak_reserved_bytes or 0) > key.total_bytes:
            raise DamagedRecord("a size that fits took more than the device has")
        if seen.seconds < 0:
            raise DamagedRecord("a trial took less than no time")
    if {result.shape, *(trial.shape for trial in result.trials)} != {Shape(key.seq_len)}:
        raise DamagedRecord("its sequence length is not that of its key")
    if record.created.tzinfo is None:
        raise DamagedRecord("its time has no time zone")
    size, seen = result.max_batch_size, result.measurement
    if seen is not None and seen.fits != (size > 0):
        raise DamagedRecord(f"its measurement {'fits' if seen.fits else 'does not fit'}, and its result is {size}")
    last = {trial.batch_size: trial.fits for trial in result.trials}
    ran, failed = ([tried for tried, fits in last.items() if fits is wanted] for wanted in (True, False))
    if result.throughput is not None and result.throughput.batch_size > size:
        raise DamagedRecord(f"its size at full speed is above its result of {size}")
    contradicted = False
    if size and seen is None:  # it was lowered when training ran out of memory
        contradicted = max(failed, default=0) <= size
    elif size in last:
        contradicted = not last[size]
    elif size:
        contradicted = min(failed, default=size + 1) <= size or max(ran, default=size) < size
    if contradicted:
        raise DamagedRecord(f"its own trials contradict its result of {size}")


def result_from_json(value: object) -> SearchResult:
    """What `result_as_json` was given.

    Raises:
        DamagedRecord: it is something else.
    """
    names = {"seq_len", "max_batch_size", "stop", "measurement", "trials", "source", "unmodelled", "free_bytes"}
    body = _of(value, "outcome", dict)
    trained = _of(body.get("trained"), "trained", list, NoneType)
    if body.keys() - {"throughput", "trained"} != names or (trained is not None and len(trained) != 3):
        raise DamagedRecord(f"its outcome is {shown(value)}")
    trials = []
    for trial in _of(body["trials"], "trials", list):
        row = _of(trial, "trial", list)
        if len(row) not in (10, 12):
            raise DamagedRecord(f"its trial is {shown(trial)}")
        shape = Shape(_of(row[1], "seq_len", int, NoneType))
        trials.append(Trial(_of(row[0], "batch_size", int), shape, measurement_from_json(row[2:])))
    return SearchResult(
        shape=Shape(_of(body["seq_len"], "seq_len", int, NoneType)),
        max_batch_size=_of(body["max_batch_size"], "max_batch_size", int),
        stop=_of(body["stop"], "stop", StopReason),
        measurement=None if body["measurement"] is None else measurement_from_json(body["measurement"]),
        trials=tuple(trials),
        source=_of(body["source"], "source", str),
        unmodelled=tuple(_of(text, "unmodelled", str) for text in _of(body["unmodelled"], "unmodelled", list)),
        free_bytes=_of(body["free_bytes"], "free_bytes", int, NoneType),
        throughput=_throughput_from_json(body["throughput"]) if "throughput" in body else None,
        trained=None
        if trained is None
        else (
            _of(trained[0], "trained", int),
            _of(trained[1], "trained", int, NoneType),
            _of(trained[2], "trained", int, NoneType),
        ),
    )


def _throughput_from_json(value: object) -> Throughput:
    body = _of(value, "throughput", dict)
    rates = [_of(row, "rate", list) for row in _of(body.get("rates"), "rates", list)]
    if set(body) != {field.name for field in fields(Throughput)} or any(len(row) != 3 for row in rates):
        raise DamagedRecord(f"its throughput is {shown(value)}")
    found = Throughput(
        batch_size=_of(body["batch_size"], "batch_size", int),
        best_batch_size=_of(body["best_batch_size"], "best_batch_size", int),
        rates=tuple(
            Rate(_of(size, "batch_size", int), _of(rate, "rate", float), _of(spread, "spread", float))
            for size, rate, spread in rates
        ),
        certain=_of(body["certain"], "certain", bool),
        rounds=_of(body["rounds"], "rounds", int),
        error=_of(body["error"], "error", float),
    )
    if not {found.batch_size, found.best_batch_size} <= {rate.batch_size for rate in found.rates}:
        raise DamagedRecord("its size at full speed was not timed")
    if min(min(rate.batch_size, rate.samples_per_second) for rate in found.rates) <= 0:
        raise DamagedRecord("a size has no speed")
    return found


def measurement_from_json(value: object) -> Measurement:
    """What `measurement_as_json` was given.

    Raises:
        DamagedRecord: it is something else.
    """
    row = _of(value, "measurement", list)
    if len(row) not in (8, 10):
        raise DamagedRecord(f"its measurement is {shown(value)}")
    return Measurement(
        verdict=_of(row[0], "verdict", Verdict),
        peak_allocated_bytes=_of(row[1], "peak_allocated_bytes", int, NoneType),
        peak_reserved_bytes=_of(row[2], "peak_reserved_bytes", int, NoneType),
        seconds=_of(row[3], "seconds", float),
        message=_of(row[4], "message", str),
        needed_bytes=_of(row[5], "needed_bytes", int, NoneType),
        resting_bytes=_of(row[6], "resting_bytes", int, NoneType),
        forward_bytes=_of(row[7], "forward_bytes", int, NoneType),
        step_seconds=_of(row[8], "step_seconds", float) if len(row) > 8 else None,
        micro_batch_seconds=_of(row[9], "micro_batch_seconds", float, NoneType) if len(row) > 8 else None,
    )


def _of(value: Any, what: str, *kinds: type) -> Any:
    """A value that must be of exactly one of these types: True is no number here. Of an enumeration, by its name."""
    if issubclass(kinds[0], Enum):
        if type(value) is str and value in kinds[0].__members__:
            return kinds[0][value]
    elif type(value) in kinds:
        return value
    raise DamagedRecord(f"its {what} is {shown(value)}")


EXPORT_FORMAT = 1


def write_export(records: Iterable[Record]) -> str:
    """Write records as one JSON text, `{"batchfinder_cache": 1, "records": [...]}`."""
    texts = [encode(record).decode("ascii").rstrip("\n") for record in records]
    return f'{{\n"batchfinder_cache": {EXPORT_FORMAT},\n"records": [\n' + ",\n".join(texts) + "\n]\n}\n"


def read_export(text: str) -> Iterator[Record]:
    """Read records back, one at a time; the file may have been formatted anew, its figures must be as they were.

    Raises:
        DamagedRecord: it is no such file, or one of its records is not what was written.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedRecord("it is cut short or not JSON") from error
    if not isinstance(body, dict) or not isinstance(body.get("records"), list):
        raise DamagedRecord("it is JSON, but not an exported cache")
    if body.get("batchfinder_cache") != EXPORT_FORMAT:
        raise DamagedRecord(f"its format is {shown(body.get('batchfinder_cache'))}; this version reads {EXPORT_FORMAT}")
    for number, members in enumerate(body["records"], 1):
        try:
            if not isinstance(members, dict):
                raise DamagedRecord("it is JSON, but not a cache record")
            yield decode(write_members(members))
        except (DamagedRecord, TypeError, ValueError, RecursionError) as damage:
            raise DamagedRecord(f"record {number} of {len(body['records'])}: {damage}") from damage
