"""Progress on a terminal and in a pipe; never on stdout."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from batchfinder.report.progress import StatusLine, SweepProgress
from tests.report.test_sweep import row, tried


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal, each thing worth a line and each row is one line on stderr."""
    with SweepProgress(()) as progress:
        progress.expect([("bert-base", "T4", None), ("bert-base", "T4", 64), ("bert-base", "T4", 32)])
        progress.update("building bert-base")
        progress.update("bert-base at 64 on T4", terminal_only=True)
        progress.found(row())
        progress.found(replace(row(seq_len=None), cached=True, trials=()))
        progress.found(row(100, tried(100), seq_len=32, source="measured"))
    assert capsys.readouterr() == (
        "",
        "building bert-base\n"
        "[1/3] bert-base at 64 on T4: 100 (simulated, 2 trials, 0.2 s)\n"
        "[2/3] bert-base on T4: 100 (simulated, from the cache, 0.2 s)\n"
        "[3/3] bert-base at 32 on T4: 100 (measured, 1 trial, 0.2 s)\n",
    )
    assert [found.cell.seq_len for found in progress.rows] == [None, 64, 32]


def test_a_failure_that_does_not_end_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told when it comes, as it is: brackets and long lines included."""
    with SweepProgress(()) as progress:
        progress.failed(ValueError(f"[1/2] {'long ' * 40}[/bold]"))
    assert capsys.readouterr() == ("", f"batchfinder: [1/2] {'long ' * 40}[/bold]\n")


class Terminal(io.StringIO):
    """A terminal of 80 x 24 that remembers all it was sent."""

    def isatty(self) -> bool:
        """It is one."""
        return True


Connect = Callable[[], Terminal]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Make stderr a terminal; in the test itself, since pytest sets stderr anew before each."""
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)

    def connect_now() -> Terminal:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    return connect_now


def test_a_live_table(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the table grows under a bar; of more rows than there are lines, the latest are shown."""
    terminal = connect()
    with SweepProgress(("headroom 10%",)) as progress:
        progress.expect([("bert-base", "T4", length) for length in range(1, 41)])
        for length in range(1, 31):
            progress.found(row(1000 + length, seq_len=length))
    assert capsys.readouterr().out == ""
    sent = terminal.getvalue()
    last = sent[sent.rindex("Largest training batch on T4, simulated") :]
    assert "headroom 10%" in last
    assert "1030" in last
    assert "1010" not in last
    assert "30/40" in last
    assert last[: last.index("30/40")].count("\n") < 24
    assert "[30/40]" not in sent


class Interrupted(Terminal):
    """A terminal at which Ctrl-C is typed as a text has been written: it shows ^C at the cursor."""

    awaited = "1003"

    def flush(self) -> None:
        """Raise once."""
        if self.awaited and self.awaited in self.getvalue():
            self.awaited = ""
            self.write("^C")
            raise KeyboardInterrupt


def left_on(terminal: Terminal, width: int) -> list[str]:
    """The lines that stand on a terminal, by the few commands that rich sends."""
    lines, row, column = [""], 0, 0
    for sent in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n", terminal.getvalue()):
        if sent == "\n":
            row += 1
        elif sent == "\r":
            column = 0
        elif sent.startswith("\x1b"):
            row -= sent == "\x1b[1A"
            lines[row] = "" if sent == "\x1b[2K" else lines[row]
        else:
            row, column = (row + 1, 0) if column == width else (row, column)
            lines += [""] * (row + 1 - len(lines))
            lines[row], column = lines[row][:column].ljust(column) + sent, column + 1
        column = 0 if sent == "\n" else column
        lines += [""] * (row + 1 - len(lines))
    return [line for line in lines if line]


@pytest.mark.parametrize("columns", [60, 64, 80])
def test_an_interrupt_leaves_nothing_of_the_table(
    columns: int, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was being drawn, and however wide the bar's line is."""
    connect()
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Interrupted()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = SweepProgress(())
    progress.expect([("bert-base", "T4", length) for length in range(1, 41)])

    def sweep() -> None:
        with progress:
            progress.update("bert-base at 64 on T4, which takes its time")
            for length in range(1, 31):
                progress.found(row(1000 + length, seq_len=length))

    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert terminal.awaited == ""
    assert left_on(terminal, columns) == []


def test_a_spinner(connect: Connect) -> None:
    """On a terminal what is being done stands beside a spinner, and nothing of it stays."""
    terminal = connect()
    with StatusLine() as line:
        line.update("building bert-base")
        assert "building bert-base\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")


def test_a_dumb_terminal_gets_plain_lines(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot redraw a line gets plain ones."""
    monkeypatch.setenv("TERM", "dumb")
    terminal = connect()
    with StatusLine() as line:
        line.update("building bert-base")
    assert terminal.getvalue() == "building bert-base\n"


def test_names_are_shown_as_they_are(connect: Connect) -> None:
    """Brackets are no markup, and what a terminal would take for commands is escaped."""
    terminal = connect()
    with StatusLine() as line:
        line.update("building ./[/bold]/\x1b]0;title\x07")
        line._bar.refresh()
    assert "[/bold]" in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()
