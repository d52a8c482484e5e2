"""Input that is wrong in ways of its own: options, paths and URLs that the system, Python or argparse stumble over."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from batchfinder.cache import Store
from batchfinder.cache.record import encode, write_export
from batchfinder.cli import options
from batchfinder.cli.main import main
from tests.cli.test_cache import _record

LONG, HUGE, DIGITS = "n" * 300, "x" * 100_000, "9" * 5000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a loop of links; the cache is in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """What a command that fails says on its one line of stderr."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("batchfinder: ")
    assert err.count("\n") == 1
    return err.removeprefix("batchfinder: ").rstrip("\n")


@pytest.mark.parametrize("word", ["--gpu=--", "--model=--", "--no-such=--"])
def test_a_value_of_two_dashes(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse takes it for the end of the options: it is wrong usage."""
    with pytest.raises(SystemExit) as ending:
        main(["sweep", word])
    assert ending.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {word[:-3]}: expected one argument\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--seq-len", DIGITS),
        ("sweep", "--max-batch-size", str(1 << 41)),
        ("sweep", "--min-batch-size", DIGITS),
        ("sweep", "--multiple-of", DIGITS),
        ("sweep", "--target-batch-size", DIGITS),
        ("sweep", "--budget", DIGITS),
        ("sweep", "--budget", f"{DIGITS}GiB"),
        ("sweep", "--headroom", DIGITS),
        ("sweep", "--headroom", f"{DIGITS}GiB"),
        ("sweep", "--tolerance", DIGITS),
        ("sweep", "--device", f"cuda:{DIGITS}"),
        ("sweep", "--gpu", f"v100-{DIGITS}gb"),
        ("estimate", "--batch-size", DIGITS),
        ("estimate", "--num-gpus", DIGITS),
        ("profile", "--accumulation", DIGITS),
        ("cache", "show", DIGITS),
    ],
)
def test_numbers_of_thousands_of_digits(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused, and not repeated whole."""
    assert len(said(capsys, *arguments)) < 1200


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("sweep", "--csv", LONG), "a file that can be written (File name too long)"),
        (("sweep", "--markdown", f"{LONG}/file"), "a file in a folder that exists"),
        (("sweep", "--plot", f"{LONG}.png"), "a file that can be written (File name too long)"),
        (("sweep", "--csv", "loop"), "a file that can be written (Too many levels of symbolic links)"),
        (("sweep", "--csv", "loop/file"), "a file in a folder that exists"),
        (("sweep", "--csv", "/dev/full"), "a file that can be written (No space left on device)"),
        (("profile", "--snapshot", "pipe"), "a file that can be written (No such device or address)"),
        (("cache", "import", LONG), "a file that can be read (File name too long)"),
        (("cache", "import", "loop"), "a file that can be read (Too many levels of symbolic links)"),
        (("cache", "import", "."), "a file that can be read (Is a directory)"),
        (("cache", "import", "pipe"), "a file that can be read (nothing came through this pipe in 0.1 s)"),
        (("cache", "import", "/dev/zero"), "a file of at most 1.00 MiB"),
        (("cache", "export", "loop"), "a file that can be written (Too many levels of symbolic links)"),
        (("cache", "export", "pipe"), "a file that can be written (No such device or address)"),
    ],
)
def test_files(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read or written is told with the system's reason, before the work, and nothing is waited for."""
    monkeypatch.setattr(options, "_PIPE_SECONDS", 0.1)
    monkeypatch.setattr(options, "MAX_READ_BYTES", 1 << 20)
    os.mkfifo("pipe")
    option, path = (arguments[1], arguments[2]) if arguments[0] != "cache" else ("FILE", arguments[2])
    assert said(capsys, *arguments) == f"{option}: invalid value {path!r}; expected {reason}."


@contextmanager
def another_user() -> Iterator[None]:
    """Nothing is hidden from root, which becomes another user."""
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)


