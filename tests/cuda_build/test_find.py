"""`find`: the largest batch size of a command, by running it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import COMMAND, Done, environment, run_command
from tests.cuda_build.commands import TRAIN

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_stub")]


WIDE = TRAIN.replace("torch.randn(batch_size,", "torch.randn(2000 * batch_size,")


def find(folder: Path, script: str, *arguments: str, **variables: str) -> Done:
    """`find` for a script that lies in a folder."""
    if not (folder / "train.py").exists() or (folder / "train.py").read_text() != script:
        (folder / "train.py").write_text(script)
    return run_command("find", "--json", *arguments, cache=folder / "c", folder=folder, **variables)


def test_the_size_found_runs_and_the_next_does_not(tmp_path: Path) -> None:
    """On a card of 256 MiB; what it writes is thrown away, and its line trains to the target."""
    script = f"{WIDE}\nopen('written.txt', 'w').write('by a run')"
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


EPOCHS = f"""{WIDE.partition("for step")[0]}
batches = torch.utils.data.DataLoader(torch.zeros(20 * batch_size), batch_size)
for _ in range(2):
    for x in batches:
        net(torch.zeros(2000 * len(x), 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net(torch.zeros(8 * batch_size, 2000, 1024, device="cuda"))
"""


def test_an_evaluation_at_an_epochs_end_is_run_where_epochs_are(tmp_path: Path) -> None:
    """It takes more here than a step; without it the table says what was not run."""
    (tmp_path / "train.py").write_text(EPOCHS)
    asked = ("--memory", "384MiB", "--max-batch-size", "2")
    command = ("--", sys.executable, "train.py", "{batch_size}", "1", "1")
    done = run_command("find", *asked, *command, cache=tmp_path / "c", folder=tmp_path)
    assert done.code == 0, done.err
    assert "runs were ended within the first epoch" in done.out
    assert "--epochs 1 goes on" in done.out
    (found,) = json.loads(find(tmp_path, EPOCHS, *asked, *command).out)
    (whole,) = json.loads(find(tmp_path, EPOCHS, *asked, "--epochs", "1", *command).out)
    assert (found["batch_size"], found["kept"], whole["batch_size"]) == (2, 2, 1)


def test_a_loader_made_anew_for_each_epoch_tells_of_none(tmp_path: Path) -> None:
    """Whether the run ended within its first epoch is not known then, and not said."""
    script = EPOCHS.replace("for x in batches:", "for x in torch.utils.data.DataLoader(torch.zeros(3), 1):")
    script = script.replace("range(2)", "range(9)").replace("net(torch.zeros(8 * batch_size", "net(torch.zeros(1")
    (tmp_path / "train.py").write_text(script)
    command = ("--max-batch-size", "1", "--", sys.executable, "train.py", "{batch_size}", "1", "1")
    done = run_command("find", "--memory", "384MiB", *command, cache=tmp_path / "c", folder=tmp_path)
    assert done.code == 0, done.err
    assert "within the first epoch" not in done.out


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    """A size is run again where the script, a file that it read or a module beside the folder has changed."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "rows.txt").write_text("8")
    (tmp_path / "mine.py").write_text("WIDTH = 1\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mine; open('../rows.txt').read()\n{WIDE}"
    command = ("--memory", "1GiB", "--max-batch-size", "1", "--", sys.executable, "train.py", "{batch_size}", "1", "8")

    def kept(*options: str, script: str = script) -> int:
        done = find(folder, script, *options, *command)
        assert done.code == 0, done.err
        (found,) = json.loads(done.out)
        assert len(found["runs"]) == 1
        return int(found["kept"])

    assert kept() == 0
    assert kept() == 1
    assert kept("--again") == 0
    for name, text in (("rows.txt", "16"), ("mine.py", "WIDTH = 11\n")):
        (tmp_path / name).write_text(text)
        assert kept() == 0, name
        assert kept() == 1, name
    assert kept(script=f"{script}\n") == 0


@pytest.mark.exhaustive
def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    """With the runs that had ended; nothing is left of the one that had not."""
    (tmp_path / "train.py").write_text(WIDE)
    command = ("--memory", "256MiB", "--jobs", "1", "--", sys.executable, "train.py", "{batch_size}", "1", "8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = environment(tmp_path / "c", TMPDIR=str(temporary))
    search = subprocess.Popen(
        [*COMMAND, "find", *command], cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True
    )
    assert search.stderr is not None
    for line in search.stderr:
        if "fits" in line:
            break
    search.send_signal(signal.SIGINT)
    search.stderr.read()
    assert search.wait(30) == 130
    assert not list(temporary.iterdir())
    (found,) = json.loads(find(tmp_path, WIDE, *command, TMPDIR=str(temporary)).out)
    assert 1 <= found["kept"] < len(found["runs"])


@pytest.mark.exhaustive
def test_on_the_gpu_that_is_here(tmp_path: Path) -> None:
    """The command runs in this environment's PyTorch on what nvidia-smi shows; here that is itself a card of the stub's."""
    (tmp_path / "train.py").write_text(WIDE)
    inner = [*COMMAND, "find", "--device", "cuda", "--json", "--", sys.executable, "train.py", "{batch_size}", "1", "8"]
    done = run_command("stub", "run", "--memory", "256MiB", "--", *inner, cache=tmp_path / "c", folder=tmp_path)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)
    verdicts = {run["batch_size"]: run["verdict"] for run in found["runs"]}
    assert verdicts[found["batch_size"]] == "fits"
    assert verdicts[found["batch_size"] + 1] != "fits"
    assert found["build"] == ""
    simulated = find(tmp_path, WIDE, "--memory", "256MiB", "--", sys.executable, "train.py", "{batch_size}", "1", "8")
    assert found["batch_size"] == json.loads(simulated.out)[0]["batch_size"]


def test_without_a_gpu_here(tmp_path: Path) -> None:
    """A sentence that says so, and one where an option is for simulated GPUs alone."""
    command = ("--", sys.executable, "train.py", "{batch_size}")
    for options, words in (((), "none is seen"), (("--gpu", "t4"), "--gpu")):
        done = find(tmp_path, "", "--device", "cuda", *options, *command)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
