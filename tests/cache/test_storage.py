from __future__ import annotations

import errno
import os
import resource
import time

import pytest

from batchfinder.cache import CacheKey, Store, store
from batchfinder.errors import CacheFailed
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Verdict
from tests.cache.conftest import FIELDS

KEY = CacheKey(**FIELDS)
OTHER = CacheKey(**{**FIELDS, "accumulation": 2})
NAME = f"{KEY.digest}.json"
STALE = f".{NAME}.{'a' * 32}.tmp"


def _put(place: Store, size: int, key: CacheKey = KEY) -> None:
    place.put(key, SearchResult(Shape(128), size, StopReason.EXACT, Measurement(Verdict.FITS), (), "simulated"))


def _got(place: Store, key: CacheKey = KEY) -> int | None:
    found = place.get(key)
    return None if found is None else found.max_batch_size


@pytest.fixture(params=["local", "file url", "memory"])
def place(request, tmp_path) -> Store:
    """A folder at each kind of URL, not yet there."""
    url = {
        "local": f"{tmp_path}/new/deep",
        "file url": f"file://{tmp_path}/new/deep",
        "memory": f"memory://{tmp_path.name}/new/deep",
    }[request.param]
    return Store(url)


def test_what_was_put_comes_back(place):
    """What was put under a key is found under it, replaced by a second put and gone after a removal."""
    assert _got(place) is None
    assert list(place.keys()) == []
    _put(place, 1)
    _put(place, 3, OTHER)
    _put(place, 1_000_000)
    assert (_got(place), _got(place, OTHER)) == (1_000_000, 3)
    assert list(place.keys()) == sorted((KEY, OTHER), key=lambda key: key.digest)
    assert (place.remove(KEY), place.remove(KEY)) == (True, False)
    assert list(place.keys()) == [OTHER]


def test_checking_leaves_nothing(place):
    """A check that the folder can be written leaves no file."""
    place.check_writable()
    assert list(place.keys()) == []


def test_checking_a_full_disk_leaves_nothing(tmp_path):
    """A name can be taken, as on a full disk, and nothing be written: the check fails and leaves no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        with pytest.raises(CacheFailed, match="File too large"):
            Store(tmp_path).check_writable()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_write_leaves_one_file(tmp_path):
    """A finished write leaves no temporary file."""
    _put(Store(tmp_path), 7)
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_bytes(broken, tmp_path, monkeypatch):
    """A write that fails on the way (a full disk) says so, keeps what was there and leaves no temporary file."""

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = Store(tmp_path)
    _put(place, 1)
    monkeypatch.setattr(store.os, broken, fail)
    with pytest.raises(CacheFailed) as caught:
        _put(place, 2)
    assert str(caught.value) == (
        f"the cache at {tmp_path} cannot be used: No space left on device. "
        "Set BATCHFINDER_CACHE or --cache to a place that can be written, or pass --no-cache."
    )
    assert os.listdir(tmp_path) == [NAME]
    assert _got(place) == 1


def test_an_open_reader_is_not_disturbed(tmp_path):
    """A file that is being read while it is replaced still gives the old bytes: it is replaced, never rewritten."""
    place = Store(tmp_path)
    _put(place, 1)
    old = (tmp_path / NAME).read_bytes()
    with open(tmp_path / NAME, "rb") as reader:
        _put(place, 2)
        assert reader.read() == old
    assert (tmp_path / NAME).read_bytes() != old


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    """Ctrl-C in the middle of a write removes the temporary file and goes on up."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _put(Store(tmp_path), 2)
    assert os.listdir(tmp_path) == []


def test_a_killed_writers_file_is_no_name_and_goes_in_time(tmp_path):
    """A temporary file left by a killed writer is never listed, is kept while its writer may live, and then removed."""
    (tmp_path / STALE).write_bytes(b"half a rec")
    _put(Store(tmp_path), 7)
    assert list(Store(tmp_path).keys()) == [KEY]
    assert STALE in os.listdir(tmp_path)
    old = time.time() - store.STALE_SECONDS - 1
    os.utime(tmp_path / STALE, (old, old))
    _put(Store(tmp_path), 7)
    assert os.listdir(tmp_path) == [NAME]


def test_a_write_survives_the_folder_being_cleared(tmp_path, monkeypatch):
    """A write whose temporary file is removed by somebody else before it takes its place starts again."""
    place, replace = Store(tmp_path), os.replace

    def clear_first(source, target):
        monkeypatch.undo()
        Store(tmp_path).clear()
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", clear_first)
    _put(place, 7)
    assert _got(place) == 7


def test_two_writers_of_one_name_do_not_share_a_file(tmp_path, monkeypatch):
    """A writer that finishes while another is in the middle of writing the same name publishes its own bytes."""
    place, replace, fsync, seen = Store(tmp_path), os.replace, os.fsync, []

    def replace_during_another_write(source, target):
        def finish_the_first(descriptor):
            replace(source, target)
            seen.append(_got(place))
            fsync(descriptor)

        monkeypatch.setattr(store.os, "replace", replace)
        monkeypatch.setattr(store.os, "fsync", finish_the_first)
        _put(Store(tmp_path), 2)

    monkeypatch.setattr(store.os, "replace", replace_during_another_write)
    _put(place, 1)
    assert (seen, _got(place)) == ([1], 2)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EBUSY])
