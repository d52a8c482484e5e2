"""The largest batch size by length, read from whatever found it, in the forms that other samplers read. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, Protocol

from batchfinder.errors import InvalidValue
from batchfinder.results import SearchResult


class HasResults(Protocol):
    """The result of each stage and length, as the `BatchFinder` callback keeps it."""

    @property
    def results(self) -> Mapping[str, Mapping[int | None, SearchResult]]: ...


Found = HasResults | Mapping[Any, Any] | Iterable[SearchResult]
"""What a table can be read from: a `BatchFinder`, the result of `tune_batch_size`, sizes or results by length, or
results."""


def table_of(found: Found, stage: str = "fit") -> dict[int, int]:
    """The largest batch size by length, the shortest first. Lengths at which not even one sample fits are left out.

    Args:
        found: by `BatchFinder` or `tune_batch_size` with `seq_lens`, or by searches of your own; or sizes by length.
        stage: which of a `BatchFinder`'s.

    Raises:
        InvalidValue: there is nothing in it, nothing fits, or it is of data of one fixed shape.
    """
    results: Any = found
    if not isinstance(found, Mapping) and hasattr(found, "results"):
        results = found.results
        if stage not in results:
            ran = ", ".join(results) or "none yet: it finds sizes when training begins"
            raise InvalidValue("stage", stage, f"one that BatchFinder has found sizes for ({ran})")
        results = results[stage]
    if not isinstance(results, Mapping):
        return checked({result.shape.seq_len: result.max_batch_size for result in results})
    sizes = {}
    for seq_len, value in results.items():  # a size as it is given, or the largest one of a result
        result = getattr(value, "result", value)
        sizes[seq_len] = result.max_batch_size if isinstance(result, SearchResult) else result
    return checked(sizes)


def checked(sizes: Mapping[Any, Any]) -> dict[int, int]:
    """A table in order, without the lengths at which nothing fits.

    Raises:
        InvalidValue: a length or a size is not a whole number in range, or none is left.
    """
    for seq_len, size in sizes.items():
        if seq_len is None:
            raise InvalidValue("batch sizes", "of one fixed shape", "sizes by length, found with seq_lens or --seq-len")
        if not isinstance(seq_len, Integral) or isinstance(seq_len, bool) or seq_len < 1:
            raise InvalidValue("length", seq_len, "a whole number of at least 1")
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:
            raise InvalidValue(f"batch size at {seq_len}", size, "a whole number from 0")
    table = {int(seq_len): int(sizes[seq_len]) for seq_len in sorted(sizes) if sizes[seq_len]}
    if not table:
        what = f"not one sample fits at {', '.join(map(str, sorted(sizes)))}" if sizes else "there are none"
        raise InvalidValue("batch sizes", what, "a length at which at least one sample fits")
    return table


def to_json(table: Mapping[int, int]) -> str:
    """An object with a size for each length: `{"128": 134, "512": 33}`."""
    return json.dumps({str(seq_len): size for seq_len, size in checked(table).items()})


def from_json(text: str) -> dict[int, int]:
    """Read what `to_json` wrote.

    Raises:
        InvalidValue: the text is not such an object.
    """
    expected = 'an object with a batch size for each length, such as {"128": 134, "512": 33}'
    try:
        sizes = json.loads(text)
    except ValueError as error:
        raise InvalidValue("table", text[:80], f"{expected} ({error})") from error
    if not isinstance(sizes, dict) or not all(seq_len.isascii() and seq_len.isdigit() for seq_len in sizes):
        raise InvalidValue("table", text[:80], expected)
    return checked({int(seq_len): size for seq_len, size in sizes.items()})


def to_lhotse(table: Mapping[int, int]) -> dict[str, list[int]]:
    """What lhotse's samplers and NeMo's configuration take: upper bounds of buckets, and each one's batch size.

    `bucket_duration_bins` and `bucket_batch_size` are NeMo's names. In lhotse they are `max_seq_len_buckets` and
    `batch_sizes` of `FixedBucketBatchSizeConstraint`, the first being `duration_bins` of `DynamicBucketingSampler` as
    well. Bounds are in the table's own unit: where samples are measured in seconds, multiply them.

    Source: lhotse 1.33, lhotse/dataset/sampling/dynamic_bucketing.py; NeMo, scripts/speech_recognition/oomptimizer.py.
    """
    table = checked(table)
    return {"bucket_duration_bins": list(table), "bucket_batch_size": list(table.values())}
