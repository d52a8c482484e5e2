"""Records on their way from one cache to another: one JSON file, each record with its own checksum."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from batchfinder.cache.record import DamagedRecord, Record, decode, encode, write_members

FORMAT = 1


def write_export(records: Iterable[Record]) -> str:
    """Write records as one JSON text, `{"batchfinder_cache": 1, "records": [...]}`.

    Args:
        records: in the order in which they should stand.
    """
    texts = [encode(record).decode("ascii").rstrip("\n") for record in records]
    return f'{{\n"batchfinder_cache": {FORMAT},\n"records": [\n' + ",\n".join(texts) + "\n]\n}\n"


def read_export(text: str) -> Iterator[Record]:
    """Read records back, one at a time; the file may have been formatted anew, its figures must be as they were.

    Args:
        text: what `write_export` wrote.

    Raises:
        DamagedRecord: it is no such file, or one of its records is not what was written.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedRecord("it is cut short or not JSON") from error
    if not isinstance(body, dict) or not isinstance(body.get("records"), list):
        raise DamagedRecord("it is JSON, but not an exported cache")
    if body.get("batchfinder_cache") != FORMAT:
        raise DamagedRecord(f"its format is {body.get('batchfinder_cache')!r}; this version reads {FORMAT}")
    for number, members in enumerate(body["records"], 1):
        try:
            if not isinstance(members, dict):
                raise DamagedRecord("it is JSON, but not a cache record")
            yield decode(write_members(members))
        except (DamagedRecord, TypeError, ValueError) as damage:
            raise DamagedRecord(f"record {number} of {len(body['records'])}: {damage}") from damage
