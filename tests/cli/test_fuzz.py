"""Random command lines and random damage to a cache: every command ends with a documented exit code and words."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from batchfinder.cache import Store
from batchfinder.cache.key import canonical_json
from batchfinder.cache.record import write_members
from batchfinder.cli import estimate, options, profile, reproduce, stub, sweep, sweep_request
from batchfinder.cli.main import main
from batchfinder.cli.parser import COMMANDS
from batchfinder.errors import BatchFinderError, InvalidValue
from tests.cli.test_cache import _record

CASES = 60
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 1) + [pytest.mark.exhaustive] * (seed >= 3))
    for seed in range(60)
]

VALUES = (
    *("1", "8", "0", "-1", "007", "1.5", "1e9", "nan", "inf", "٣", "²", "½", "9" * 25, "9" * 5000, "", " ", "-", "="),
    *("1%", "0.5", "100%", "1GiB", "12 GB", "0B", "GiB", "1e3MiB", "9" * 400 + "GiB", "cpu", "cuda", "cuda:1", "auto"),
    *("bert-base", "bert-bse", "mine:tiny", "a:b:c", "no.json", "folder", "loop", "pipe", "file.json", "x" * 9000),
    *("titan x", "v100-32gb", "t4", "p3.2xlarge", "train", "fp32", "adamw", "sdpa", "module", "all", "titan-x"),
    *("memory://fuzz", "nope://x", "s3:/x", "here", "~nosuchuser/x", "a\x1b[31mb", "\udcff", "é\u202e", "a" * 300),
    *("sweep.csv", "out.png", "out.svg", "folder/out.png", "/dev/full", "/dev/null", "loop/x", "no/such/file"),
)
LETTERS = "0123456789aeGB%:=-_ .,;*?'\"\\{}[]()\x1b\u202e\udc80²é"
"""What is put into a value: no slash and no tilde, since outputs are written."""

JUNK = (
    *(None, True, 0, 1, -1, 1.5, -0.0, 1e308, 2**31, 2**63, 10**30, 10**4000, "", "x", "é\x1b[0m", "9" * 5000),
    *([], [1], {}, {"a": 1}, [[[[]]]], "FITS", "OUT_OF_MEMORY", "EXACT", "2026-11-20T21:16:05", "x" * 100_000),
)


@dataclass
class Ended:
    """A command that has ended."""

    code: object
    out: str
    err: str


def run(*arguments: str, stdin: str = "") -> Ended:
    """Run a command in this process, and check how it ended."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code: object = main(arguments)
        except SystemExit as ending:
            code = ending.code
    said = err.getvalue()
    assert code in (0, 1, 2), f"{arguments} ended with {code}: {said}"
    assert "Traceback" not in said + out.getvalue(), arguments
    assert "internal error" not in said, arguments
    if code == 2 and arguments[0] not in ("dry-run", "find"):  # theirs is that there is no answer
        assert said.startswith("usage: "), (arguments, said)
    elif code:
        assert said.startswith(("batchfinder: ", "usage: ") if code == 2 else "batchfinder: "), (arguments, said)
    if not said.startswith("usage: "):  # argparse repeats what it was given
        assert len(said) < 40_000, arguments
        assert all(letter.isprintable() for letter in said.replace("\n", "")), arguments
    return Ended(code, out.getvalue(), said)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what commands may stumble over. Valid requests end before anything is built."""

    def end(*arguments: object, **settings: object) -> NoReturn:
        raise BatchFinderError("this would be work")

    def no_card(device: str) -> NoReturn:
        raise InvalidValue("device", device, "another one")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path / "stub"))
    monkeypatch.setattr(stub, "install", end)
    monkeypatch.setattr(stub, "open_session", end)
    monkeypatch.setattr(sweep_request, "query_gpu", no_card)
    monkeypatch.setattr(options, "_PIPE_SECONDS", 0.001)
    monkeypatch.setattr(options, "MAX_READ_BYTES", 1 << 20)
    for module, name in ((sweep, "find_rows"), (estimate, "run_estimate"), (profile, "Simulation")):
        monkeypatch.setattr(module, name, end)
    monkeypatch.setattr(reproduce, "Simulation", end)
    monkeypatch.setattr(reproduce, "require_card", end)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.json").write_text('{"model_type": "bert"}')
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def mutated(rng: random.Random, value: str) -> str:
    """A value with some letters put in, taken out or doubled."""
    for _ in range(rng.choice((0, 0, 1, 1, 3))):
        at = rng.randrange(len(value) + 1)
        value = value[:at] + rng.choice((rng.choice(LETTERS), value[at : at + 1] * 2, "")) + value[at + 1 :]
    return value if not value.startswith(("/", "~")) or value in VALUES else "x"


def command_line(rng: random.Random) -> list[str]:
    """A command with some of its options, most of them with values that another one takes."""
    name = rng.choice(list(COMMANDS))
    command, words = COMMANDS[name], [name]
    if command.commands is not None:
        name = rng.choice(list(command.commands))
        command = command.commands[name]
        words.append(name)
    known = {option: settings for group in command.groups.values() for option, settings in group.items()}
    for option in rng.sample([*known, "--bogus", "-h"], k=min(len(known), rng.choice((0, 1, 1, 2, 3, 5)))):
        value = mutated(rng, rng.choice(VALUES))
        if not option.startswith("-"):
            words.append(value)
        elif known.get(option, {}).get("action") == "store_true" or rng.random() < 0.03:
            words.append(option)
        else:
            words += [f"{option}={value}"] if rng.random() < 0.6 else [option, value]
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words) + 1), rng.choice(("--", "-", "", "--=", "--x=--")))
    return words


@pytest.mark.parametrize("seed", SEEDS)
def test_command_lines(seed: int) -> None:
    """Whatever is typed: 0, 1 or 2, never an internal error, and messages of printable letters on stderr."""
    rng, codes = random.Random(seed), []
    for _ in range(2 * CASES):
        done = run(*command_line(rng), stdin=mutated(rng, '{"batchfinder_cache": 1, "records": []}'))
        codes.append(done.code)
        if done.code == 1:
            assert done.out == ""
    assert set(codes) == {0, 1, 2}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each name or index in it."""
    for name in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, name
        yield from places(value[name])


