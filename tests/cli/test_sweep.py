"""`sweep`, as a whole process on a small model."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder.cli import sweep
from batchfinder.cli.main import main
from batchfinder.data.size_table import from_json
from batchfinder.devices import known_prices
from batchfinder.report.sweep import SweepRow
from batchfinder.results import Measurement, Shape, Trial, Verdict
from batchfinder.sizing.sweep_request import SweepRequest
from tests.cli.command import Done, Run, records_too_large
from tests.report.test_sweep import row as report_row

GIB = 1 << 30
INSTANCE = "p3.16xlarge: 8 x V100 16GB, 1.00 GiB budget"
T4 = "T4, 1.00 GiB budget"
ASKED_FOR = {
    "model": str,
    "seq_len": int,
    "gpu": str,
    "budget_bytes": int,
    "mode": str,
    "precision": str,
    "optimizer": str,
    "attention": str,
    "gradient_checkpointing": bool,
    "max_batch_size": int,
    "peak_allocated_bytes": int,
    "peak_reserved_bytes": int,
    "source": str,
    "trials": int,
    "seconds": float,
    "unmodelled": list,
}
MORE = {
    "unscaled": int,
    "stop": str,
    "needed_bytes": type(None),
    "needed_found_by": type(None),
    "published": type(None),
    "headroom_bytes": int,
    "failed_trials": int,
    "stopped_by": str,
    "found_by": str,
    "message": str,
    "recorder": str,
    "recorder_version": str,
}
PLAN = {
    "target_batch_size": int,
    "micro_batch_size": int,
    "accumulation": int,
    "num_devices": int,
    "effective_batch_size": int,
}


def test_json(small_json: Done) -> None:
    """`--json` prints one object with schema 1 and a row per cell, with every key that was asked for, and its type."""
    assert small_json.json.keys() == {"schema", "made_by", "rows"}
    assert small_json.json["schema"] == 1
    assert small_json.json["made_by"].keys() == {"command", "versions", "date"}
    rows = small_json.json["rows"]
    assert [(row["gpu"], row["seq_len"]) for row in rows] == [(T4, 16), (T4, 32), (INSTANCE, 16), (INSTANCE, 32)]
    for row in rows:
        costs = {"usd_per_hour": float} if row["gpu"] == INSTANCE else {}
        exact = int if row["effective_batch_size"] != row["target_batch_size"] else type(None)
        plan = PLAN | dict.fromkeys(("exact_micro_batch_size", "exact_accumulation"), exact)
        assert {name: type(value) for name, value in row.items()} == ASKED_FOR | MORE | plan | costs
        assert row["source"] == "simulated"
        assert (row["budget_bytes"], row["headroom_bytes"]) == (GIB, int(0.1 * GIB))
        assert row["peak_allocated_bytes"] <= row["peak_reserved_bytes"] <= GIB - int(0.1 * GIB)
        assert row["trials"] > row["failed_trials"] >= 1
        assert (row["stop"], row["stopped_by"], row["found_by"]) == ("exact", "out_of_memory", "simulated")


def test_plan(small_json: Done) -> None:
    """The plan for the effective batch uses micro-batches that fit, and all GPUs of an instance."""
    for row in small_json.json["rows"]:
        assert row["num_devices"] == (8 if row["gpu"] == INSTANCE else 1)
        assert row["micro_batch_size"] <= row["max_batch_size"]
        assert row["micro_batch_size"] * row["accumulation"] * row["num_devices"] == row["effective_batch_size"]
        assert row["target_batch_size"] == 100000
        assert abs(row["effective_batch_size"] - 100000) < row["num_devices"] * row["accumulation"]
        if row["effective_batch_size"] != 100000:
            assert row["exact_micro_batch_size"] * row["exact_accumulation"] * row["num_devices"] == 100000


def test_progress_is_plain_lines_on_stderr(small_json: Done) -> None:
    """Where stderr is no terminal, it has a line for each thing that takes time and one for each cell."""
    building, *found = small_json.err.splitlines()
    assert building == "building mine:tiny"
    for number, (line, row) in enumerate(zip(found, small_json.json["rows"], strict=True), 1):
        where = f"mine:tiny at {row['seq_len']} on {row['gpu']}"
        answer = f"{row['max_batch_size']} (simulated, {row['trials']} trials, {row['seconds']:.1f} s)"
        assert line == f"[{number}/4] {where}: {answer}"


def test_the_second_run_comes_from_the_cache(small_json: Done, small_table: Done) -> None:
    """The same command again finds every cell in the cache, with the same answers."""
    found = small_table.err.splitlines()[1:]
    answers = [row["max_batch_size"] for row in small_json.json["rows"]]
    assert [int(line.split(": ")[-1].split()[0]) for line in found] == answers
    assert all("(simulated, from the cache, " in line for line in found)


def test_a_cache_that_fills_up_loses_no_row(run: Run, tmp_path: Path) -> None:
    """Each is printed, with one warning, and no file is left."""
    lengths = ("--seq-len", "16", "--seq-len", "32")
    with records_too_large():
        done = run(
            "sweep", "--model", "mine:tiny", "--gpu", "t4", "--budget", "1GiB", *lengths, "--json", cache=tmp_path
        )
    assert [row["seq_len"] for row in done.json["rows"]] == [16, 32]
    assert [line for line in done.err.splitlines() if "warning" in line] == [
        f"batchfinder: warning: the cache at {tmp_path} cannot be used: File too large. Set BATCHFINDER_CACHE or "
        "--cache to a place that can be written, or pass --no-cache. The sweep goes on; what it finds is printed, and "
        "may not be cached."
    ]
    assert list(tmp_path.iterdir()) == []


def test_table(small_json: Done, small_table: Done) -> None:
    """The whole of stdout is plain text without escape codes or trailing blanks; figures are called "simulated"."""
    rows = small_json.json["rows"]
    wide = max(len(_plan(row)) for row in rows)
    missed = [abs(row["effective_batch_size"] - 100000) for row in rows if row["effective_batch_size"] != 100000]
    cells = [
        [
            "mine:tiny",
            f"{row['gpu']:<43}",
            f"{row['seq_len']:>7}",
            f"{row['max_batch_size']:>9}",
            f"{row['peak_reserved_bytes'] / 2**20:>9.2f} MiB",
            f"{_plan(row):>{wide}}",
            f"{row['usd_per_hour']:>5.2f}" if "usd_per_hour" in row else "    -",
            "simulated",
        ]
        for row in rows
    ]
    assert small_table.out.splitlines() == [
        "Largest training batch, simulated",
        "fp32, adamw, headroom 10%, for an effective batch of 100000, gradients kept between micro-batches",
        f"usable: 1.00 GiB of {T4}, 1.00 GiB of {INSTANCE}",
        f"recorder: fake device, PyTorch {torch.__version__}",
        "",
        f"model      {'GPU':<43}  seq len  max batch  peak reserved  {'micro-batch x accumulation':>{wide}}    $/h  "
        "source",
        "─" * (9 + 43 + 7 + 9 + 13 + wide + 5 + 9 + 7 * 2),
        *("  ".join(row) for row in cells),
        "",
        f"$/h: on demand {known_prices()['p3.16xlarge'].words}, for all GPUs of a row; --prices takes your own",
        "where a plan has three factors, the last is the number of GPUs",
        f"the effective batch of 100000 is missed by up to {max(missed)}, where no large micro-batch divides it: "
        f"{len(missed)} of 4 rows; --exact has it met",
        "from the cache: 4 of 4 rows",
        "1 assumption; --explain says which",
    ]


def _plan(row: dict[str, int]) -> str:
    devices = f" x {row['num_devices']}" if row["num_devices"] > 1 else ""
    exact = ""
    if row["effective_batch_size"] != row["target_batch_size"]:
        exact = f" (exactly 100000: {row['exact_micro_batch_size']} x {row['exact_accumulation']}{devices})"
    return f"{row['micro_batch_size']} x {row['accumulation']}{devices} = {row['effective_batch_size']}{exact}"


def test_files(small_json: Done, small_table: Done, small_folder: Path) -> None:
    """`--csv` holds the figures of `--json`, `--markdown` the words of the table."""
    rows = small_json.json["rows"]
    read = list(csv.DictReader(io.StringIO((small_folder / "sweep.csv").read_text())))
    made = [row.pop("made_by") for row in read]
    assert all(text.startswith("made on 20") and "--csv" in text and "(batchfinder " in text for text in made)
    assert read == [
        {
            name: "; ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
            for name, value in row.items()
        }
        for row in ({**row, "usd_per_hour": row.get("usd_per_hour")} for row in rows)
    ]
    markdown = (small_folder / "sweep.md").read_text()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    printed = [line.split("  ") for line in small_table.out.splitlines()[7:11]]
    assert table[2:] == [[cell.strip() for cell in line if cell.strip()] for line in printed]


def test_nothing_fits(run: Run) -> None:
    """A budget smaller than the model is an answer: 0, with the bytes that one sample needs, which are then enough."""
    small = run("sweep", "--model", "mine:shapeless", "--budget", "4MiB", "--json").row
    assert (small["max_batch_size"], small["seq_len"]) == (0, None)
    assert (small["peak_allocated_bytes"], small["peak_reserved_bytes"]) == (None, None)
    assert small["unscaled"] == 1
    needed = small["needed_bytes"]
    assert needed > 4 << 20
    assert small["needed_found_by"] == "simulated"
    assert run("sweep", "--model", "mine:shapeless", "--budget", str(needed), "--json").row["max_batch_size"] >= 1


def test_samples_of_one_shape(run: Run) -> None:
    """Where lengths make no difference there is one row, whatever was asked for."""
    row = run("sweep", "--model", "mine:undeclared", "--budget", "64MiB", "--json").row
    assert (row["seq_len"], row["max_batch_size"] > 1) == (None, True)
    done = run("sweep", "--model", "mine:undeclared", "--budget", "64MiB", "--seq-len", "64,128", "--json")
    assert done.row["max_batch_size"] == row["max_batch_size"]
    assert "warning: samples of mine:undeclared have one shape: a seq_len makes no difference to them" in done.err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nothing_fits_as_a_table(run: Run) -> None:
    """The table says what one sample needs where nothing fits; --explain, that it was recorded at the size itself."""
    done = run("sweep", "--model", "mine:own_optimizer", "--seq-len", "16", "--budget", "2MiB", "--explain")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[:3] == [
        "Largest training batch on 2.00 MiB budget, simulated",
        "fp32, the module's optimizer",
        "2.00 MiB usable",
    ]
    assert " 0  1 needs " in lines[7]
    assert "recorded at the size itself rather than scaled: 1 of the sizes tried" in lines


def test_sizes_that_do_not_scale_are_counted(run: Run) -> None:
    """A model whose step differs from size to size is recorded at each size tried, and the row says how many."""
    row = run(
        "sweep", "--model", "mine:changes", "--seq-len", "16", "--budget", "1GiB", "--max-batch-size", "9", "--json"
    ).row
    assert (row["max_batch_size"], row["stop"]) == (9, "cap")
    assert "the card's own kernels: those of compute capability 8.0 are assumed" in row["unmodelled"]
    assert row["unscaled"] == row["trials"] > 0


def test_allocator_settings_change_the_answer(run: Run, small_json: Done, small_folder: Path) -> None:
    """`expandable_segments` is taken from the environment, changes the figures and never finds the others' record."""
    row = run(
        *("sweep", "--model", "mine:tiny", "--seq-len", "16", "--gpu", "t4", "--budget", "1GiB", "--headroom", "10%"),
        *("--target-batch-size", "100000", "--json"),
        cache=small_folder / "cache",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    ).row
    usual = small_json.json["rows"][0]
    assert row["source"] == "simulated"
    assert row["max_batch_size"] >= usual["max_batch_size"]
    assert (row["max_batch_size"], row["peak_reserved_bytes"]) != (
        usual["max_batch_size"],
        usual["peak_reserved_bytes"],
    )


