"""`sweep` by real training steps: on this machine's CPU under real limits, and, marked `gpu`, on a card."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cache import Store
from batchfinder.cli import sweep_request
from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import read_request
from batchfinder.measure import child_probe
from batchfinder.measure.child_probe import CpuProbe, GpuFacts
from batchfinder.recording.answers import predict_full_card
from batchfinder.recording.simulation import Simulation
from batchfinder.report.sweep import SweepRow
from batchfinder.results import Shape, StopReason
from batchfinder.sizing.cells import ModelCells
from batchfinder.sizing.measured_cells import MeasuredCells, measure_cells
from tests.cli.command import COMMAND, HERE, Done, Run, environment, records_too_large

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_recorders"),
    pytest.mark.skipif(sys.platform != "linux", reason="a CPU's memory is limited by RLIMIT_AS"),
]

MIB = 1 << 20
BUDGET = 30 * MIB
TINY_BERT = "bert-tiny/config.json"
ON_THE_CPU = ("sweep", "--device", "cpu", "--budget", "30MiB", "--headroom", "10%", "--target-batch-size", "64")
SECONDS = 60.0


@pytest.fixture(scope="module")
def swept(run: Run) -> Done:
    """A model that ends its process, one that trains at one of two lengths, and one whose forward raises."""
    models = ("--model", "mine:exits", "--model", TINY_BERT, "--model", "mine:fails_in_forward")
    return run(*ON_THE_CPU, *models, "--seq-len", "16", "--seq-len", "512", "--json")


def rows_of(done: Done) -> list[dict[str, Any]]:
    """The rows that were printed, however it ended."""
    rows: list[dict[str, Any]] = json.loads(done.out)["rows"]
    return rows


@pytest.mark.exhaustive
def test_a_measured_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that ran in the budget less the headroom, with the trials that found it counted.

    In a fresh process it trains again, and a third more does not. The budget is far above what differs by machine.
    """
    budget = 128 * MIB
    options = ("sweep", "--device", "cpu", "--budget", "128MiB", "--headroom", "10%", "--model", TINY_BERT)
    done = run(*options, "--seq-len", "16", "--target-batch-size", "64", "--json")
    row, said = done.row, done.err.splitlines()[1:-1]
    assert said[0].endswith(": try 1, batch size 1")
    assert re.search(r": try 2, batch size \d+ \(1 runs\)$", said[1])
    assert len(said) >= row["trials"]
    assert (row["model"], row["seq_len"]) == (TINY_BERT, 16)
    assert (row["source"], row["found_by"], row["stopped_by"]) == ("measured", "measured", "out_of_memory")
    assert row["gpu"].endswith(", 128.00 MiB budget")
    assert (row["budget_bytes"], row["headroom_bytes"]) == (budget, budget // 10)
    assert row["max_batch_size"] > 64
    assert 0.9 * budget * 0.9 < row["peak_reserved_bytes"] <= budget - budget // 10
    assert 1 <= row["failed_trials"] <= 3
    assert row["failed_trials"] < row["trials"] <= 9
    assert (row["micro_batch_size"], row["accumulation"]) == (64, 1)

    monkeypatch.chdir(HERE)
    request = read_request(build_parser().parse_args([*options, "--no-cache"]))
    (model,) = request.models
    spec = request.options.workload(model)
    with CpuProbe(spec, request.step, budget - budget // 10, threads=1) as probe:
        assert probe(row["max_batch_size"], Shape(16)).fits
        assert not probe(row["max_batch_size"] * 4 // 3, Shape(16)).fits


@pytest.mark.slow
def test_sizes_up_to_the_largest_are_timed(run: Run) -> None:
    """By the child that takes the steps; whether it can be told here or not, each size has its speed in the row."""
    options = ("sweep", "--device", "cpu", "--budget", "128MiB", "--model", "mine:tiny", "--seq-len", "16")
    row = run(*options, "--max-batch-size", "2", "--throughput", "--json").row
    rates = row["throughput"]["rates"]
    assert [rate["batch_size"] for rate in rates] == [1, 2]
    assert row["full_speed_batch_size"] in ((1, 2) if row["throughput"]["certain"] else (None,))
    assert row["samples_per_second"] in [rate["samples_per_second"] for rate in rates]


def test_a_model_that_needs_two_samples_is_searched_from_two(run: Run) -> None:
    """BatchNorm raises with one; the table says so."""
    done = run("sweep", "--device", "cpu", "--budget", "64MiB", "--model", "mine:normed", "--max-batch-size", "64")
    assert done.code == 0, done
    assert "mine:normed from 2 on, since batch size 1 raised ValueError: Expected more than 1 value" in done.out
    assert "nothing above 64 was tried" in done.out


def test_nothing_fits(swept: Done) -> None:
    """A length at which no sample fits is a row with 0, and the bytes that one takes where there is more memory."""
    row = rows_of(swept)[1]
    assert (row["seq_len"], row["max_batch_size"], row["stopped_by"]) == (512, 0, "out_of_memory")
    assert (row["peak_reserved_bytes"], row["micro_batch_size"]) == (None, None)
    assert BUDGET - BUDGET // 10 < row["needed_bytes"] < 4 * BUDGET
    assert row["needed_found_by"] == "measured"
    assert row["message"]


def test_the_longest_sequence_comes_first(swept: Done) -> None:
    """Progress tells of 512 before 16; the rows are in the order asked for."""
    found = [line.split(" on ")[0] for line in swept.err.splitlines() if line.startswith("[")]
    assert found == [f"[1/6] {TINY_BERT} at 512", f"[2/6] {TINY_BERT} at 16"]
    assert [row["seq_len"] for row in rows_of(swept)] == [16, 512]


def test_a_model_whose_process_ends_does_not_end_the_sweep(swept: Done) -> None:
    """It is told in full when it comes, and the next model is measured."""
    said = swept.err.index(
        "batchfinder: the process that trained mine:exits at batch size 1, sequence length 512 ended"
    )
    assert said < swept.err.index("[1/6]")
    assert "ended twice without an answer, with exit code 7. It printed last:\nno more\nno more\n" in swept.err


def test_an_error_of_the_users_ends_only_its_own_rows(swept: Done) -> None:
    """It is shown without our frames, the exit code is 1, and it is said how many cells were found."""
    assert swept.code == 1
    assert "batchfinder: mine:fails_in_forward at batch size 1, sequence length 512 raised:\n" in swept.err
    assert "RuntimeError: no answer today\n" in swept.err
    assert str(HERE.parents[1] / "batchfinder") not in swept.err
    kept = "batchfinder: 2 of 6 cells were found; they are cached, and the same command continues from there\n"
    assert swept.err.endswith(kept)


def test_ctrl_c_ends_the_child(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a step: 130, one line, and no process and no folder is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [*COMMAND, "sweep", "--device", "cpu", "--budget", "1GiB", "--model", "mine:slow_to_record", "--no-cache"]
    child_probe = subprocess.Popen(
        [*command, "--seq-len", "16"],
        cwd=HERE,
        env=environment(tmp_path / "cache", TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + SECONDS
    while not _in_a_step(temporary) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _in_a_step(temporary)
    os.kill(child_probe.pid, signal.SIGINT)
    out, err = child_probe.communicate(timeout=SECONDS)
    assert (child_probe.returncode, out) == (130, "")
    first, tried, last = err.splitlines()
    assert (first, last) == ("building mine:slow_to_record", "batchfinder: interrupted")
    assert tried.endswith(" budget: try 1, batch size 1")
    assert _processes(temporary) == []
    assert list(temporary.glob("batchfinder-*")) == []


def _processes(temporary: Path) -> list[int]:
    """The children of a sweep: their temporary files lie here."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(temporary).encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def _in_a_step(temporary: Path) -> bool:
    """Whether a fork of the worker is there, which is where a step sleeps."""
    commands = []
    for number in _processes(temporary):
        with contextlib.suppress(OSError):
            commands.append(Path(f"/proc/{number}/cmdline").read_bytes())
    return sum(b"batchfinder.measure.worker" in command for command in commands) > 1


Measuring = tuple[Callable[[int], SweepRow], list[str], Store]


@pytest.fixture(scope="module")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measuring]:
    """`row(seq_len)` of one model, what was said of its progress, and its cache."""
    store = Store(tmp_path_factory.mktemp("known"))
    options = ("--device", "cpu", "--budget", "30MiB", "--model", "mine:tiny", "--tolerance", "0", "--cache", store.url)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        patch.setenv("OMP_NUM_THREADS", "1")
        request = read_request(build_parser().parse_args(["sweep", *options]))
        (model,) = request.models
        with (
            Simulation(request.options.workload(model), request.step) as simulation,
            contextlib.closing(
                MeasuredCells(ModelCells(model, simulation, (32, 16), request), request.place.cards[0], said.append)
            ) as measured,
        ):
            yield measured.row, said, store


def _keep(store: Store, **changes: Any) -> None:
    """Change what is cached of the one cell."""
    (record,) = store.records()
    store.put(record.key, replace(record.result, **changes))


def test_a_cached_answer_is_certified(measuring: Measuring) -> None:
    """With one trial; where it fails, a search finds a smaller one, and where more memory is free a larger one."""
    row, said, store = measuring
    first = row(32)
    answer = first.result.max_batch_size
    assert (first.cached, first.result.source, first.result.stop) == (False, "measured", StopReason.EXACT)
    assert (first.trials, next(store.records()).result.free_bytes) == (first.result.trials, BUDGET)
    tries = [f"try {number}, batch size {trial.batch_size}" for number, trial in enumerate(first.trials, 1)]
    seen = [f"{trial.batch_size} {'runs' if trial.fits else 'does not run'}" for trial in first.trials[:-1]]
    words = [tries[0], *(f"{each} ({before})" for each, before in zip(tries[1:], seen, strict=True))]
    assert said == [f"{first.cell}: {each}" for each in words]

    again = row(32)
    assert (again.cached, [trial.batch_size for trial in again.trials]) == (True, [answer])
    assert (again.result.max_batch_size, again.result.source) == (answer, "measured")
    assert again.stopped_by is first.stopped_by  # from the earlier trials

    _keep(store, max_batch_size=answer + 1, trials=())
    lowered = row(32)
    assert (lowered.trials[0].batch_size, lowered.trials[0].fits) == (answer + 1, False)
    assert (lowered.result.max_batch_size, lowered.cached) == (answer, False)

    _keep(store, free_bytes=BUDGET // 2, max_batch_size=answer // 2)
    grown = row(32)
    assert (grown.result.max_batch_size, grown.cached) == (answer, False)


def test_a_shorter_sequence_starts_from_the_longer_one(measuring: Measuring) -> None:
    """Where nothing is simulated, the longer length's answer leads to the shorter one's in few trials."""
    row, _, _ = measuring
    longer, shorter = row(32), row(16)
    assert shorter.result.max_batch_size >= 2 * longer.result.max_batch_size
    assert shorter.trials[0].batch_size > longer.result.max_batch_size
    assert len(shorter.trials) <= 5
    assert sum(not trial.fits for trial in shorter.trials) <= 2
    again = row(16)
    assert again.trials[0].batch_size == shorter.result.max_batch_size
    # A process's memory differs by a little from one to the next, and the answer is the largest that just ran.
    assert again.cached == again.trials[0].fits


def test_a_row_that_cannot_be_cached_says_so(measuring: Measuring) -> None:
    """It is returned all the same, with why."""
    row, _, store = measuring
    answer = row(16)
    with records_too_large():
        again = row(16)
    assert (again.result.max_batch_size, answer.not_cached) == (answer.result.max_batch_size, "")
    assert again.not_cached.startswith(f"the cache at {store.url} cannot be used: File too large. ")


@pytest.fixture(scope="module")
def recorded() -> Iterator[Simulation]:
    """A model whose step the fake GPU records, for predictions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        request = read_request(build_parser().parse_args(["sweep", "--model", "mine:tiny", "--no-cache"]))
        with Simulation(request.options.workload(request.models[0]), request.step) as simulation:
            simulation.facts()
            yield simulation


FACTS = GpuFacts("Tesla T4", 512 * MIB, 384 * MIB, (7, 5), {"torch": "2.13.0"})
Ask = Callable[..., tuple[list[SweepRow], list[dict[str, Any]]]]


@pytest.fixture
def ask(recorded: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`ask(options, *lengths)`: the cells of one sweep on a card that is made up, and what its child was asked."""
    monkeypatch.setattr(sweep_request, "query_gpu", lambda device: FACTS)
    monkeypatch.setattr(sweep_request, "driver_version", lambda: "580.95")
    monkeypatch.setattr(child_probe, "WORKER", "tests.cli.card_worker")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))

    def cells(options: str, *seq_lens: int) -> tuple[list[SweepRow], list[dict[str, Any]]]:
        asked = tmp_path / "asked"
        asked.unlink(missing_ok=True)
        arguments = ["sweep", "--device", "cuda", "--cache", str(tmp_path / "cache"), *options.split()]
        request = read_request(build_parser().parse_args(arguments))
        found: list[SweepRow] = []
        found += measure_cells(ModelCells("mine:tiny", recorded, seq_lens, request), lambda what: None)
        return found, [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []

    return cells


def test_a_card_is_asked_what_is_free_by_the_child_that_takes_the_steps(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a budget there is no limit but the card's own, and what is free then is what the row says."""
    monkeypatch.setattr(sweep_request, "query_gpu", lambda device: replace(FACTS, free_bytes=500 * MIB))
    (row,), asked = ask("--tolerance 0", 4)
    assert [next(iter(request)) for request in asked[:3]] == ["query_gpu", "open", "probe"]
    assert asked[1]["open"]["limit_bytes"] is None
    assert row.cell.card.device.usable_bytes == 384 * MIB
    assert (row.result.max_batch_size, row.result.stop) == (8, StopReason.EXACT)  # 128 MiB and 8 * 4 * 8 MiB
    assert row.result.free_bytes == 384 * MIB


@pytest.mark.parametrize(
    ("options", "limit"), [("--budget 320MiB", 320), ("--headroom 25%", 256), ("--budget 1GiB", 384)]
)
def test_the_limit_is_the_budget_less_the_headroom(ask: Ask, options: str, limit: int) -> None:
    """What the allocator may reserve is limited where a budget or a headroom is asked for, and no step takes more."""
    (row,), asked = ask(f"{options} --tolerance 0", 4)
    assert asked[1]["open"]["limit_bytes"] == limit * MIB
    assert row.result.max_batch_size == (limit - 128) // 32


def test_the_simulated_step_is_the_first_guess(ask: Ask, recorded: Simulation) -> None:
    """The first size tried is a share of what the simulated step says for what is free of the card."""
    (row,), asked = ask("--no-cache", 4)
    simulated = recorded.probe(row.cell.card.device, (4,))
    predicted = predict_full_card(simulated, Shape(4)).batch_size
    assert asked[2]["probe"]["batch_size"] == int(0.85 * predicted) > 1


def test_one_child_and_the_cache(ask: Ask) -> None:
    """All lengths are probed by one child, the longest first; a second sweep certifies them, or asks it nothing."""
    found, asked = ask("", 2, 8, 4)
    assert [row.result.shape.seq_len for row in found] == [8, 4, 2]
    assert sum("open" in request for request in asked) == 1
    again, asked = ask("", 2, 8, 4)
    assert sum("probe" in request for request in asked) == 3
    assert [row.result.max_batch_size for row in again] == [row.result.max_batch_size for row in found]
    again, asked = ask("--no-certify", 2, 8, 4)
    assert asked == []
    assert [row.cached for row in again] == [True] * 3
    assert [row.result.max_batch_size for row in again] == [row.result.max_batch_size for row in found]


def test_nothing_fits_on_a_card(ask: Ask) -> None:
    """0 comes with what the simulated step needs for one sample, and says that this is simulated."""
    (row,), _ = ask("--budget 132MiB", 64)
    measurement = row.result.measurement
    assert (row.result.max_batch_size, row.result.source) == (0, "measured")
    assert measurement is not None
    assert (measurement.needed_bytes or 0) > MIB
    assert row.result.unmodelled == ("what a single sample needs is simulated",)
    assert (row.to_json()["found_by"], row.to_json()["needed_found_by"]) == ("measured", "simulated")


@pytest.mark.parametrize(
    ("options", "found", "least", "step"),
    [("--multiple-of 3", 6, 3, 3), ("--min-batch-size 7", 8, 7, 1), ("--min-batch-size 9", 0, 9, 1)],
)
def test_the_sizes_that_may_be_tried_on_a_card(ask: Ask, options: str, found: int, least: int, step: int) -> None:
    """Of 8 that fit: multiples of 3, or 7 and more; and 0 where the smallest that may be tried does not fit."""
    (row,), _ = ask(f"--tolerance 0 {options}", 4)
    assert row.result.max_batch_size == found
    assert all(trial.batch_size >= least and trial.batch_size % step == 0 for trial in row.trials)
    assert row.stopped_by is not None


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_a_card_answers_for_a_smaller_one(run: Run, tmp_path: Path) -> None:
    """Under a budget the answers' peaks are within it, in few trials, and the second run takes none."""
    options = ("--budget", "1GiB", "--model", TINY_BERT, "--seq-len", "64", "--seq-len", "128", "--headroom", "5%")
    rows = run("sweep", *options, "--json", cache=tmp_path, CUDA_VISIBLE_DEVICES="0").json["rows"]
    for row in rows:
        assert (row["source"], row["stopped_by"]) == ("measured", "out_of_memory")
        assert (row["budget_bytes"], row["headroom_bytes"]) == (1 << 30, (1 << 30) // 20)
        assert row["peak_allocated_bytes"] <= row["peak_reserved_bytes"] <= (1 << 30) - (1 << 30) // 20
        assert row["max_batch_size"] > 0
        # 9 on the CUDA stub since a line past the prediction is doubted; fewer are wanted.
        assert row["failed_trials"] < row["trials"] <= 9
    table = run("sweep", *options, cache=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert table.out.startswith("Largest training batch, measured on ")
    assert "from the cache: 2 of 2 rows" in table.out


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_a_dead_context_does_not_end_the_sweep(run: Run) -> None:
    """A model that kills the card's context is told, and the next one is measured in a new process."""
    models = ("--model", "mine:out_of_range", "--model", "mine:tiny")
    done = run(
        *("sweep", "--device", "cuda", "--budget", "1GiB", *models, "--seq-len", "16", "--json"),
        CUDA_VISIBLE_DEVICES="0",
    )
    (row,) = rows_of(done)
    assert (row["model"], row["source"], done.code) == ("mine:tiny", "measured", 1)
    assert "mine:out_of_range at batch size " in done.err
    assert "left the CUDA context unusable, twice. It raised:\n" in done.err
    assert "device-side assert" in done.err
    assert "batchfinder: 1 of 2 cells were found" in done.err
