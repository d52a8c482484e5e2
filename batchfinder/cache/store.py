"""The cache: one record per key, in a directory at any fsspec URL."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from batchfinder.cache.key import CacheKey
from batchfinder.cache.record import DamagedRecord, Record, decode, encode
from batchfinder.cache.storage import Storage
from batchfinder.results import SearchResult

_NAME = re.compile(r"[0-9a-f]{64}\.json")


class DamagedRecordWarning(UserWarning):
    """A record was ignored because its bytes are not what was written.

    Attributes:
        path: where it lies.
        reason: what is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"ignoring the damaged cache record {path}: {reason}. The next result for it will replace it.")


def default_cache_url() -> str:
    """Where results are kept unless said otherwise: `BATCHFINDER_CACHE`, or the user's cache directory."""
    from platformdirs import user_cache_dir

    return os.environ.get("BATCHFINDER_CACHE") or user_cache_dir("batchfinder", appauthor=False)


class Store:
    """Results on disk or in a bucket, safe with any number of readers and writers, any of which may be killed.

    Creating one touches nothing. A result that was put is either found whole or not at all; of several writers of one
    key, the last one's result stays. Files that are not the cache's own are left alone.

    Args:
        url: a path or any fsspec URL (`s3://bucket/cache`, `memory://cache`); None for `default_cache_url()`.

    Example:
        >>> store = Store("memory://example")
        >>> [record.outcome.max_batch_size for record in store.records()]
        []
    """

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        self._folder = Storage(default_cache_url() if url is None else url)

    @property
    def url(self) -> str:
        """Where it is; a local path is absolute."""
        return self._folder.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def get(self, key: CacheKey) -> SearchResult | None:
        """Look an answer up. A damaged record is none: it is named in a `DamagedRecordWarning`.

        Args:
            key: everything that the answer depends on.

        Returns:
            The outcome as it was put, with its original source; None when there is none.

        Raises:
            CacheFailed: the place cannot be read.
        """
        record = self._load(_name(key))
        return None if record is None else record.outcome

    def put(self, key: CacheKey, outcome: SearchResult, label: str = "") -> None:
        """Keep an answer, in place of any there was.

        Args:
            key: everything that the answer depends on.
            outcome: the answer, with its original source.
            label: what people call the model, for lists.

        Raises:
            CacheFailed: the place cannot be written.
            InvalidValue: the outcome's source is `cache`, or it holds something that JSON cannot.
        """
        self.put_record(Record(key, outcome, datetime.now(UTC).replace(microsecond=0), label))

    def put_record(self, record: Record) -> None:
        """Keep a record as it is, with the time it was made; see `put`.

        Args:
            record: such as another cache had it.
        """
        self._folder.write(_name(record.key), encode(record))

    def slot(self, key: CacheKey, label: str = "") -> CacheEntry:
        """One key's place, for a search that should know of nothing else.

        Args:
            key: everything that the answer depends on.
            label: what people call the model, for lists.
        """
        return CacheEntry(self, key, label)

    def records(self, digest: str = "") -> Iterator[Record]:
        """Every record that can be read, in the order of their digests; damaged ones are warned of and left out.

        Args:
            digest: the first digits of those that are wanted; empty for all.

        Raises:
            CacheFailed: the place cannot be read.
        """
        for name in self._names():
            record = self._load(name) if name.startswith(digest) else None
            if record is not None:
                yield record

    def keys(self) -> Iterator[CacheKey]:
        """The key of every record that can be read.

        Raises:
            CacheFailed: the place cannot be read.
        """
        return (record.key for record in self.records())

    def remove(self, key: CacheKey) -> bool:
        """Forget one answer; returns whether there was a record.

        Args:
            key: everything that the answer depends on.

        Raises:
            CacheFailed: the place cannot be written.
        """
        return self._folder.remove(_name(key))

    def clear(self) -> int:
        """Forget everything, damaged records and temporary files included; returns how many records went.

        Raises:
            CacheFailed: the place cannot be written.
        """
        self._folder.remove_temporary()
        return sum(self._folder.remove(name) for name in self._names())

    def check_writable(self) -> None:
        """Find out now, rather than after an hour's work, whether results can be kept.

        Raises:
            CacheFailed: the place cannot be written.
        """
        self._folder.check_writable()

    def _names(self) -> list[str]:
        return [name for name in self._folder.names() if _NAME.fullmatch(name)]

    def _load(self, name: str) -> Record | None:
        data = self._folder.read(name)
        if data is None:
            return None
        try:
            record = decode(data)
            if _name(record.key) != name:
                raise DamagedRecord("it holds another key's result")
        except DamagedRecord as damage:
            warnings.warn(DamagedRecordWarning(f"{self.url.rstrip('/')}/{name}", damage.reason), stacklevel=3)
            return None
        return record


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One key's place in a store: what `find_max_batch_size` takes as its cache.

    Attributes:
        store: where it is kept.
        key: everything that the answer depends on.
        label: what people call the model, for lists.
    """

    store: Store
    key: CacheKey
    label: str = ""

    def get(self) -> SearchResult | None:
        """Look the answer up; see `Store.get`."""
        return self.store.get(self.key)

    def put(self, outcome: SearchResult) -> None:
        """Keep an answer; see `Store.put`."""
        self.store.put(self.key, outcome, self.label)


def _name(key: CacheKey) -> str:
    return f"{key.digest}.json"
