"""A record: a key, its result and a checksum over both, as JSON; and the file that records are exported to."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TypeVar

from batchfinder.cache.key import CacheKey, Json, canonical_json
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict

SCHEMA = 4
"""Raised, too, when what counts as fitting or the meaning of a key changes: 4 has the shorter fingerprint."""

T = TypeVar("T")


class DamagedRecord(BatchFinderError):
    """A record's bytes are not what was written. `Store` turns it into a warning."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Record:
    """The result kept for one key.

    Attributes:
        key: everything that the answer depends on.
        result: as the search returned it.
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
    if record.result.source == "cache":
        raise InvalidValue("source of a result to be cached", "cache", "simulated or measured, where it came from")
    try:
        body: dict[str, Json] = {
            "schema": SCHEMA,
            "created": record.created.isoformat(),
            "label": record.label,
            "key": record.key.as_dict(),
            "outcome": _result_as_json(record.result),
        }
        body["checksum"] = _checksum(body)
        return write_members(body)
    except (TypeError, ValueError) as error:
        raise InvalidValue(
            "result to be cached", record.result, "text, whole numbers of bytes and finite seconds"
        ) from error


def write_members(body: Mapping[str, Json]) -> bytes:
    """Write a record's members as a file has them, one per line."""
    lines = ",\n".join(f'"{name}": {canonical_json(value)}' for name, value in body.items())
    return f"{{\n{lines}\n}}\n".encode("ascii")


def decode(data: bytes) -> Record:
    """Read a record back.

    Raises:
        DamagedRecord: the bytes differ in any way from what `encode` wrote.
    """
    try:
        body = json.loads(data.decode("ascii"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedRecord("it is cut short or not JSON") from error
    if type(body) is not dict or "schema" not in body:
        raise DamagedRecord("it is JSON, but not a cache record")
    if type(body["schema"]) is not int or body["schema"] != SCHEMA:
        raise DamagedRecord(f"its schema is {body['schema']!r}; this version reads {SCHEMA}")
    if set(body) != {"schema", "created", "label", "key", "outcome", "checksum"}:
        raise DamagedRecord("it is JSON, but not a cache record")
    checksum = body.pop("checksum")
    try:
        if checksum != _checksum(body):
            raise DamagedRecord("its checksum does not match")
        created = datetime.fromisoformat(_of(str, body["created"], "created"))
        label = _of(str, body["label"], "label")
        record = Record(_key_from_json(body["key"]), _result_from_json(body["outcome"]), created, label)
        # The checksum covers the values; this covers the bytes between them as well.
        if encode(record) != data:
            raise DamagedRecord("it is not written the way batchfinder writes it")
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedRecord(f"it cannot be read back: {error}") from error
    return record


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _checksum(body: dict[str, Json]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def _result_as_json(result: SearchResult) -> dict[str, Json]:
    return {
        "seq_len": _index(result.shape.seq_len),
        "max_batch_size": operator.index(result.max_batch_size),
        "stop": result.stop.name,
        "measurement": None if result.measurement is None else _measurement_as_json(result.measurement),
        # [batch_size, seq_len, verdict, peak_allocated_bytes, peak_reserved_bytes, seconds, message, needed_bytes,
        #  resting_bytes, forward_bytes]
        "trials": [
            [operator.index(trial.batch_size), _index(trial.shape.seq_len), *_measurement_as_json(trial.measurement)]
            for trial in result.trials
        ],
        "source": result.source,
        "unmodelled": list(result.unmodelled),
        "free_bytes": _index(result.free_bytes),
    }


def _measurement_as_json(seen: Measurement) -> list[Json]:
    peaks = _index(seen.peak_allocated_bytes), _index(seen.peak_reserved_bytes)
    more = _index(seen.needed_bytes), _index(seen.resting_bytes), _index(seen.forward_bytes)
    return [seen.verdict.name, *peaks, float(seen.seconds), seen.message, *more]


def _index(value: int | None) -> int | None:
    return None if value is None else operator.index(value)  # NumPy's whole numbers become Python's


def _key_from_json(value: object) -> CacheKey:
    body = _of(dict, value, "key")
    if set(body) != {item.name for item in fields(CacheKey)}:
        raise DamagedRecord(f"its key has other fields than this version's: {', '.join(sorted(body))}")
    return CacheKey(**body)


def _result_from_json(value: object) -> SearchResult:
    names = {"seq_len", "max_batch_size", "stop", "measurement", "trials", "source", "unmodelled", "free_bytes"}
    body = _of(dict, value, "outcome")
    if set(body) != names:
        raise DamagedRecord(f"its outcome is {value!r}")
    return SearchResult(
        shape=Shape(_optional_int(body["seq_len"], "seq_len")),
        max_batch_size=_of(int, body["max_batch_size"], "max_batch_size"),
        stop=_member(StopReason, body["stop"], "stop"),
        measurement=None if body["measurement"] is None else _measurement_from_json(body["measurement"]),
        trials=tuple(_trial_from_json(trial) for trial in _of(list, body["trials"], "trials")),
        source=_of(str, body["source"], "source"),
        unmodelled=tuple(_of(str, text, "unmodelled") for text in _of(list, body["unmodelled"], "unmodelled")),
        free_bytes=_optional_int(body["free_bytes"], "free_bytes"),
    )


def _trial_from_json(value: object) -> Trial:
    row = _of(list, value, "trial")
    if len(row) != 10:
        raise DamagedRecord(f"its trial is {value!r}")
    shape = Shape(_optional_int(row[1], "seq_len"))
    return Trial(_of(int, row[0], "batch_size"), shape, _measurement_from_json(row[2:]))


def _measurement_from_json(value: object) -> Measurement:
    row = _of(list, value, "measurement")
    if len(row) != 8:
        raise DamagedRecord(f"its measurement is {value!r}")
    return Measurement(
        verdict=_member(Verdict, row[0], "verdict"),
        peak_allocated_bytes=_optional_int(row[1], "peak_allocated_bytes"),
        peak_reserved_bytes=_optional_int(row[2], "peak_reserved_bytes"),
        seconds=_of(float, row[3], "seconds"),
        message=_of(str, row[4], "message"),
        needed_bytes=_optional_int(row[5], "needed_bytes"),
        resting_bytes=_optional_int(row[6], "resting_bytes"),
        forward_bytes=_optional_int(row[7], "forward_bytes"),
    )


def _of(kind: type[T], value: object, what: str) -> T:
    """Take a value that must be of exactly this type: True is no number here."""
    if type(value) is not kind:
        raise DamagedRecord(f"its {what} is {value!r}")
    return value


def _optional_int(value: object, what: str) -> int | None:
    return None if value is None else _of(int, value, what)


def _member(choices: type[T], value: object, what: str) -> T:
    member = getattr(choices, "__members__", {}).get(value) if type(value) is str else None
    if not isinstance(member, choices):
        raise DamagedRecord(f"its {what} is {value!r}")
    return member


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
        raise DamagedRecord(f"its format is {body.get('batchfinder_cache')!r}; this version reads {EXPORT_FORMAT}")
    for number, members in enumerate(body["records"], 1):
        try:
            if not isinstance(members, dict):
                raise DamagedRecord("it is JSON, but not a cache record")
            yield decode(write_members(members))
        except (DamagedRecord, TypeError, ValueError) as damage:
            raise DamagedRecord(f"record {number} of {len(body['records'])}: {damage}") from damage
