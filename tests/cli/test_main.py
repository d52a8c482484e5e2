"""Commands, their usage and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from batchfinder.cli import sweep
from batchfinder.cli.main import main
from batchfinder.cli.parser import COMMANDS
from batchfinder.training.spec import ATTENTION_NAMES, OPTIMIZER_NAMES, PRECISION_NAMES
from tests.cli.command import COMMAND


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["zzz"], "argument COMMAND: invalid choice: 'zzz'"),
        (["swep"], ". Did you mean sweep?"),
        (["cache", "shw"], ". Did you mean show?"),
        (["sweep", "--xyz"], "unrecognized arguments: --xyz\n"),
        (["sweep", "--modle", "x"], "unrecognized arguments: --modle. Did you mean --mode or --model?"),
        (["cache", "list", "--jsn=yes"], "unrecognized arguments: --jsn=yes. Did you mean --json?"),
        (["profile", "--batch-size"], "argument --batch-size/--per-device-train-batch-size: expected one argument"),
        (["cache"], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage ends with 2, the usage and what was wrong, on stderr."""
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ending.value.code, out) == (2, "")
    assert err.startswith("usage: batchfinder ")
    assert said in err


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command's help is on stdout, fits 80 columns and says `--json`."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ending:
        main([*arguments, "--help"])
    out, err = capsys.readouterr()
    assert (ending.value.code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert not arguments or arguments in (["cache"], ["stub"]) or "--json" in out


def test_an_internal_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody foresaw ends with 3 and two lines; the traceback is in a log that is named."""

    def broken(arguments: object) -> int:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(sweep, "main", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["sweep"]) == 3
    (log,) = tmp_path.iterdir()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "batchfinder: internal error: ZeroDivisionError: by nought\n"
        f"The traceback is in {log}; please report it with that file.\n"
    )
    assert log.read_text().startswith("Traceback (most recent call last):\n")
    assert log.read_text().endswith("ZeroDivisionError: by nought\n")


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On Windows every command ends with 1 and one sentence, before anything is imported for it."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sweep, "main", None)
    assert main(["sweep"]) == 1
    said = "batchfinder: Windows is not supported; run it in WSL 2, on Linux or on macOS.\n"
    assert capsys.readouterr() == ("", said)


def test_warnings_are_lines_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning is one line on stderr without a place in our code, and warnings are as before afterwards."""

    def warning(arguments: object) -> int:
        warnings.warn("mind the gap", stacklevel=1)
        return 0

    monkeypatch.setattr(sweep, "main", warning)
    before = warnings.showwarning
    assert main(["sweep"]) == 0
    assert capsys.readouterr() == ("", "batchfinder: warning: mind the gap\n")
    assert warnings.showwarning is before


def test_only_the_first_interrupt_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A second Ctrl-C does not cut short the cleaning up after the first, and Ctrl-C is as before afterwards."""
    cleaned = []

    def interrupted(arguments: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)
        return 0

    monkeypatch.setattr(sweep, "main", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main(["sweep"]) == 130
    assert cleaned
    assert capsys.readouterr() == ("", "batchfinder: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_options_are_those_of_the_step() -> None:
    """Every precision, optimizer, mode and attention on offer is one that a step knows, and none is missing."""
    from batchfinder.models.pretrained import ATTENTION
    from batchfinder.training.optimizers import OPTIMIZERS
    from batchfinder.training.step import PRECISIONS

    assert set(OPTIMIZER_NAMES) == set(OPTIMIZERS)
    assert set(PRECISION_NAMES) == set(PRECISIONS)
    assert set(ATTENTION_NAMES) == set(ATTENTION)


def test_the_module_is_the_script() -> None:
    """`python -m batchfinder` without a command is wrong usage, by its own name."""
    done = subprocess.run(COMMAND, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: batchfinder ")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a shell's -v limits memory on Linux alone")
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (
            "-n 8",
            "batchfinder: OSError: [Errno 24] Too many open files. This process may have 8 files open, which are too "
            "few: raise that with ulimit -n 1024, in a new shell where this one does not allow it.",
        ),
        (
            "-v 200000",
            "This process may map 195.31 MiB of memory (ulimit -v 200000), and PyTorch with a model of BERT's size "
            "takes more than 1 GiB: raise that with ulimit -v unlimited, in a new shell where this one does not allow "
            "it.",
        ),
    ],
)
def test_a_limit_of_the_shell(limit: str, said: str, tmp_path: Path) -> None:
    """What is too little to work with is told, with the way out of it, and nothing is left behind."""
    limited = ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *COMMAND]
    arguments = ["sweep", "--model", "bert-base", "--gpu", "t4", "--seq-len", "128", "--no-cache"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*limited, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == said
    assert list(tmp_path.iterdir()) == []