def test_a_passing_failure_is_tried_again(code, tmp_path, monkeypatch):
    """An error that network file systems give and take back is not the user's problem."""
    place, fsync, calls = Store(tmp_path), os.fsync, []

    def fail_twice(descriptor):
        calls.append(descriptor)
        if len(calls) < 3:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(store.os, "fsync", fail_twice)
    _put(place, 7)
    assert (_got(place), len(calls), os.listdir(tmp_path)) == (7, 3, [NAME])


def test_a_relative_path_is_the_one_of_now(tmp_path, monkeypatch):
    """Changing the directory later, as Hydra does, does not move the cache."""
    monkeypatch.chdir(tmp_path)
    place = Store("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _put(place, 7)
    assert place.url == f"{tmp_path}/here"
    assert os.listdir(tmp_path / "here") == [NAME]


def _message(url: object, reason: str) -> str:
    return (
        f"the cache at {url} cannot be used: {reason}. "
        "Set BATCHFINDER_CACHE or --cache to a place that can be written, or pass --no-cache."
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("{tmp}/file", "it is a file, not a directory"),
        ("file://{tmp}/file", "it is a file, not a directory"),
        ("{tmp}/file/below", "Not a directory"),
        ("/proc/batchfinder", "No such file or directory"),
        ("nosuch://bucket/cache", "Protocol not known: nosuch"),
        ("missing://bucket/cache", "Install missingfs to access this"),
        ("grumpy://bucket/cache", "NoCredentials"),
        ("/dev/null\0", "embedded null byte"),
    ],
)
def test_a_place_that_cannot_be_written_says_why(url, reason, tmp_path, grumpy):
    """Checking and writing both end in one message that names the place, the reason and the next move."""
    (tmp_path / "file").write_text("I am a file")
    url = url.format(tmp=tmp_path)
    for act in (lambda: Store(url).check_writable(), lambda: _put(Store(url), 7)):
        with pytest.raises(CacheFailed) as caught:
            act()
        assert str(caught.value) == _message(Store(url).url, reason)
    assert (tmp_path / "file").read_text() == "I am a file"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("{tmp}/file", "it is a file, not a directory"),
        ("{tmp}/file/below", "Not a directory"),
        ("nosuch://bucket/cache", "Protocol not known: nosuch"),
        ("grumpy://bucket/cache", "NoCredentials"),
    ],
)
def test_a_place_that_cannot_be_read_says_why(url, reason, tmp_path, grumpy):
    """Looking up, listing and removing end in the same message."""
    (tmp_path / "file").write_text("I am a file")
    url = url.format(tmp=tmp_path)
    for act in (lambda: Store(url).get(KEY), lambda: list(Store(url).keys()), lambda: Store(url).remove(KEY)):
        with pytest.raises(CacheFailed) as caught:
            act()
        assert str(caught.value) == _message(Store(url).url, reason)


def test_a_place_that_is_not_there_is_empty(tmp_path):
    """Reading where nothing was ever written finds nothing and creates nothing."""
    place = Store(tmp_path / "never")
    assert (_got(place), list(place.keys()), place.remove(KEY)) == (None, [], False)
    assert not (tmp_path / "never").exists()


class _NoCredentials(Exception):
    """An error of a cloud library: not an `OSError`, and without words."""


_NoCredentials.__name__ = "NoCredentials"


@pytest.fixture
def grumpy():
    """Register a file system that refuses everything in its own words, and one whose library is not installed."""
    from fsspec import AbstractFileSystem, register_implementation
    from fsspec.registry import known_implementations

    class Grumpy(AbstractFileSystem):
        protocol = "grumpy"

        def _refuse(self, *args, **kwargs):
            raise _NoCredentials

        pipe_file = cat_file = ls = rm_file = _refuse

    register_implementation("grumpy", Grumpy, clobber=True)
    known_implementations["missing"] = {"class": "missingfs.Missing", "err": "Install missingfs to access this"}
    yield
    del known_implementations["missing"]


def test_a_directory_is_made_where_the_file_system_needs_one():
    """On a remote file system with real directories, the last one is made, and no more than that."""
    from fsspec import register_implementation
    from fsspec.implementations.memory import MemoryFileSystem

    class Strict(MemoryFileSystem):
        protocol = "strict"
        store: dict = {}
        pseudo_dirs = ["", "/shelf"]

        @classmethod
        def _strip_protocol(cls, path):
            return MemoryFileSystem._strip_protocol(path.removeprefix("strict://"))

        def mkdir(self, path, create_parents=True, **kwargs):
            assert not create_parents
            if self._parent(path) not in self.pseudo_dirs:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            super().mkdir(path, create_parents=False)

        def pipe_file(self, path, value, mode="overwrite", **kwargs):
            if self._parent(path) not in self.pseudo_dirs:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            super().pipe_file(path, value)

    register_implementation("strict", Strict, clobber=True)
    place = Store("strict://shelf/cache")
    _put(place, 7)
    assert _got(place) == 7
    with pytest.raises(CacheFailed) as caught:
        _put(Store("strict://misspelt/cache"), 7)
    assert str(caught.value) == _message("strict://misspelt/cache", "No such file or directory")
