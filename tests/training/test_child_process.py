"""Tests of batchfinder/training/child_process.py."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from batchfinder.errors import BatchFinderError, InvalidValue, UserCodeFailed
from batchfinder.training import child_process
from batchfinder.training.child_process import Child, ChildDied, describe, revive

ECHO = """
import os, sys, time
from batchfinder.training.child_process import answer, end_with_parent, requests_from

requests, answers = int(sys.argv[1]), int(sys.argv[2])
end_with_parent(requests)
for request in requests_from(requests):
    print("asked for", request, flush=True)
    if "sleep" in request:
        if os.fork() == 0:
            time.sleep(60)
        time.sleep(60)
    if "leave behind" in request and os.fork() == 0:
        time.sleep(3600)
    if "compute" in request:
        until = time.monotonic() + request["compute"]
        while time.monotonic() < until:
            pass
    if "die" in request:
        os.kill(os.getpid(), request["die"])
    if "rubbish" in request:
        os.write(answers, b"rubbish" + bytes([10]))
    if "exit" in request:
        sys.exit(request["exit"])
    if "pause" in request:
        answer(answers, {})
        time.sleep(request["pause"])
        continue
    answer(answers, {"echo": request, "arguments": sys.argv[3:], "variable": os.environ.get("VARIABLE")})
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """The name of a module whose child gives back what it is asked."""
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    return "echo_child"


def test_requests_are_answered_in_turn(echo):
    """Each request gets its answer, however long, with the arguments and variables that were given."""
    with Child(echo, ["one", "two"], {"VARIABLE": "set"}) as child:
        for request in ({"a": 1}, {"text": "x" * 200_000}, {"b": [None, 2.5]}):
            assert child.ask(request) == {"echo": request, "arguments": ["one", "two"], "variable": "set"}


def test_a_long_request_to_a_slow_reader_arrives_whole(echo):
    """A signal that arrives while the pipe is full ends the write in the middle; the rest is written all the same."""
    request = {"text": "x" * 500_000}
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with Child(echo) as child:
            child.ask({"pause": 1.0})
            interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
            interrupt.start()
            assert child.ask(request)["echo"] == request
            interrupt.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_threads_may_send_while_one_receives(echo):
    """Requests from many threads arrive one by one, each gets an answer, and `kill` ends the wait for another."""
    with Child(echo) as child:
        texts = [str(number) * 30_000 for number in range(8)]
        threads = [threading.Thread(target=child.send, args=({"text": text},)) for text in texts]
        for thread in threads:
            thread.start()
        assert sorted(child.receive()["echo"]["text"] for _ in texts) == texts
        threading.Timer(0.1, child.kill).start()
        with pytest.raises(ChildDied):
            child.receive()
        child.send({"to": "nobody"})


def test_what_is_printed_is_kept_since_the_last_request(echo):
    """Prints go to a log, not to this process's output, and the last words are those of the last request."""
    with Child(echo) as child:
        child.ask({"first": 1})
        child.ask({"second": 2})
        assert child.last_words() == "asked for {'second': 2}"


@pytest.mark.parametrize(
    ("request_", "exit_code"), [({"die": signal.SIGKILL}, -9), ({"die": signal.SIGSEGV}, -11), ({"exit": 7}, 7)]
)
def test_a_death_is_told(echo, request_, exit_code):
    """A child that ends instead of answering is known by its exit code and last words; so is one asked after that."""
    with Child(echo) as child:
        for _ in range(2):
            with pytest.raises(ChildDied) as caught:
                child.ask(request_)
            assert caught.value.exit_code == exit_code
        with pytest.raises(ChildDied, match=f"a child process ended with {exit_code}"):
            child.ask({})


def test_rubbish_is_a_death(echo):
    """An answer that cannot be read is told as such, and the child is ended rather than asked again."""
    with Child(echo) as child:
        with pytest.raises(ChildDied, match="an answer that cannot be read"):
            child.ask({"rubbish": True})
        assert _group_is_gone(child.pid)


def _group_is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        states = subprocess.run(["ps", "-o", "stat=", "-g", str(pid)], capture_output=True, text=True).stdout.split()
        if all(state.startswith("Z") for state in states):
            return True
        time.sleep(0.05)
    return False


