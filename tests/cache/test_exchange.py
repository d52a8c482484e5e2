"""Records on their way from one cache to another."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from batchfinder.cache import DamagedRecord, Record, read_export, write_export
from batchfinder.results import Measurement, SearchResult, Shape, Stop, Trial, Verdict

FIT = Measurement(Verdict.FITS, 11_000, 12_000, 0.25, "étage\n")
OUTCOME = SearchResult(Shape(128), 32, Stop.EXACT, FIT, (Trial(32, Shape(128), FIT),), "measured", ("NCCL",), 99)


def _records(make_key):
    created = datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)
    return [Record(make_key(seq_len=length), OUTCOME, created, "bert") for length in (64, 128)]


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
