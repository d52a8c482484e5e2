"""The cache: one record per key, in a directory at any fsspec URL, each file replaced whole or not at all.

On a local directory a write goes to a temporary file beside its target, is flushed to disk, and takes the target's
place by `os.replace` (fsspec's own `mv` is `shutil.move`, which may copy, and moves *into* a directory). On other file
systems it is one put of one object, which is atomic on object stores; where it is not (sftp, ftp), a reader may meet a
record cut short, which the record's checksum finds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from batchfinder.cache.key import CacheKey
from batchfinder.cache.record import MAX_RECORD_BYTES, DamagedRecord, Record, decode, encode
from batchfinder.errors import CacheFailed
from batchfinder.results import SearchResult
from batchfinder.retry import retrying
from batchfinder.units import format_bytes

log = logging.getLogger(__name__)

STALE_SECONDS = 3600.0  # a temporary file this old has no writer any more; a write takes milliseconds

_TRANSIENT_ERRNOS = {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)(?::/?|//+)(?!/)")  # of a URL, with a colon or a slash too few
_PASSWORD = re.compile(r"(?<=://)[^/@:\s]*:([^/\s]+)@")
_NAME = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"\.(?:[0-9a-f]{64}\.json|writable)\.[0-9a-f]{32}\.tmp")


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


class NotUsable(OSError):
    """One name's bytes cannot be read or replaced, though the others' may."""


class Store:
    """Results on disk or in a bucket, safe with any number of readers and writers, any of which may be killed.

    Creating one touches nothing. A result that was put is either found whole or not at all; of several writers of one
    key, the last one's result stays. Files that are not the cache's own are left alone.

    Args:
        url: a path or any fsspec URL (`s3://bucket/cache`, `memory://cache`); None for `default_cache_url()`.

    Attributes:
        url: where it is, to be shown: a local path is absolute, and a password is left out.

    Example:
        >>> store = Store("memory://example")
        >>> [record.result.max_batch_size for record in store.records()]
        []
    """

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        self._url = self._asked = os.fspath(default_cache_url() if url is None else url)
        self._problem = ""
        self._removed_stale = False
        if "://" not in self._url and "::" not in self._url:
            path = os.path.expanduser(self._url)
            if path.startswith("~"):
                self._problem = "there is no such user on this machine"
            try:
                self._url = os.path.abspath(path)  # the current directory of now, not of the first use
            except OSError:
                self._problem = "it is relative to the current folder, which has been removed"
        self.url = without_password(self._url)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def get(self, key: CacheKey) -> SearchResult | None:
        """The cached result as it was put, or None. A damaged record counts as none, with a `DamagedRecordWarning`.

        On a miss the log says at DEBUG in which fields the nearest record differs.

        Raises:
            CacheFailed: the place cannot be read.
        """
        record = self._load(f"{key.digest}.json")
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
        name, data = f"{record.key.digest}.json", encode(record)

        def replace_whole(fs: Any, root: str, is_local: bool) -> None:
            if not is_local:
                _put(fs, root, name, data)
                return
            temporary = f".{name}.{os.urandom(16).hex()}.tmp"
            try:
                _put(fs, root, temporary, data)
                os.replace(_join(root, temporary), _join(root, name))
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.unlink(_join(root, temporary))
                if isinstance(error, IsADirectoryError):
                    raise NotUsable(error.errno, error.strerror) from error
                raise

        try:
            with self._opened() as (fs, root, is_local):
                # A FileNotFoundError: another process cleared the directory between two of our steps.
                again = retrying(lambda error: _is_transient(error) or isinstance(error, FileNotFoundError))
                again(replace_whole)(fs, root, is_local)
        except NotUsable as error:  # it is the name of a folder
            path = f"{self.url.rstrip('/')}/{name}"
            warnings.warn(f"{path} was left alone, and its result is not cached: {error.strerror}", stacklevel=2)
            return
        if is_local and not self._removed_stale:
            self._removed_stale = True
            now = time.time()
            for other, changed in self._files().items():
                if _TEMPORARY.fullmatch(other) and now - changed >= STALE_SECONDS:
                    self._remove(other)

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
        for name in sorted(self._files()):
            record = self._load(name) if _NAME.fullmatch(name) and name.startswith(digest) else None
            if record is not None:
                yield record

    def keys(self) -> Iterator[CacheKey]:
        """The key of every record that can be read; raises as `records`."""
        return (record.key for record in self.records())

    def remove(self, key: CacheKey) -> bool:
        """Remove one record; returns whether there was one. Raises as `clear`."""
        return self._remove(f"{key.digest}.json")

    def clear(self) -> int:
        """Remove everything that a store wrote, damaged records and temporary files included.

        What has a record's name and was not written as one is left alone, with a warning.

        Returns:
            How many records there were.

        Raises:
            CacheFailed: the place cannot be written.
        """
        removed = 0
        for name in sorted(self._files()):
            if _TEMPORARY.fullmatch(name):  # a writer that is at work starts its write again
                self._remove(name)
            if not _NAME.fullmatch(name):
                continue
            try:
                data = self._read(name)
            except NotUsable:
                data = b"not known"
            if data is None:
                continue
            # Written as a record, by this or another version, though it may be damaged since.
            beginning, found = b'{\n"schema": 0,\n"created": "', re.sub(rb"\d+", b"0", data[:40])
            if beginning.startswith(found) or found.startswith(beginning):
                removed += self._remove(name)
            else:
                path = f"{self.url.rstrip('/')}/{name}"
                warnings.warn(f"{path} was left alone: no record was read from it, so it may be yours", stacklevel=2)
        return removed

    def check_writable(self) -> None:
        """Check, before any work is done, that results can be kept.

        Raises:
            CacheFailed: the place cannot be written.
        """
        with self._opened() as (fs, root, _):
            name = f".writable.{os.urandom(16).hex()}.tmp"
            try:
                _put(fs, root, name, b"batchfinder was here\n")
            except BaseException:  # a full disk takes the name and not the bytes
                with contextlib.suppress(Exception):
                    fs.rm_file(_join(root, name))
                raise
            fs.rm_file(_join(root, name))

    def _load(self, name: str) -> Record | None:
        try:
            data = self._read(name)
            if data is None:
                return None
            record = decode(data)
            if f"{record.key.digest}.json" != name:
                raise DamagedRecord("it holds another key's result")
        except (DamagedRecord, NotUsable) as damage:
            reason = damage.reason if isinstance(damage, DamagedRecord) else f"it cannot be read: {damage.strerror}"
            warnings.warn(DamagedRecordWarning(f"{self.url.rstrip('/')}/{name}", reason), stacklevel=3)
            return None
        return record

    def _read(self, name: str) -> bytes | None:
        """Return a name's bytes, None when there are none.

        Raises:
            NotUsable: there are some, and they are no regular file, too many, or not for this user to read.
        """

        def read_file(path: str) -> bytes:
            # A pipe would be waited for, and a device has no end.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise NotUsable(errno.EINVAL, "it is not a regular file")
                return file.read(MAX_RECORD_BYTES + 1)

        with self._opened() as (fs, root, is_local):
            path = _join(root, name)
            try:
                data: bytes = retrying(_is_transient)(read_file if is_local else fs.cat_file)(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                if is_local and not isinstance(error, NotUsable) and os.path.lexists(path):
                    raise NotUsable(error.errno, error.strerror) from error
                raise
            if len(data) > MAX_RECORD_BYTES:
                raise NotUsable(errno.EFBIG, f"it is larger than {format_bytes(MAX_RECORD_BYTES)}")
            return data

    def _remove(self, name: str) -> bool:
        with self._opened() as (fs, root, _):
            try:
                retrying(_is_transient)(fs.rm_file)(_join(root, name))
            except FileNotFoundError:
                return False
            return True

    def _files(self) -> dict[str, float]:
        """When each file was changed last, by its name; 0 where the file system does not say."""
        with self._opened() as (fs, root, _):
            fs.invalidate_cache(root)  # s3fs and others remember listings
            try:
                entries = fs.ls(root, detail=True)
            except FileNotFoundError:
                return {}
            if not fs.isdir(root):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            files = (entry for entry in entries if entry["type"] == "file")
            return {entry["name"].rsplit("/", 1)[-1]: entry.get("mtime", 0.0) for entry in files}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, str, bool]]:
        """The file system, the directory's path in it, and whether it is this machine's.

        Whatever a file system raises becomes `CacheFailed`: cloud libraries have trees of their own.
        """
        fs: Any = None
        root = ""
        try:
            from fsspec.core import url_to_fs  # 45 ms, most of it asyncio
            from fsspec.implementations.local import LocalFileSystem
            from fsspec.registry import known_implementations

            mistyped = _SCHEME.match(self._asked)
            if mistyped and mistyped[1] in known_implementations:
                self._problem = f"it is no URL; one begins with {mistyped[1]}://"
            if self._problem:
                raise CacheFailed(without_password(self._asked), self._problem)
            fs, root = url_to_fs(self._url)
            yield fs, root, isinstance(fs, LocalFileSystem)
        except (CacheFailed, NotUsable):
            raise
        except Exception as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            for secret in _PASSWORD.findall(self._url):
                words = words.replace(secret, "***")
            reason = words.rstrip(". \n") or type(error).__name__
            with contextlib.suppress(Exception):
                if isinstance(error, OSError) and fs.isfile(root):
                    reason = "it is a file, not a directory"
            raise CacheFailed(self.url, reason) from error


def without_password(url: str) -> str:
    """A URL as it may be shown: `ftp://user:secret@host/path` as `ftp://user:***@host/path`."""
    return _PASSWORD.sub(lambda found: found[0].replace(f":{found[1]}@", ":***@"), url)


def _is_transient(error: Exception) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS
    )


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}"


def _put(fs: Any, root: str, name: str, data: bytes) -> None:
    from fsspec.implementations.local import LocalFileSystem

    path = _join(root, name)
    if isinstance(fs, LocalFileSystem):
        fs.makedirs(root, exist_ok=True)
        with fs.open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return
    try:
        fs.pipe_file(path, data)
    except FileNotFoundError:
        # Object stores need no directories. Elsewhere make the last one only: with its parents, s3fs would create a
        # bucket out of a misspelt name.
        fs.mkdir(root, create_parents=False)
        fs.pipe_file(path, data)


class ResultEntry(Protocol):
    """A place for one result, keyed by everything that changes it: `CacheEntry`, or one of your own."""

    def get(self) -> SearchResult | None:
        """The result kept here, or None."""
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
