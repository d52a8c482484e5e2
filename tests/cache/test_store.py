from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import warnings

import platformdirs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.cache import DamagedRecordWarning, Store, default_cache_url
from batchfinder.cache.record import encode
from batchfinder.errors import CacheFailed
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict


def _outcome(size: int, seq_len: int = 128) -> SearchResult:
    seen = Measurement(Verdict.FITS, size * 100, size * 120, 0.5)
    out = Measurement(Verdict.OUT_OF_MEMORY, message="CUDA out of memory (simulated)")
    trials = (Trial(size, Shape(seq_len), seen), Trial(size + 1, Shape(seq_len), out))
    return SearchResult(Shape(seq_len), size, StopReason.EXACT, seen, trials, "simulated", ("NCCL",))


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path) -> Store:
    """An empty store of each kind."""
    return Store(tmp_path / "cache" if request.param == "local" else f"memory://{tmp_path.name}/store")


def test_an_answer_comes_back_whole(store, make_key):
    """What was put is found again, source and trials included, by that key alone; the last put wins."""
    assert store.get(make_key()) is None
    store.put(make_key(), _outcome(31))
    store.put(make_key(), _outcome(32))
    store.put(make_key(seq_len=256), _outcome(12, 256))
    assert store.get(make_key()) == _outcome(32)
    assert store.get(make_key(seq_len=256)) == _outcome(12, 256)
    assert store.get(make_key(seq_len=512)) is None


def test_records_are_listed_and_removed(store, make_key):
    """Every record is listed with its key; removing one leaves the others; clearing leaves none and counts them."""
    keys = [make_key(seq_len=length) for length in (64, 128, 256)]
    for size, key in enumerate(keys):
        store.put(key, _outcome(size + 1, key.seq_len))
    assert set(store.keys()) == set(keys)
    assert {record.key.seq_len: record.result.max_batch_size for record in store.records()} == {64: 1, 128: 2, 256: 3}
    assert all(record.created.tzinfo is not None for record in store.records())
    assert (store.remove(keys[0]), store.remove(keys[0])) == (True, False)
    assert set(store.keys()) == set(keys[1:])
    assert (store.clear(), store.clear(), list(store.keys())) == (2, 0, [])


def test_a_slot_is_one_keys_place(store, make_key):
    """An entry reads and writes its own key's record and no other."""
    entry = store.entry(make_key())
    assert entry.get() is None
    entry.put(_outcome(32))
    assert entry.get() == store.get(make_key()) == _outcome(32)
    assert store.entry(make_key(gpu="K80")).get() is None


def _path(store: Store) -> str:
    (name,) = os.listdir(store.url)
    return f"{store.url}/{name}"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "it is cut short or not JSON"),
        (lambda data: b"", "it is cut short or not JSON"),
        (lambda data: data.replace(b"Titan X", b"Titan Y"), "its checksum does not match"),
        (lambda data: data.replace(b'"schema": 7', b'"schema": 1'), "its schema is 1; this version reads 7"),
    ],
)
def test_a_damaged_record_is_ignored_named_and_replaced(damage, reason, tmp_path, make_key):
    """A damaged record is no answer; one warning names the file and the reason; the next put makes it whole."""
    store = Store(tmp_path)
    store.put(make_key(), _outcome(32))
    path = _path(store)
    with open(path, "rb+") as file:
        data = damage(file.read())
        file.seek(0)
        file.truncate()
        file.write(data)
    message = f"ignoring the damaged cache record {path}: {reason}. The next result for it will replace it."
    for look in (lambda: store.get(make_key()), lambda: next(store.records(), None)):
        with pytest.warns(DamagedRecordWarning) as caught:
            assert look() is None
        assert [str(warning.message) for warning in caught] == [message]
        assert caught[0].filename == __file__
    store.put(make_key(), _outcome(33))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(make_key()) == _outcome(33)


def test_another_keys_record_is_not_this_ones_answer(tmp_path, make_key):
    """A sound record under another key's name, as a careless copy leaves it, is damaged."""
    store = Store(tmp_path)
    store.put(make_key(), _outcome(32))
    other = f"{tmp_path}/{make_key(gpu='K80').digest}.json"
    os.rename(_path(store), other)
    with pytest.warns(DamagedRecordWarning) as caught:
        assert store.get(make_key(gpu="K80")) is None
    assert str(caught[0].message) == (
        f"ignoring the damaged cache record {other}: it holds another key's result. "
        "The next result for it will replace it."
    )


def test_one_damaged_record_does_not_hide_the_others(tmp_path, make_key):
    """Listing goes on behind a damaged record, and clearing removes it too."""
    store = Store(tmp_path)
    for length in (64, 128):
        store.put(make_key(seq_len=length), _outcome(length, length))
    (tmp_path / f"{make_key(seq_len=64).digest}.json").write_bytes(b"{")
    with pytest.warns(DamagedRecordWarning):
        assert list(store.keys()) == [make_key(seq_len=128)]
    assert store.clear() == 2
    assert os.listdir(tmp_path) == []


