"""The cache: one record per key, in a directory at any fsspec URL."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from batchfinder.cache.key import CacheKey
from batchfinder.cache.record import DamagedRecord, Record, decode, encode, is_record
from batchfinder.cache.storage import NotReadable, Storage
from batchfinder.results import SearchResult

log = logging.getLogger(__name__)
_NAME = re.compile(r"[0-9a-f]{64}\.json")


class DamagedRecordWarning(UserWarning):
    """A record was ignored: it cannot be read, its bytes are not what was written, or it makes no sense."""

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

    Attributes:
        url: where it is; a local path is absolute.

    Example:
        >>> store = Store("memory://example")
        >>> [record.result.max_batch_size for record in store.records()]
        []
    """

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        self._storage = Storage(default_cache_url() if url is None else url)
        self.url = self._storage.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def get(self, key: CacheKey) -> SearchResult | None:
        """The result as it was put; None when there is none, or with a `DamagedRecordWarning` a damaged one.

        Where there is none, the log says at DEBUG in which fields the nearest record differs.

        Raises:
            CacheFailed: the place cannot be read.
        """
        record = self._load(_name(key))
        if record is None and log.isEnabledFor(logging.DEBUG):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedRecordWarning)
                others = [(key.differences(other.key), other) for other in self.records()]
            if not others:
                log.debug("nothing is cached at %s", self.url)
                return None
            differing, near = min(others, key=lambda other: len(other[0]))
            values = [f"{name} (now {now!r:.80}, then {then!r:.80})" for name, (now, then) in differing.items()]
            which = f"{near.label or 'a model'} of {near.created:%Y-%m-%d %H:%M} ({near.key.digest[:12]})"
            log.debug("nothing is cached for this; the nearest, %s, differs in %s", which, ", ".join(values))
        return None if record is None else record.result

    def put(self, key: CacheKey, result: SearchResult, label: str = "") -> None:
        """Keep a result, in place of any there was.

        Args:
            label: the model's name, for lists.

        Raises:
            CacheFailed: the place cannot be written.
            InvalidValue: the result's source is `cache`, or it holds a value that JSON does not have.
        """
        self.put_record(Record(key, result, datetime.now(UTC).replace(microsecond=0), label))

    def put_record(self, record: Record) -> None:
        """Keep a record as it is, with the time it was made; see `put`."""
        self._storage.write(_name(record.key), encode(record))

    def entry(self, key: CacheKey, label: str = "") -> CacheEntry:
        """One key's place, which `find_max_batch_size` takes as its cache."""
        return CacheEntry(self, key, label)

    def records(self, digest: str = "") -> Iterator[Record]:
        """Every record that can be read, in the order of their digests; damaged ones are warned of and left out.

        Args:
            digest: the first digits of those that are wanted; empty for all.

        Raises:
            CacheFailed: the place cannot be read.
        """
        for name in self._storage.names():
            record = self._load(name) if _NAME.fullmatch(name) and name.startswith(digest) else None
            if record is not None:
                yield record

    def keys(self) -> Iterator[CacheKey]:
        """The key of every record that can be read; raises as `records`."""
        return (record.key for record in self.records())

    def remove(self, key: CacheKey) -> bool:
        """Remove one record; returns whether there was one. Raises as `clear`."""
        return self._storage.remove(_name(key))

    def clear(self) -> int:
        """Remove everything that a store wrote, damaged records and temporary files included.

        What has a record's name and was not written as one is left alone, with a warning.

        Returns:
            How many records there were.

        Raises:
            CacheFailed: the place cannot be written.
        """
        self._storage.remove_temporary()
        removed = 0
        for name in self._storage.names():
            if not _NAME.fullmatch(name):
                continue
            try:
                data = self._storage.read(name)
            except NotReadable:
                data = b"not known"
            if data is not None and not is_record(data):
                path = f"{self.url.rstrip('/')}/{name}"
                warnings.warn(f"{path} was left alone: no record was read from it, so it may be yours", stacklevel=2)
            elif data is not None:
                removed += self._storage.remove(name)
        return removed

    def check_writable(self) -> None:
        """Check, before any work is done, that results can be kept.

        Raises:
            CacheFailed: the place cannot be written.
        """
        self._storage.check_writable()

    def _load(self, name: str) -> Record | None:
        try:
            data = self._storage.read(name)
            if data is None:
                return None
            record = decode(data)
            if _name(record.key) != name:
                raise DamagedRecord("it holds another key's result")
        except (DamagedRecord, NotReadable) as damage:
            reason = damage.reason if isinstance(damage, DamagedRecord) else f"it cannot be read: {damage.strerror}"
            warnings.warn(DamagedRecordWarning(f"{self.url.rstrip('/')}/{name}", reason), stacklevel=3)
            return None
        return record


class ResultEntry(Protocol):
    """A place for one result, keyed by everything that changes it: `CacheEntry`, or one of your own."""

    def get(self) -> SearchResult | None:
        """The result kept here; None when there is none."""
        ...

    def put(self, outcome: SearchResult) -> None:
        """Keep a result here."""
        ...


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One key's place in a store; see `Store.get` and `Store.put`."""

    store: Store
    key: CacheKey
    label: str = ""

    def get(self) -> SearchResult | None:
        return self.store.get(self.key)

    def put(self, result: SearchResult) -> None:
        self.store.put(self.key, result, self.label)


def _name(key: CacheKey) -> str:
    return f"{key.digest}.json"
