"""The command `cache`, on records written by the library."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchfinder.cache import Record, Store
from batchfinder.cli.main import main
from batchfinder.results import Measurement, Rate, SearchResult, Shape, StopReason, Throughput, Trial, Verdict
from tests.cache.conftest import FIELDS, CacheKey

DAY = datetime(2026, 11, 20, 21, 16, 5, tzinfo=UTC)


def _record(seq_len: int, size: int, day: datetime = DAY) -> Record:
    fit = Measurement(Verdict.FITS, 11 << 30, 23 << 29, 0.25)
    full = Measurement(Verdict.OUT_OF_MEMORY, seconds=0.5, message="CUDA out of memory.")
    trials = (Trial(size, Shape(seq_len), fit), Trial(size + 1, Shape(seq_len), full))
    outcome = SearchResult(Shape(seq_len), size, StopReason.EXACT, fit, trials, "simulated", ("NCCL buffers",))
    return Record(CacheKey(**{**FIELDS, "seq_len": seq_len}), outcome, day, "bert-base")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two answers, in the folder that the verb looks into, as it is named from the current one."""
    monkeypatch.setenv("BATCHFINDER_CACHE", "memory://of-test-cache")
    store = Store()
    store.clear()
    for seq_len, size in ((128, 134), (64, 269)):
        store.put_record(_record(seq_len, size))
    return store


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["cache", *arguments])
    return (code, *capsys.readouterr())