def test_published(run: Run) -> None:
    """On a Titan X the published figure stands beside ours, with its source."""
    done = run("sweep", "--model", "bert-base", "--seq-len", "512", "--no-cache")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "Largest training batch on Titan X Pascal, simulated"
    assert lines[5] == "model      seq len  max batch  published  peak reserved  source"
    model, seq_len, answer, published, *_, source = lines[7].split()
    assert (model, seq_len, published, source) == ("bert-base", "512", "6", "simulated")
    assert int(answer) >= 6
    assert lines[9].startswith("published: by google-research/bert ")


def test_batch_sizes_for_samplers(run: Run, tmp_path: Path) -> None:
    """Files for samplers have each length's size, the shortest first, without those at which not one sample fits."""
    options = ("--model", "mine:tiny", "--seq-len", "96", "--seq-len", "16", "--budget", "1GiB")
    sizes, lhotse = tmp_path / "sizes.json", tmp_path / "lhotse.json"
    done = run("sweep", *options, "--batch-sizes", str(sizes), "--lhotse", str(lhotse), "--json")
    long, short = (row["max_batch_size"] for row in done.json["rows"])
    assert from_json(sizes.read_text()) == {16: short, 96: long}
    assert sizes.read_text() == f'{{"16": {short}, "96": {long}}}\n'
    assert json.loads(lhotse.read_text()) == {"bucket_duration_bins": [16, 96], "bucket_batch_size": [short, long]}