def test_other_peoples_files_are_left_alone(tmp_path, make_key):
    """Pointed at a directory with other things in it, the store neither reads nor removes what is not its own."""
    names = ["notes.json", "thesis.tex", ".hidden.tmp", "a" * 63 + ".json", "A" * 64 + ".json"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / ("b" * 64 + ".json")).mkdir()
    store = Store(tmp_path)
    store.put(make_key(), _outcome(1))
    assert [record.result for record in store.records()] == [_outcome(1)]
    assert store.clear() == 1
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "b" * 64 + ".json"])


def test_clearing_takes_a_killed_writers_file(tmp_path, make_key):
    """Clearing removes temporary files of any age."""
    stale = tmp_path / f".{make_key().digest}.json.{'a' * 32}.tmp"
    stale.write_bytes(b"half")
    store = Store(tmp_path)
    assert (list(store.keys()), store.clear(), os.listdir(tmp_path)) == ([], 0, [])


@settings(derandomize=True, max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 10_000), unique=True, min_size=2, max_size=8))
def test_two_keys_never_share_a_record(lengths, make_key):
    """However many keys are put, each is answered with its own outcome."""
    store = Store("memory://never-share")
    store.clear()
    for length in lengths:
        store.put(make_key(seq_len=length), _outcome(length, length))
    assert [store.get(make_key(seq_len=length)).max_batch_size for length in lengths] == lengths
    assert len(list(store.keys())) == len(lengths)


def test_a_place_that_cannot_be_used_fails_early(tmp_path, make_key):
    """A place that cannot be written fails at the check, with the message that a put would give an hour later."""
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "cache")
    for act in (
        store.check_writable,
        lambda: store.put(make_key(), _outcome(1)),
        lambda: store.get(make_key()),
        lambda: list(store.keys()),
        store.clear,
    ):
        with pytest.raises(CacheFailed) as caught:
            act()
        assert str(caught.value) == (
            f"the cache at {tmp_path}/file/cache cannot be used: Not a directory. "
            "Set BATCHFINDER_CACHE or --cache to a place that can be written, or pass --no-cache."
        )


def test_a_place_that_can_be_used_passes(store):
    """The check passes where a put would, and leaves no record."""
    store.check_writable()
    assert list(store.records()) == []


def test_the_default_place(monkeypatch, tmp_path):
    """`BATCHFINDER_CACHE` decides; unset or empty, it is the user's cache directory. Looking does not create it."""
    monkeypatch.setenv("BATCHFINDER_CACHE", "s3://bucket/cache")
    assert default_cache_url() == Store().url == "s3://bucket/cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for unset in (lambda: monkeypatch.setenv("BATCHFINDER_CACHE", ""), lambda: monkeypatch.delenv("BATCHFINDER_CACHE")):
        unset()
        assert default_cache_url() == Store().url == platformdirs.user_cache_dir("batchfinder", appauthor=False)
    assert os.listdir(tmp_path) == []


def test_a_home_directory_is_expanded(monkeypatch, tmp_path):
    """A tilde means the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store("~/cache").url == f"{tmp_path}/cache"
    assert repr(Store("~/cache")) == f"Store('{tmp_path}/cache')"


def test_importing_it_is_cheap(tmp_path):
    """Importing the cache and naming a store imports neither fsspec, tenacity, asyncio nor torch; using it no torch."""
    code = (
        "import sys; from batchfinder.cache import Store; store = Store(sys.argv[1])\n"
        "heavy = {'fsspec', 'tenacity', 'asyncio', 'torch', 'numpy', 'pickle'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "list(store.keys()); store.check_writable()\n"
        "print(sorted({'torch', 'numpy', 'aiohttp', 'requests'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n[]\n"


@pytest.fixture
def two(tmp_path, make_key) -> tuple[Store, str]:
    """A store of two records, and the path of one of them, which a test spoils."""
    store = Store(tmp_path)
    for length in (64, 128):
        store.put(make_key(seq_len=length), _outcome(length, length))
    return store, f"{tmp_path}/{make_key(seq_len=64).digest}.json"


def _unreadable(path):
    os.remove(path)
    os.symlink(os.path.basename(path), path)  # a loop, which not even root can read


def _pipe(path):
    os.remove(path)
    os.mkfifo(path)


def _folder(path):
    os.remove(path)
    os.mkdir(path)


def _endless(path):
    os.remove(path)
    os.symlink("/dev/zero", path)


def _huge(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _not_text(path):
    with open(path, "wb") as file:
        file.write(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("spoil", "reason", "listed"),
    [
        (_unreadable, "it cannot be read: Too many levels of symbolic links", False),
        (_pipe, "it cannot be read: it is not a regular file", False),
        (_folder, "it cannot be read: Is a directory", False),
        (_endless, "it cannot be read: it is not a regular file", False),
        (_huge, "it cannot be read: it is larger than 16.00 MiB", True),
        (_not_text, "it is cut short or not JSON", True),
    ],
)
def test_one_bad_record_disables_nothing(spoil, reason, listed, two, make_key):
    """It is warned of and taken for none, at once; the other one is listed, found and exported."""
    store, path = two
    spoil(path)
    with pytest.warns(DamagedRecordWarning) as caught:
        assert store.get(make_key(seq_len=64)) is None
    assert [warning.message.reason for warning in caught] == [reason]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [record.key.seq_len for record in store.records()] == [128]
    assert len(told) == listed
    assert store.get(make_key(seq_len=128)) == _outcome(128, 128)


def test_a_folder_in_a_records_place_disables_nothing(two, make_key):
    """No result can take its place, which is told; nothing else is lost, and no temporary file is left."""
    store, path = two
    _folder(path)
    with pytest.warns(UserWarning, match=r"was left alone, and its result is not cached: Is a directory$") as caught:
        store.put(make_key(seq_len=64), _outcome(64, 64))
    assert [str(warning.message).split(" ")[0] for warning in caught] == [path]
    store.put(make_key(seq_len=256), _outcome(256, 256))
    assert [record.key.seq_len for record in store.records()] == [
        length for _, length in sorted((make_key(seq_len=each).digest, each) for each in (128, 256))
    ]
    assert len(os.listdir(store.url)) == 3


def test_a_record_that_is_not_ours_to_read(make_key):
    """Mode 000: a warning, and the other one is found. Nothing is hidden from root, which becomes another user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        store = Store(folder)
        for length in (64, 128):
            store.put(make_key(seq_len=length), _outcome(length, length))
        path = f"{folder}/{make_key(seq_len=64).digest}.json"
        os.chmod(path, 0)
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(65534)
            with pytest.warns(DamagedRecordWarning) as caught:
                assert [record.key.seq_len for record in store.records()] == [128]
        finally:
            if root:
                os.seteuid(0)
    assert [warning.message.reason for warning in caught] == ["it cannot be read: Permission denied"]