def junk(rng: random.Random, value: object) -> Any:
    """Another value in place of one."""
    if isinstance(value, int) and rng.random() < 0.5:
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 10**9, 0, float(min(value, 1 << 60))))
    if isinstance(value, list) and value and rng.random() < 0.5:
        return rng.choice((value[:-1], value + value, value[::-1]))
    return copy.deepcopy(rng.choice(JUNK))


def forged(rng: random.Random, data: bytes) -> bytes:
    """A record with some values exchanged, and mostly with a right checksum."""
    body = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        container, name = rng.choice(list(places(body)))
        if rng.random() < 0.1:
            del container[name]
        else:
            container[name] = junk(rng, container[name])
    body.pop("checksum", None)
    try:
        body["checksum"] = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        return write_members(body)
    except ValueError:
        return repr(body).encode(errors="replace")


def torn(rng: random.Random, data: bytes) -> bytes:
    """Bytes with some cut off, changed, doubled or put in."""
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    more = rng.choice((b"", rng.randbytes(3), b"\xff\xfe", b"[" * 5000, b"9" * 5000, data[at:end], b"\x00"))
    return rng.choice((data[:at], data[:at] + more + data[end:], data[:at] + more + data[at:]))


def spoil(rng: random.Random, path: Path) -> None:
    """Change a record's file, or put something else in its place."""
    data = path.read_bytes()
    path.unlink()

    def write(content: bytes) -> Callable[[], object]:
        return lambda: path.write_bytes(content)

    others: list[Callable[[], object]] = [
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("nowhere"),
        write(b""),
        write(data),
    ]
    changed = [write(forged(rng, data)) for _ in range(20)] + [write(torn(rng, data)) for _ in range(10)]
    rng.choice([*others, *changed])()
    if path.is_file() and rng.random() < 0.1:
        path.chmod(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_caches(seed: int, folder: Path) -> None:
    """Whatever has become of some records: all commands work, the sound records are found, and no senseless one is."""
    rng, sound = random.Random(seed), [_record(length, 8192 // length) for length in (64, 128, 256, 512)]
    for _ in range(CASES // 5):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        store = Store()
        for record in sound:
            store.put_record(record)
        spoiled = rng.sample(sound, k=rng.choice((1, 2, 4)))
        for record in spoiled:
            spoil(rng, folder / "cache" / f"{record.key.digest}.json")
        listed = json.loads(run("cache", "list", "--json").out)["records"]
        found = {record["key"]["seq_len"]: record["outcome"]["max_batch_size"] for record in listed}
        assert all(
            found[record.key.seq_len] == record.result.max_batch_size for record in sound if record not in spoiled
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for record in spoiled:
                result = store.get(record.key)
                assert result is None or 0 <= result.max_batch_size <= 2 * record.result.max_batch_size
        assert run("cache", "list").code == 0
        assert run("cache", "export", "all.json").code == 0
        for record in sound:
            run("cache", "show", record.key.digest[: rng.choice((0, 1, 8, 64))], *rng.choice(((), ("--json",))))
        assert run("cache", "import", "all.json").code == 0
        run("cache", "import", "-", stdin=torn(rng, (folder / "all.json").read_bytes()).decode(errors="replace"))
        assert run("cache", "clear").code == 0
        left = [
            path for path in (folder / "cache").iterdir() if path.name.startswith(tuple(r.key.digest for r in sound))
        ]
        assert {record.key.digest for record in spoiled} >= {path.stem for path in left}


@pytest.mark.parametrize("seed", SEEDS)
def test_imported_files(seed: int, folder: Path) -> None:
    """A file that was changed in any way is refused with one line, or what it holds makes sense."""
    rng = random.Random(seed)
    records = [_record(64, 269), replace(_record(128, 134), label="é\x1b")]
    for record in records:
        Store("memory://fuzz-from").put_record(record)
    for _ in range(CASES):
        texts = [forged(rng, write_members(json.loads(line))) for line in map(_text, records)]
        data = b'{"batchfinder_cache": 1, "records": [' + b", ".join(texts) + b"]}"
        data = torn(rng, data) if rng.random() < 0.5 else data
        Path("file.json").write_bytes(data)
        done = run("cache", "import", "file.json", "--cache", "memory://fuzz-to")
        assert (done.code, done.out == "") in ((0, False), (1, True))
        for record in Store("memory://fuzz-to").records():
            assert 0 <= record.result.max_batch_size <= 10**6
        assert run("cache", "list", "--cache", "memory://fuzz-to").code == 0
        Store("memory://fuzz-to").clear()


def _text(record: Any) -> str:
    from batchfinder.cache.record import encode

    return encode(record).decode()