def sweep_finds(monkeypatch: pytest.MonkeyPatch, *found: SweepRow, then: Callable[[], object] = lambda: None) -> None:
    """Let a sweep find these rows, after which this happens."""

    def find_rows(
        request: SweepRequest, status: object, expect: Callable[[list[Any]], object], many_processes: bool
    ) -> Generator[SweepRow, None, None]:
        expect([(row.model, row.gpu, row.seq_len) for row in found])
        yield from found
        then()

    monkeypatch.setattr(sweep, "find_rows", find_rows)


def test_batch_sizes_where_nothing_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such lengths are left out, which is said; where none is left the command ends with 1."""
    sizes = tmp_path / "sizes.json"

    def find(*found: SweepRow) -> tuple[int, str]:
        sweep_finds(monkeypatch, *found)
        code = main(["sweep", "--model", "bert-base", "--no-cache", "--batch-sizes", str(sizes), "--json"])
        return code, capsys.readouterr().err.splitlines()[-1]

    full = Trial(1, Shape(512), Measurement(Verdict.OUT_OF_MEMORY, message="no"))
    said = "batchfinder: no batch size for seq_len 512: not one sample fits"
    assert find(report_row(4), report_row(0, full, seq_len=512)) == (0, said)
    assert sizes.read_text() == '{"64": 4}\n'
    code, said = find(report_row(0, full, seq_len=512))
    assert (code, said) == (
        1,
        "batchfinder: batch sizes: invalid value 'not one sample fits at 512'; expected a length at which at least one "
        "sample fits.",
    )


def test_an_output_that_fails_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those in a folder that is removed meanwhile are told, each; all others are there, and the exit code is 1."""
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.mkdir()
    gone.mkdir()
    sweep_finds(monkeypatch, report_row(4), then=gone.rmdir)
    files = {"--markdown": gone, "--csv": here, "--plot": gone, "--html": here, "--batch-sizes": gone, "--lhotse": here}
    ends = {"--plot": "row.png", "--html": "row.html"}
    named = [f"{option}={folder / ends.get(option, option)}" for option, folder in files.items()]
    assert main(["sweep", "--model", "bert-base", "--no-cache", "--json", *named]) == 1
    out, err = capsys.readouterr()
    assert [row["max_batch_size"] for row in json.loads(out)["rows"]] == [4]
    told = [line.partition("; ")[0] for line in err.splitlines() if line.startswith("batchfinder: --")]
    failed = [option for option, folder in files.items() if folder == gone]
    assert told == [f"batchfinder: {each}: invalid value '{gone / ends.get(each, each)}'" for each in failed]
    assert sorted(file.name for file in here.iterdir()) == ["--csv", "--lhotse", "row.html"]
    assert (here / "--lhotse").read_text() == '{"bucket_duration_bins": [64], "bucket_batch_size": [4]}\n'