def test_list(cache: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each answer, by model, GPU and length, and the same as JSON."""
    one, two = (_record(64, 269).key.digest[:12], _record(128, 134).key.digest[:12])
    assert _run(capsys, "list") == (
        0,
        f"""\
Cached results at memory://of-test-cache

record        model      GPU      seq len  precision  mode   max batch  source          found
─────────────────────────────────────────────────────────────────────────────────────────────
{one}  bert-base  Titan X       64  32         train        269  simulated  2026-11-20
{two}  bert-base  Titan X      128  32         train        134  simulated  2026-11-20
""",
        "",
    )
    code, out, _ = _run(capsys, "list", "--json")
    printed = json.loads(out)
    assert (code, printed["url"]) == (0, "memory://of-test-cache")
    assert [record["outcome"]["max_batch_size"] for record in printed["records"]] == [269, 134]


def test_the_size_at_full_speed_is_listed_where_it_is_known(cache: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """And shown with every size that was timed."""
    record = _record(64, 269)
    rates = Rate(190, 808.0, 0.01), Rate(269, 816.0, 0.02)
    timed = replace(record.result, throughput=Throughput(190, 269, rates, True, 5, 0.004))
    cache.put_record(replace(record, result=timed))
    _, out, _ = _run(capsys, "list")
    heading, _, one, other = out.splitlines()[2:]
    assert heading.endswith("found  full speed")
    assert (one.split()[-2:], other.split()[-1]) == (["2026-11-20", "190"], "2026-11-20")
    _, out, _ = _run(capsys, "show", record.key.digest[:12])
    assert "full speed from 190 on, at 808 ± 1.0 % samples/s (best: 816 ± 2.0 % at 269)" in out


@pytest.mark.parametrize(("answer", "gone"), [("", False), ("n\n", False), ("y\n", True)])
def test_a_terminal_is_asked_before_all_goes(
    cache: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool
) -> None:
    """With how many there are; --yes does not ask."""
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, _, said = _run(capsys, "clear")
    assert "remove all 2 records of memory://of-test-cache, measured ones too? [y/N]" in said
    assert (code, len(list(cache.records()))) == ((0, 0) if gone else (1, 2))
    assert ("nothing was removed" in said) == (not gone)
    assert _run(capsys, "clear", "--yes")[0] == 0
    assert not list(cache.records())


def test_an_empty_cache(cache: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, and how much went."""
    assert _run(capsys, "clear") == (0, "2 records removed from memory://of-test-cache\n", "")
    assert _run(capsys, "list") == (0, "the cache at memory://of-test-cache is empty\n", "")


def test_show(cache: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """All that the answer depends on, and every size tried."""
    digest = _record(64, 269).key.digest
    code, out, err = _run(capsys, "show", digest[:5])
    assert (code, err) == (0, "")
    assert (
        out
        == f"""\
bert-base: max batch 269
simulated, found 2026-11-20 21:16 (the next size up was probed and failed)
record {digest}

depends on              value
───────────────────────────────────────────────────────────────────────────────
model                   bert-base:3f2a
gpu                     Titan X
total                   11.92 GiB
usable                  11.46 GiB
seq len                 64
mode                    train
precision               32
optimizer               adamw
optimizer options       betas=0.9 0.999, foreach=True, lr=5e-05, weight_decay=0
attention               eager
gradient checkpointing  False
accumulation            1
allocator               expandable_segments=False
max batch size
floor                   1
multiple of             1
tolerance               0
headroom                0 B
source                  simulated
versions                batchfinder=0.1.0, torch=2.13.0

left out or assumed: NCCL buffers
docs/glossary.md explains the words

Sizes tried

batch size  verdict        peak allocated  peak reserved  seconds
─────────────────────────────────────────────────────────────────
       269  fits                11.00 GiB      11.50 GiB    0.250
       270  out of memory                                   0.500
"""
    )
    code, out, _ = _run(capsys, "show", digest, "--json")
    assert (code, json.loads(out)["outcome"]["max_batch_size"]) == (0, 269)


def test_clear_some(cache: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the answers that are named go."""
    digest = _record(64, 269).key.digest
    assert _run(capsys, "clear", digest[:6], digest) == (0, "1 record removed from memory://of-test-cache\n", "")
    assert [record.key.seq_len for record in cache.records()] == [128]


def test_to_another_machine(cache: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was exported is taken in whole; of two answers to one question the newer stays."""
    file = tmp_path / "answers.json"
    assert _run(capsys, "export", str(file)) == (
        0,
        f"2 records of memory://of-test-cache written to {file}\n",
        "",
    )
    there = Store("memory://of-test-there")
    there.clear()
    later = _record(64, 270, DAY.replace(year=2027))
    there.put_record(later)
    assert _run(capsys, "import", str(file), "--cache", there.url) == (
        0,
        "1 record imported into memory://of-test-there; 1 skipped, as the cache has the same or a newer one\n",
        "",
    )
    assert sorted(record.result.max_batch_size for record in there.records()) == [134, 270]
    assert later in there.records()
    assert _run(capsys, "export", "-")[1] == file.read_text()


def test_mistakes(cache: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told in one line, and changes nothing."""
    damaged, text = tmp_path / "damaged.json", tmp_path / "text.json"
    _run(capsys, "export", str(damaged))
    damaged.write_text(damaged.read_text().replace("269", "2690"))
    text.write_bytes(b"\xff\xfe")
    said = {
        ("show", "xyz"): "unknown cache record 'xyz'. `batchfinder cache list` lists all records.",
        ("clear", ""): "RECORD: invalid value ''; expected more digits: 2 records begin with these.",
        ("import", str(tmp_path / "no")): f"FILE: invalid value '{tmp_path / 'no'}'; expected a file that can be read "
        "(No such file or directory).",
        ("import", str(text)): f"FILE: invalid value '{text}'; expected a file that can be read (it is not text).",
        ("import", str(damaged)): f"FILE: invalid value '{damaged}'; expected a file written by `cache export`; record "
        f"{1 + sorted(r.key.digest for r in cache.records()).index(_record(64, 269).key.digest)} of 2: its checksum "
        "does not match.",
        ("export", str(tmp_path)): f"FILE: invalid value '{tmp_path}'; expected a file that can be written "
        "(Is a directory).",
    }
    for arguments, message in said.items():
        assert _run(capsys, *arguments) == (1, "", f"batchfinder: {message}\n")
    assert len(list(cache.records())) == 2
