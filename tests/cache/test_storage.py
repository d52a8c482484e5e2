from __future__ import annotations

import errno
import os
import time

import pytest

from batchfinder.cache import store
from batchfinder.cache.store import Storage
from batchfinder.errors import CacheFailed

NAME = "0" * 64 + ".json"
OTHER = "1" * 64 + ".json"
STALE = f".{NAME}.{'a' * 32}.tmp"


@pytest.fixture(params=["local", "file url", "memory"])
def place(request, tmp_path) -> Storage:
    """A folder at each kind of URL, not yet there."""
    url = {
        "local": f"{tmp_path}/new/deep",
        "file url": f"file://{tmp_path}/new/deep",
        "memory": f"memory://{tmp_path.name}/new/deep",
    }[request.param]
    return Storage(url)


def test_bytes_come_back(place):
    """What was written under a name is read under it, replaced by a second write and gone after a removal."""
    assert place.read(NAME) is None
    assert place.names() == []
    place.write(NAME, b"one")
    place.write(OTHER, b"other")
    place.write(NAME, b"a longer two")
    assert (place.read(NAME), place.read(OTHER)) == (b"a longer two", b"other")
    assert place.names() == [NAME, OTHER]
    assert (place.remove(NAME), place.remove(NAME)) == (True, False)
    assert place.names() == [OTHER]


def test_checking_leaves_nothing(place):
    """A check that the folder can be written leaves no file."""
    place.check_writable()
    assert place.names() == []


def test_a_write_leaves_one_file(tmp_path):
    """A finished write leaves no temporary file."""
    Storage(tmp_path).write(NAME, b"data")
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_bytes(broken, tmp_path, monkeypatch):
    """A write that fails on the way (a full disk) says so, keeps what was there and leaves no temporary file."""

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = Storage(tmp_path)
    place.write(NAME, b"old")
    monkeypatch.setattr(store.os, broken, fail)
    with pytest.raises(CacheFailed) as caught:
        place.write(NAME, b"new")
    assert str(caught.value) == (
        f"the cache at {tmp_path} cannot be used: No space left on device. "
        "Set BATCHFINDER_CACHE or --cache to a place that can be written, or pass --no-cache."
    )
    assert os.listdir(tmp_path) == [NAME]
    assert place.read(NAME) == b"old"


def test_an_open_reader_is_not_disturbed(tmp_path):
    """A file that is being read while it is replaced still gives the old bytes: it is replaced, never rewritten."""
    place = Storage(tmp_path)
    place.write(NAME, b"old bytes")
    with open(tmp_path / NAME, "rb") as reader:
        place.write(NAME, b"new")
        assert reader.read() == b"old bytes"


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    """Ctrl-C in the middle of a write removes the temporary file and goes on up."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Storage(tmp_path).write(NAME, b"new")
    assert os.listdir(tmp_path) == []


def test_a_killed_writers_file_is_no_name_and_goes_in_time(tmp_path):
    """A temporary file left by a killed writer is never listed, is kept while its writer may live, and then removed."""
    (tmp_path / STALE).write_bytes(b"half a rec")
    Storage(tmp_path).write(NAME, b"data")
    assert Storage(tmp_path).names() == [NAME]
    assert STALE in os.listdir(tmp_path)
    old = time.time() - store.STALE_SECONDS - 1
    os.utime(tmp_path / STALE, (old, old))
    Storage(tmp_path).write(NAME, b"data")
    assert os.listdir(tmp_path) == [NAME]


def test_a_write_survives_the_folder_being_cleared(tmp_path, monkeypatch):
    """A write whose temporary file is removed by somebody else before it takes its place starts again."""
    place, replace = Storage(tmp_path), os.replace

    def clear_first(source, target):
        monkeypatch.undo()
        Storage(tmp_path).remove_temporary()
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", clear_first)
    place.write(NAME, b"data")
    assert place.read(NAME) == b"data"


def test_two_writers_of_one_name_do_not_share_a_file(tmp_path, monkeypatch):
    """A writer that finishes while another is in the middle of writing the same name publishes its own bytes."""
    place, replace, fsync, seen = Storage(tmp_path), os.replace, os.fsync, []

    def replace_during_another_write(source, target):
        def finish_the_first(descriptor):
            replace(source, target)
            seen.append(place.read(NAME))
            fsync(descriptor)

        monkeypatch.setattr(store.os, "replace", replace)
        monkeypatch.setattr(store.os, "fsync", finish_the_first)
        Storage(tmp_path).write(NAME, b"second")

    monkeypatch.setattr(store.os, "replace", replace_during_another_write)
    place.write(NAME, b"first")
    assert (seen, place.read(NAME)) == ([b"first"], b"second")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EBUSY])
def test_a_passing_failure_is_tried_again(code, tmp_path, monkeypatch):
    """An error that network file systems give and take back is not the user's problem."""
    place, fsync, calls = Storage(tmp_path), os.fsync, []

    def fail_twice(descriptor):
        calls.append(descriptor)
        if len(calls) < 3:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(store.os, "fsync", fail_twice)
    place.write(NAME, b"data")
    assert (place.read(NAME), len(calls), os.listdir(tmp_path)) == (b"data", 3, [NAME])


def test_a_relative_path_is_the_one_of_now(tmp_path, monkeypatch):
    """Changing the directory later, as Hydra does, does not move the cache."""
    monkeypatch.chdir(tmp_path)
    place = Storage("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    place.write(NAME, b"data")
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
    for act in (lambda: Storage(url).check_writable(), lambda: Storage(url).write(NAME, b"data")):
        with pytest.raises(CacheFailed) as caught:
            act()
        assert str(caught.value) == _message(Storage(url).url, reason)
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
    for act in (lambda: Storage(url).read(NAME), lambda: Storage(url).names(), lambda: Storage(url).remove(NAME)):
        with pytest.raises(CacheFailed) as caught:
            act()
        assert str(caught.value) == _message(Storage(url).url, reason)


def test_a_place_that_is_not_there_is_empty(tmp_path):
    """Reading where nothing was ever written finds nothing and creates nothing."""
    place = Storage(tmp_path / "never")
    assert (place.read(NAME), place.names(), place.remove(NAME)) == (None, [], False)
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
    place = Storage("strict://shelf/cache")
    place.write(NAME, b"data")
    assert place.read(NAME) == b"data"
    with pytest.raises(CacheFailed) as caught:
        Storage("strict://misspelt/cache").write(NAME, b"data")
    assert str(caught.value) == _message("strict://misspelt/cache", "No such file or directory")