def test_a_table_that_cannot_be_printed_loses_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it go untold."""
    with open("/dev/full", "w", buffering=1) as full:
        sweep_finds(monkeypatch, report_row(4), then=lambda: monkeypatch.setattr(sys, "stdout", full))
        assert main(["sweep", "--model", "bert-base", "--no-cache", "--csv", str(tmp_path / "row.csv")]) == 1
        monkeypatch.undo()
    said = "batchfinder: the output could not be printed: No space left on device."
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert (tmp_path / "row.csv").read_text().startswith("model,seq_len,gpu,")


def test_the_sizes_that_may_be_tried(run: Run) -> None:
    """A multiple is rounded down to; where the smallest size does not fit the answer is 0, with what that one needs."""
    asked = ("sweep", "--model", "mine:tiny", "--seq-len", "16", "--budget", "64MiB", "--json")
    plain = run(*asked).row
    largest = plain["max_batch_size"]
    assert (plain.get("min_batch_size"), plain.get("multiple_of")) == (None, None)
    row = run(*asked, "--multiple-of", "10", "--min-batch-size", "3", "--target-batch-size", "700").row
    assert row["max_batch_size"] == largest // 10 * 10 != largest
    assert (row["min_batch_size"], row["multiple_of"], row["micro_batch_size"] % 10) == (3, 10, 0)
    assert row["micro_batch_size"] * row["accumulation"] == 700
    beyond = run(*asked, "--min-batch-size", str(2 * largest)).row
    assert (beyond["max_batch_size"], beyond["needed_bytes"] > 64 << 20) == (0, True)
    table = run(*asked[:-1], "--min-batch-size", str(2 * largest)).out
    assert f"at least {2 * largest}" in table
    assert f"{2 * largest} needs " in table


@pytest.mark.slow
def test_a_bad_record_does_not_end_a_sweep(run: Run, tmp_path: Path) -> None:
    """One that is no text is warned of and replaced; a folder in its place is warned of, and the row is printed."""
    arguments = ("sweep", "--budget", "1GiB", "--model", "mine:shapeless", "--json")
    row = run(*arguments, cache=tmp_path).row
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(b"\xff\xfe")
    again = run(*arguments, cache=tmp_path)
    assert (again.row["max_batch_size"], again.row["source"]) == (row["max_batch_size"], "simulated")
    assert f"ignoring the damaged cache record {path}: it is cut short or not JSON." in again.err
    assert run(*arguments, cache=tmp_path).row["source"] == "cache"
    path.unlink()
    path.mkdir()
    again = run(*arguments, cache=tmp_path)
    assert (again.row["max_batch_size"], again.row["source"]) == (row["max_batch_size"], "simulated")
    assert f"{path} was left alone, and its result is not cached: Is a directory" in again.err