def test_folders_without_permission(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the output, of the cache and of an imported file."""
    with tempfile.TemporaryDirectory() as closed:
        Path(closed, "there").touch()
        os.chmod(closed, 0)
        with another_user():
            for path in (f"{closed}/new", f"{closed}/there", f"{closed}/no/new"):
                assert f"invalid value '{path}'; expected a file " in said(capsys, "sweep", "--csv", path)
                assert "(Permission denied)" in said(capsys, "cache", "import", path, "--cache", "memory://none")
            cache = said(capsys, "sweep", "--cache", f"{closed}/cache")
            assert cache.startswith(f"the cache at {closed}/cache cannot be used: Permission denied. ")
        os.chmod(closed, 0o700)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("~nosuchuser/cache", "there is no such user on this machine"),
        ("s3:/bucket/cache", "it is no URL; one begins with s3://"),
        ("s3//bucket", "it is no URL; one begins with s3://"),
        ("gs:bucket/cache", "it is no URL; one begins with gs://"),
        ("file:/cache", "it is no URL; one begins with file://"),
        ("memory:/cache", "it is no URL; one begins with memory://"),
    ],
)
def test_a_cache_that_is_mistyped(url: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told, and not taken for a local path."""
    for command in (("cache", "list"), ("sweep",)):
        assert said(capsys, *command, "--cache", url).startswith(f"the cache at {url} cannot be used: {reason}. ")
    assert [path.name for path in folder.iterdir()] == ["loop"]


def test_a_local_cache_with_a_colon(folder: Path) -> None:
    """What is no protocol is a name like any other; `./` in front makes every name a path."""
    for name in ("run:1", "./s3:", "s3"):
        Store(folder / name if name == "s3" else name).check_writable()
    assert {path.name for path in folder.iterdir()} == {"loop", "run:1", "s3:", "s3"}


def test_a_working_folder_that_is_gone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is relative to it is told; what is not works."""
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    words = "the cache at here cannot be used: it is relative to the current folder, which has been removed. "
    assert said(capsys, "cache", "list", "--cache", "here").startswith(words)
    assert "(No such file or directory)" in said(capsys, "sweep", "--csv", "file.csv")
    assert "(No such file or directory)" in said(capsys, "cache", "import", "file.json")
    assert main(["cache", "list"]) == 0


@pytest.mark.parametrize("name", ["~nosuchuser/model", "~nosuchuser/config.json", f"./{LONG}", "loop/config.json"])
def test_a_model_that_is_not_there(name: str) -> None:
    """Whatever the system says of its path, the message is that the model does not exist."""
    from batchfinder.errors import InvalidValue
    from batchfinder.models.build import build_workload

    with pytest.raises(InvalidValue, match=r"expected a config\.json or a folder that exists"):
        build_workload(name)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--model", HUGE),
        ("sweep", "--gpu", HUGE),
        ("sweep", "--instance", HUGE),
        ("sweep", "--precision", HUGE),
        ("sweep", "--device", HUGE),
        ("reproduce", HUGE),
        ("cache", "show", HUGE),
        ("cache", "import", HUGE),
        ("sweep", "--csv", f"{HUGE}/sweep.csv"),
    ],
)
def test_names_of_100_kb(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """They are not repeated whole."""
    assert len(said(capsys, *arguments)) < 1200


def test_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """A record's names are shown without what a terminal would take for commands, and not without end."""
    store = Store()
    record = replace(_record(128, 134), label=f"\x1b[31mred\x1b]0;title\x07\u202e{HUGE}\n")
    store.put_record(record)
    for command in ("list", f"show {record.key.digest[:8]}"):
        assert main(["cache", *command.split()]) == 0
        out, err = capsys.readouterr()
        assert (err, r"\x1b[31mred\x1b]0;title\x07\u202exx" in out) == ("", True)
        assert all(letter.isprintable() for letter in out.replace("\n", ""))
        assert max(map(len, out.splitlines())) < 500
    said(capsys, "sweep", "--model", "\x1b[31mred")
    said(capsys, "cache", "show", "\x1b[31mred")


def test_a_record_without_a_time_zone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An imported file that has one is refused, whether or not the cache has that record."""
    naive = replace(_record(128, 134), created=datetime(2026, 11, 20, 21, 16, 5))
    (folder / "file.json").write_text(write_export([naive]))
    for _ in range(2):
        assert said(capsys, "cache", "import", "file.json").endswith("record 1 of 1: its time has no time zone.")
        Store().put_record(_record(128, 134))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"batchfinder_cache": 1, "records": [' + "[" * 900 + "]" * 900 + "]}",
        '{"batchfinder_cache": 1, "records": [{"schema": ' + "[" * 900 + "]" * 900 + "}]}",
        f'{{"batchfinder_cache": {DIGITS}, "records": []}}',
        '{"batchfinder_cache": ' + DIGITS[:4000] + ', "records": []}',
        '{"batchfinder_cache": 1, "records": [{"schema": ' + DIGITS[:4000] + "}]}",
        encode(_record(128, 134)).decode(),
        "\ufeff{}",
        "\x00" * 1000,
    ],
    ids=range(10),
)
def test_an_import_that_is_none(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nested deeply, with numbers of thousands of digits, or another file: one line."""
    (folder / "file.json").write_text(text)
    words = said(capsys, "cache", "import", "file.json")
    assert words.startswith("FILE: invalid value 'file.json'; expected a file written by `cache export`; ")
    assert len(words) < 1200


def test_an_import_through_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe that somebody writes to, as `<(zcat file.gz)`, is read to its end."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        for part in write_export([_record(128, 134)]).partition('"key"'):
            os.write(writer, part.encode())
        os._exit(0)
    os.close(writer)
    assert main(["cache", "import", f"/dev/fd/{reader}"]) == 0
    os.close(reader)
    os.wait()
    assert capsys.readouterr().out == f"1 record imported into {folder / 'cache'}\n"
