"""`find`: the largest batch size of a command, by running it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.command import Done, run_command
from tests.cuda_build.commands import TRAIN

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_stub")]


def find(folder: Path, script: str, *arguments: str) -> Done:
    """`find` for a script that lies in a folder."""
    (folder / "train.py").write_text(script)
    return run_command("find", "--json", *arguments, cache=folder / "c", folder=folder)


def test_the_size_found_runs_and_the_next_does_not(tmp_path: Path) -> None:
    """On a card of 256 MiB; what it writes is thrown away, and its line trains to the target."""
    wide = TRAIN.replace("torch.randn(batch_size,", "torch.randn(2000 * batch_size,")
    script = f"{wide}\nopen('written.txt', 'w').write('by a run')"
    command = ("--", sys.executable, "train.py", "{batch_size}", "{accumulation}", "12")
    options = ("--memory", "256MiB", "--target-batch-size", "8")
    done = find(tmp_path, script, *options, *command)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)
    size = found["batch_size"]
    verdicts = {run["batch_size"]: run["verdict"] for run in found["runs"]}
    assert verdicts[size] == "fits"
    assert verdicts[size + 1] != "fits"
    assert len(found["runs"]) <= 8
    assert not (tmp_path / "written.txt").exists()
    assert found["micro_batch_size"] <= size
    assert found["micro_batch_size"] * found["accumulation"] == 8

    again = run_command(
        *("dry-run", "--memory", "256MiB", "--json", "--", *found["command"]), cache=tmp_path / "c", folder=tmp_path
    )
    assert again.code == 0, again.out


def test_a_config_file_and_a_variable(tmp_path: Path) -> None:
    """The number in the copy of the file changes, and the file stays."""
    script = "import os, tomllib\n" + TRAIN.replace(
        "(int(word) for word in sys.argv[1:4])",
        "tomllib.load(open('cfg.toml', 'rb'))['n'], 1, int(os.environ['STEPS'])",
    )
    (tmp_path / "cfg.toml").write_text("n = 8  # for the T4\n")
    options = ("--memory", "256MiB", "--in", "cfg.toml:n", "-e", "STEPS=12", "--max-batch-size", "2")
    for where in ((), ("--here",)):
        (found,) = json.loads(find(tmp_path, script, *options, *where, "--", sys.executable, "train.py").out)
        assert found["batch_size"] == 2
        assert found["config"] == {"cfg.toml:n": found["batch_size"]}
        assert (tmp_path / "cfg.toml").read_text() == "n = 8  # for the T4\n"


@pytest.mark.exhaustive
def test_data_with_fewer_samples_ends_the_search(tmp_path: Path) -> None:
    """A larger batch that takes no more memory has the same samples in it."""
    script = TRAIN.replace("torch.randn(batch_size,", "torch.randn(min(batch_size, 9000),")
    done = find(tmp_path, script, "--gpu", "t4", "--", sys.executable, "train.py", "{batch_size}", "1", "12")
    (found,) = json.loads(done.out)
    assert found["stop"] == "cap"
    assert 2 <= len(found["runs"]) <= 7
    assert 9000 <= found["batch_size"] < 1 << 20


def test_a_command_that_fails_ends_the_search(tmp_path: Path) -> None:
    """With its last lines, and exit code 2."""
    done = find(tmp_path, "raise ValueError('mine')", "--", sys.executable, "train.py", "{batch_size}")
    assert done.code == 2
    assert "failed by itself at batch size 1 (exit code 1)" in done.err
    assert "ValueError: mine" in done.err


def test_a_command_that_asks_gets_no_answer(tmp_path: Path) -> None:
    """Runs do not share what this process reads from; a wrong option has the exit code of no answer, too."""
    done = find(tmp_path, "input('go on? ')", "--", sys.executable, "train.py", "{batch_size}")
    assert done.code == 2
    assert "EOFError" in done.err
    done = find(tmp_path, "", "--jobs", "none", "--", sys.executable, "train.py", "{batch_size}")
    assert (done.code, done.out) == (2, "")
    assert "--jobs" in done.err
