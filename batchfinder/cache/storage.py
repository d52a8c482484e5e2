"""Named byte strings in a directory at any fsspec URL, each replaced whole or not at all.

On a local directory a write goes to a temporary file beside its target, is flushed to disk, and takes the target's
place by `os.replace` (fsspec's own `mv` is `shutil.move`, which may copy, and moves *into* a directory). On other file
systems it is one put of one object, which is atomic on object stores; where it is not (sftp, ftp), a reader may meet a
record cut short, which the record's checksum finds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batchfinder.errors import CacheFailed
from batchfinder.retry import retrying

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

STALE_SECONDS = 3600.0  # a temporary file this old has no writer any more; a write takes milliseconds

_TRANSIENT_ERRNOS = {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
_TEMPORARY = re.compile(r"\.(?:[0-9a-f]{64}\.json|writable)\.[0-9a-f]{32}\.tmp")


def _is_transient(error: Exception) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS
    )


class Storage:
    """A directory of named byte strings. Nothing is imported, opened or created before the first use.

    Args:
        url: a path or any fsspec URL; a relative path means the current directory of now, not of the first use.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url)
        self.url = text if "://" in text or "::" in text else os.path.abspath(os.path.expanduser(text))
        self._removed_stale = False

    def read(self, name: str) -> bytes | None:
        """Return a name's bytes, None when there are none.

        Raises:
            CacheFailed: the place cannot be read.
        """
        with self._failures():
            try:
                data: bytes = retrying(_is_transient)(self._fs.cat_file)(self._path(name))
            except FileNotFoundError:
                return None
            return data

    def write(self, name: str, data: bytes) -> None:
        """Give a name these bytes, in place of any it had.

        Raises:
            CacheFailed: the place cannot be written.
        """

        def replace_whole() -> None:
            if not self._is_local:
                self._put(name, data)
                return
            temporary = f".{name}.{os.urandom(16).hex()}.tmp"
            try:
                self._put(temporary, data)
                os.replace(self._path(temporary), self._path(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(self._path(temporary))
                raise

        with self._failures():
            # A FileNotFoundError: another process cleared the directory between two of our steps.
            retrying(lambda error: _is_transient(error) or isinstance(error, FileNotFoundError))(replace_whole)()
        if self._is_local and not self._removed_stale:
            self._removed_stale = True
            self.remove_temporary(older_than=STALE_SECONDS)

    def names(self) -> list[str]:
        """Return every name, sorted; temporary files have none.

        Raises:
            CacheFailed: the place cannot be read.
        """
        with self._failures():
            return sorted(name for name, _ in self._entries() if not _TEMPORARY.fullmatch(name))

    def remove(self, name: str) -> bool:
        """Remove a name; returns whether it was there.

        Raises:
            CacheFailed: the place cannot be written.
        """
        with self._failures():
            try:
                retrying(_is_transient)(self._fs.rm_file)(self._path(name))
            except FileNotFoundError:
                return False
            return True

    def remove_temporary(self, older_than: float = 0.0) -> None:
        """Remove the temporary files of every writer; one that is writing now starts its write again.

        Args:
            older_than: leave those that were changed within so many seconds.

        Raises:
            CacheFailed: the place cannot be written.
        """
        with self._failures():
            now = time.time()
            for name, changed in self._entries():
                if _TEMPORARY.fullmatch(name) and now - changed >= older_than:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(self._path(name))

    def check_writable(self) -> None:
        """Write and remove a file, to check before any work is done that this is possible.

        Raises:
            CacheFailed: the place cannot be written.
        """
        with self._failures():
            name = f".writable.{os.urandom(16).hex()}.tmp"
            self._put(name, b"batchfinder was here\n")
            self._fs.rm_file(self._path(name))

    @cached_property
    def _opened(self) -> tuple[AbstractFileSystem, str]:
        from fsspec.core import url_to_fs  # 45 ms, most of it asyncio

        fs, root = url_to_fs(self.url)
        return fs, root

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _is_local(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._fs, LocalFileSystem)

    def _path(self, name: str) -> str:
        return f"{self._opened[1].rstrip('/')}/{name}"

    def _put(self, name: str, data: bytes) -> None:
        fs, root = self._opened
        if self._is_local:
            fs.makedirs(root, exist_ok=True)
            with fs.open(self._path(name), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return
        try:
            fs.pipe_file(self._path(name), data)
        except FileNotFoundError:
            # Object stores need no directories. Elsewhere make the last one only: with its parents, s3fs would create
            # a bucket out of a misspelt name.
            fs.mkdir(root, create_parents=False)
            fs.pipe_file(self._path(name), data)

    def _entries(self) -> Iterator[tuple[str, float]]:
        """Every file's name and time of last change (0 where the file system keeps none)."""
        fs, root = self._opened
        fs.invalidate_cache(root)  # s3fs and others remember listings
        try:
            entries = fs.ls(root, detail=True)
        except FileNotFoundError:
            return
        if not fs.isdir(root):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        for entry in entries:
            if entry["type"] == "file":
                yield entry["name"].rsplit("/", 1)[-1], entry.get("mtime", 0.0)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn whatever a file system raises into `CacheFailed`: cloud libraries have trees of their own."""
        try:
            yield
        except Exception as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            reason = words.rstrip(". \n") or type(error).__name__
            with contextlib.suppress(Exception):
                if isinstance(error, OSError) and self._fs.isfile(self._opened[1]):
                    reason = "it is a file, not a directory"
            raise CacheFailed(self.url, reason) from error