def test_a_forged_record_is_ignored(two, make_key):
    """A right checksum is not enough: what makes no sense is warned of, and is no answer."""
    store, path = two
    (record,) = (record for record in store.records() if record.key.seq_len == 64)
    forged = dataclasses.replace(record, result=dataclasses.replace(record.result, max_batch_size=10**9))
    with open(path, "wb") as file:
        file.write(encode(forged))
    with pytest.warns(DamagedRecordWarning, match="its own trials contradict its result of 1000000000"):
        assert store.get(make_key(seq_len=64)) is None


def test_clearing_leaves_what_others_wrote(two):
    """A file with a record's name and other contents stays, with a warning; damaged records go."""
    store, path = two
    with open(path, "r+b") as file:
        file.truncate(100)
    foreign = [f"{store.url}/{digit * 64}.json" for digit in "abc"]
    for name, content in zip(foreign, (b'{"layers": 3}', b"\x89PNG", b'{"schema": 6}'), strict=True):
        with open(name, "wb") as file:
            file.write(content)
    with pytest.warns(UserWarning, match="was left alone") as caught:
        assert store.clear() == 2
    assert sorted(f"{store.url}/{name}" for name in os.listdir(store.url)) == foreign
    assert [str(warning.message).split(" ")[0] for warning in caught] == foreign


def test_at_debug_it_is_said_what_differs_from_the_nearest_record(store, make_key, caplog):
    """Of all records the one with the fewest other fields; nothing is read for it at other levels."""
    store.put(make_key(seq_len=64, precision="fp32", mode="forward"), _outcome(3, 64), "far")
    near = make_key(versions={**make_key().versions, "torch": "1.0"})
    store.put(near, _outcome(3), "near")
    with caplog.at_level("INFO", "batchfinder"):
        assert store.get(make_key()) is None
    assert not caplog.records
    with caplog.at_level("DEBUG", "batchfinder"):
        assert store.get(make_key()) is None
    (said,) = caplog.messages
    assert "the nearest, near of " in said
    assert near.digest[:12] in said
    torch = make_key().versions["torch"]
    assert said.endswith(f"differs in versions.torch (now {torch!r}, then '1.0')")
    caplog.clear()
    store.clear()
    with caplog.at_level("DEBUG", "batchfinder"):
        assert store.get(make_key()) is None
    assert caplog.messages == [f"nothing is cached at {store.url}"]


def test_a_password_is_not_shown():
    """Neither in the store's own URL, nor in the error of a server that is not there, nor in what that says."""
    store = Store("ftp://someone:hunter2@127.0.0.1:1/results")
    assert repr(store) == "Store('ftp://someone:***@127.0.0.1:1/results')"
    with pytest.raises(CacheFailed, match=r"the cache at ftp://someone:\*\*\*@127.0.0.1:1/results cannot") as caught:
        store.check_writable()
    assert "hunter2" not in f"{caught.value} {caught.value.url} {caught.value.reason}"
    assert Store("s3://key:a:b@c@bucket/x").url == "s3://key:***@bucket/x"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """The name of the file that shows whether there is room is taken, and its bytes are not."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheFailed, match="No space left on device"):
        Store(tmp_path).check_writable()
    assert list(tmp_path.iterdir()) == []
