"""A table from whatever found it, and in the forms that others read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from batchfinder import (
    FunctionProbe,
    SearchResult,
    Shape,
    TunedBatchSize,
    TunedBatchSizes,
    find_max_batch_size,
    table_of,
)
from batchfinder.accumulation import plan_accumulation
from batchfinder.data.size_table import checked, from_json, to_json, to_lhotse
from batchfinder.errors import InvalidValue
from batchfinder.measure.tuner import TuningResult

TABLE = {128: 39, 256: 19, 512: 9}


def _outcome(seq_len: int | None) -> SearchResult:
    """Of a step that takes 5 kB for each token of each sample, of 25 MB."""
    probe = FunctionProbe(
        lambda batch_size, shape: batch_size * (shape.seq_len or 1) * 5_000, capacity_bytes=25_000_000
    )
    return find_max_batch_size(probe, Shape(seq_len))


OUTCOMES = {seq_len: _outcome(seq_len) for seq_len in (512, 128, 256)}


def _tuned(outcome: SearchResult) -> TunedBatchSize:
    plan = plan_accumulation(8, outcome.max_batch_size)
    return TunedBatchSize(TuningResult(outcome, plan, None, 0.0, 25_000_000, 0), "cpu")


@pytest.mark.parametrize(
    "found",
    [
        {512: 9, 128: 39, 256: 19},
        {np.int64(512): np.int32(9), 128: 39, 256: 19, 1024: 0},
        OUTCOMES,
        list(OUTCOMES.values()),
        TunedBatchSizes({seq_len: _tuned(outcome) for seq_len, outcome in OUTCOMES.items()}),
        SimpleNamespace(results={"fit": OUTCOMES, "validate": {64: _outcome(64)}}),
    ],
)
def test_from_whatever_found_it(found):
    """Sizes, outcomes, what `tune_batch_size` returns and what the callback keeps: the largest sizes, by length."""
    table = table_of(found)
    assert table == TABLE
    assert list(table) == sorted(TABLE)
    assert {type(number) for item in table.items() for number in item} == {int}


def test_another_stage():
    """Of a callback, any stage that it has found sizes for; others are refused by name."""
    finder = SimpleNamespace(results={"fit": OUTCOMES, "validate": {64: _outcome(64)}})
    assert table_of(finder, "validate") == {64: 78}
    with pytest.raises(
        InvalidValue,
        match=r"stage: invalid value .test.; expected one that BatchFinder has found sizes for \(fit, validate\)",
    ):
        table_of(finder, "test")
    with pytest.raises(InvalidValue, match=r"\(none yet: it finds sizes when training begins\)"):
        table_of(SimpleNamespace(results={}))


def test_there_and_back():
    """JSON is read as it was written."""
    assert to_json(TABLE) == '{"128": 39, "256": 19, "512": 9}'
    assert from_json(to_json(TABLE)) == TABLE


def test_lhotse():
    """Bounds and sizes, in ascending order of the bounds."""
    assert to_lhotse({512: 9, 128: 39, 256: 19}) == {
        "bucket_duration_bins": [128, 256, 512],
        "bucket_batch_size": [39, 19, 9],
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "batch sizes: invalid value 'there are none'; expected a length at which at least one sample fits."),
        (
            {512: 0, 384: 0},
            "batch sizes: invalid value 'not one sample fits at 384, 512'; expected a length at which at least one "
            "sample"
            " fits.",
        ),
        (
            {None: 8},
            "batch sizes: invalid value 'of one fixed shape'; expected sizes by length, found with seq_lens or"
            " --seq-len.",
        ),
        ({0: 8}, "length: invalid value 0; expected a whole number of at least 1."),
        ({"64": 8}, "length: invalid value '64'; expected a whole number of at least 1."),
        ({64: -1}, "batch size at 64: invalid value -1; expected a whole number from 0."),
        ({64: 1.5}, "batch size at 64: invalid value 1.5; expected a whole number from 0."),
        ({64: True}, "batch size at 64: invalid value True; expected a whole number from 0."),
    ],
)
def test_what_is_no_table(sizes, message):
    """Each is told in one sentence."""
    with pytest.raises(InvalidValue) as error:
        checked(sizes)
    assert str(error.value) == message


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"-5": 1}', "3"])
def test_what_is_no_json_of_a_table(text):
    """It says what would be."""
    with pytest.raises(InvalidValue) as error:
        from_json(text)
    assert 'expected an object with a batch size for each length, such as {"128": 134, "512": 33}' in str(error.value)