def test_too_few_files_leave_nothing(echo, tmp_path, monkeypatch):
    """Where a process may have no more of them open, a child that cannot be started leaves no folder and none open."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, failures = os.listdir("/dev/fd"), 0
    for count in range(3, len(before) + 30):
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
        try:
            Child(echo).close()
            break
        except OSError as error:
            failures += error.errno == errno.EMFILE
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failures > 5
    assert list((tmp_path / "temporary").iterdir()) == []
    assert os.listdir("/dev/fd") == before


def test_close_ends_all_of_it(echo):
    """Closing ends the child and takes its log away."""
    child = Child(echo)
    child.ask({})
    folder = child.folder
    child.close()
    assert _group_is_gone(child.pid)
    assert not folder.exists()


def test_it_ends_with_its_parent_in_the_middle_of_its_work(echo):
    """A parent that is killed takes along its child and the child's own forks, busy or not."""
    code = """
        from batchfinder.training.child_process import Child
        child = Child("echo_child")
        child.ask({})
        print(child.pid, flush=True)
        child.ask({"sleep": True})
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
        parent.wait()
    assert _group_is_gone(pid)


def test_our_own_errors_cross_whole():
    """An error of ours keeps its type, text and fields; a user's becomes UserCodeFailed with its own traceback."""
    ours = revive(describe(InvalidValue("seq_len", 0, "a number from 1")), "a model")
    assert isinstance(ours, InvalidValue)
    assert (str(ours), ours.option, ours.value) == ("seq_len: invalid value 0; expected a number from 1.", "seq_len", 0)
    try:
        {}["missing"]
    except KeyError as error:
        theirs = revive(describe(error), "a model")
    assert isinstance(theirs, UserCodeFailed)
    assert str(theirs).startswith("a model raised:\nTraceback (most recent call last):\n")
    assert str(theirs).endswith("KeyError: 'missing'")


class Mine(BatchFinderError):
    pass


@pytest.mark.parametrize("name", ["Mine", "InvalidValue"])
def test_what_is_derived_from_ours_is_the_users(name):
    """Only a class of `batchfinder.errors` itself is ours, whatever a user's may be called."""
    theirs = revive(describe(type(name, (Mine,), {})("no luck")), "a model")
    assert type(theirs) is UserCodeFailed
    assert str(theirs).endswith(f"{name}: no luck")


def test_no_frames_of_cpp():
    """Texts end where they begin to tell of C++ frames, and only from the line that begins so."""
    text = "no, Exception raised from here\nException raised from f at f.h:79 (most recent call first):\nframe #0: f"
    for error in (RuntimeError(text), UserCodeFailed("it", text)):
        told = describe(error)
        assert "no, Exception raised from here" in told["message"]
        assert "f.h" not in str(told)
        assert str(revive(told, "a model")).endswith("no, Exception raised from here")


def test_the_middle_of_a_long_message_is_left_out():
    """Both of an exception's texts keep where it was raised and how it begins and ends, and say what is left out."""
    try:
        raise RuntimeError(f"begins{'x' * 5_000_000}ends")
    except RuntimeError as error:
        told = describe(error)
    for text in (told["message"], told["traceback"]):
        assert len(text) < 21_000
        assert re.search(r"RuntimeError: beginsx+\n\[498\d{4} of 500\d{4} characters left out\]\nx+ends\n?$", text)
    assert "in test_the_middle_of_a_long_message_is_left_out" in told["traceback"]


def test_only_the_users_frames():
    """Frames of batchfinder's and of PyTorch's are left out of a traceback."""
    try:
        torch.nn.Linear(2, 2)(torch.ones(3))
    except RuntimeError as error:
        frames = describe(error)["traceback"]
    assert "torch.nn.Linear(2, 2)(torch.ones(3))" in frames
    assert "linear.py" not in frames


def test_nothing_of_the_working_folder_runs(echo, tmp_path, monkeypatch):
    """Where it has a file of a module's name that a child imports, and where it has one of batchfinder's."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name in ("json", "threading", "batchfinder", "torch"):
        (folder / f"{name}.py").write_text("open('RAN', 'w')")
    monkeypatch.chdir(folder)
    with Child(echo) as child:
        assert child.ask({"a": 1})["echo"] == {"a": 1}
    assert not (folder / "RAN").exists()


def test_a_process_that_stays_behind_with_its_pipes(echo):
    """A child that dies is known to be dead, though what it started has its pipes open."""
    with Child(echo) as child:
        with pytest.raises(ChildDied) as caught:
            child.ask({"leave behind": True, "exit": 7})
        assert caught.value.exit_code == 7


def test_a_silent_child_is_ended(echo, monkeypatch):
    """It says after how long; one that computes for longer is left to it."""
    monkeypatch.setattr("batchfinder.training.child_process.SILENT_SECONDS", 2.0)
    with Child(echo) as child:
        assert child.ask({"compute": 6.0})["echo"] == {"compute": 6.0}
        with pytest.raises(ChildDied, match="neither answered nor used the processor for 2 s"):
            child.ask({"sleep": True})
        assert _group_is_gone(child.pid)


def test_line_of_a_crash() -> None:
    """Of a dump by faulthandler, innermost first: the innermost line that is neither ours nor a library's."""
    import torch

    library = Path(torch.__file__).parent / "_ops.py"
    dump = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n"
        f'  File "{library}", line 12 in __call__\n'
        f'  File "{__file__}", line 1 in forward\n'
        f'  File "{child_process.__file__}", line 3 in run\n'
        f'  File "{os.__file__}", line 3 in run\n'
    )
    first = Path(__file__).read_text().splitlines()[0]
    assert child_process.line_of_crash(dump) == f"at {__file__}:1, in forward: {first}"
    assert child_process.line_of_crash("") == ""
