"""Tests of recording/client.py and server.py: what goes wrong in the recording process, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchfinder.errors import BatchFinderError, InvalidValue, RecordingDied, RecordingFailed, UserCodeFailed
from batchfinder.recording.client import RecordingClient
from batchfinder.training import child_process
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec

pytestmark = pytest.mark.usefixtures("forked_recorders")

GOOD, BAD = 7, 13
SECONDS = 300
ENDS_WITHIN_SECONDS = 60

THEIRS = """
import os, sys
import torch
from batchfinder import Workload
from batchfinder.errors import BatchFinderError, InvalidValue

class Mine(BatchFinderError):
    pass

class RecordingFailed(BatchFinderError):  # one of ours has this name
    pass

KINDS = {"Mine": Mine("no luck"), "RecordingFailed": RecordingFailed("no luck"), "DamagedRecord": None}

def failing(kind, where):
    def fail():
        if kind == "DamagedRecord":
            from batchfinder.cache.record import DamagedRecord
            raise DamagedRecord("no luck")
        raise KINDS[kind]

    def make_batch(batch_size, seq_len):
        if where == "make_batch" and batch_size == 13:
            fail()
        return (torch.zeros(batch_size, 256),)

    if where == "build":
        fail()
    return Workload(torch.nn.Linear(256, 256), make_batch)

def odd_value():
    raise InvalidValue("size", object, "a number")

def rubbish():
    os.write(int(sys.argv[2]), b"rubbish\\n")
    return failing("", "")

def too_large():
    def make_batch(batch_size, seq_len):
        return (torch.zeros(99999999999999999999),)

    return Workload(torch.nn.Linear(256, 256), make_batch)
"""


def job(batch_size: int) -> RecordingJob:
    """One recording with the default settings."""
    return RecordingJob(StepConfig(), (7, 0), batch_size, None)


def spec(function: str, **arguments: object) -> WorkloadSpec:
    """One of the small models."""
    return WorkloadSpec(f"tests.builders.small:{function}", dict(arguments))


def error_of(recorder: RecordingClient, asked: RecordingJob) -> BatchFinderError:
    """What a recording failed with."""
    error = recorder.submit(asked).exception(SECONDS)
    assert isinstance(error, BatchFinderError), error
    return error


def processes_of_group(group: int) -> list[int]:
    """Processes of one process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("where", "said", "line"),
    [
        ("forward", "RuntimeError: no answer today", 'raise RuntimeError("no answer today")'),
        ("make_batch", "LookupError: no data today", 'raise LookupError("no data today")'),
    ],
)
def test_user_code_that_raises(where: str, said: str, line: str) -> None:
    """The user's own traceback is shown and nothing of ours; the next recording works."""
    with RecordingClient(spec("failing", where=where)) as recorder:
        error = error_of(recorder, job(BAD))
        assert type(error) is UserCodeFailed
        assert said in error.traceback
        assert line in error.traceback
        assert "batchfinder/" not in error.traceback.replace("tests/builders", "")
        assert "batch size 13" in str(error)
        assert recorder.submit(job(GOOD)).result(SECONDS).batch_size == GOOD


def test_backward_that_raises() -> None:
    """It ends the fork or raises; either way the message is clear, and the next recording works."""
    with RecordingClient(spec("failing", where="backward")) as recorder:
        error = error_of(recorder, job(BAD))
        assert isinstance(error, (UserCodeFailed, RecordingDied))
        assert "batch size 13" in str(error)
        if isinstance(error, RecordingDied):
            assert error.operator.startswith("aten.")
            assert error.exit_code
        assert "no gradient today" in str(error)
        assert recorder.submit(job(GOOD)).result(SECONDS).batch_size == GOOD


@pytest.mark.parametrize(
    ("which", "line", "said"),
    [
        ("numpy", "return out * float(out.detach().numpy().max())", "where the code reads values, which fake tensors"),
        ("crash", "return out + ctypes.string_at(0)", "ended while aten.addmm.default was running"),
        ("unknown", "return called(out)", '@torch.library.register_fake("batchfinder_tests::unknown")'),
        ("backward", "return unknown(grad)", "the custom operator batchfinder_tests.unknown cannot be recorded, at "),
        ("flex", "return flex_attention(heads, heads, heads)", "is not recorded outside of torch.compile, at "),
    ],
)
def test_the_line_of_the_users(which: str, line: str, said: str) -> None:
    """What a fake tensor cannot do is shown with the line that asked for it, also where that ended the process."""
    with RecordingClient(WorkloadSpec("tests.builders.custom_operators:calling", {"which": which})) as recorder:
        error = error_of(recorder, job(GOOD))
        assert isinstance(error, RecordingFailed)
        assert said in str(error)
        assert re.search(
            rf"at \S+custom_operators\.py:\d+, in (for|back)ward: {re.escape(line)}", str(error), re.IGNORECASE
        )


@pytest.mark.parametrize("builder", ["tests.builders.small:nothing_there", "tests.builders.nowhere:build"])
def test_builder_that_does_not_exist(builder: str) -> None:
    """What cannot be built is said by `facts`, and by each recording that is asked for, before or after."""
    with RecordingClient(WorkloadSpec(builder)) as recorder:
        early = recorder.submit(job(GOOD))
        with pytest.raises(BatchFinderError) as caught:
            recorder.facts()
        name = builder.rpartition(":")[0].rpartition(".")[2]
        for error in (caught.value, early.exception(SECONDS), recorder.submit(job(GOOD)).exception(SECONDS)):
            assert isinstance(error, BatchFinderError)
            assert name in str(error)


def test_builder_that_ends_the_process() -> None:
    """The exit code and the last words are passed on, and whatever is asked afterwards fails too."""
    with RecordingClient(spec("leaving")) as recorder:
        early = recorder.submit(job(GOOD))
        with pytest.raises(RecordingDied) as caught:
            recorder.facts()
        assert caught.value.exit_code == 3
        assert caught.value.last_words == "my last words"
        assert isinstance(early.exception(SECONDS), RecordingDied)
        assert isinstance(recorder.submit(job(GOOD)).exception(SECONDS), RecordingDied)


def test_close_leaves_nothing_behind() -> None:
    """While recordings run: no process of the group is left, no folder, and their futures do not wait for ever."""
    recorder = RecordingClient(spec("slow"))
    recorder.facts()
    running = [recorder.submit(job(size)) for size in (2, 3, 4)]
    group, folder = recorder._child.pid, recorder._child.folder
    deadline = time.monotonic() + SECONDS
    while len(processes_of_group(group)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    recorder.close()
    while processes_of_group(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_of_group(group) == []
    assert not folder.exists()
    assert all(isinstance(future.exception(SECONDS), RecordingDied) for future in running)
    recorder.close()


@pytest.fixture(scope="module")
def mlp() -> Iterator[RecordingClient]:
    """The recording process of a perceptron, shared."""
    with RecordingClient(spec("mlp")) as recorder:
        yield recorder


def test_interrupt_passes_it_by(mlp: RecordingClient) -> None:
    """Ctrl-C is for the foreground: the recording process goes on until it is closed."""
    mlp.facts()
    os.kill(mlp._child.pid, signal.SIGINT)
    assert mlp.submit(job(GOOD)).result(SECONDS).batch_size == GOOD


def test_facts(mlp: RecordingClient) -> None:
    """What there is to know is told without a recording."""
    facts = mlp.facts()
    assert facts.max_seq_len is None
    assert not facts.brings_optimizer
    assert facts.versions["torch"]


def test_many_at_once_keep_apart(mlp: RecordingClient) -> None:
    """Recordings that run side by side each answer with their own size, the same as alone."""
    futures = {size: mlp.submit(job(size)) for size in range(2, 10)}
    for size, future in futures.items():
        trace = future.result(SECONDS)
        assert trace.batch_size == size
        assert 4 * size * 1024 in trace.sizes
    assert mlp.submit(job(5)).result(SECONDS) == futures[5].result()


@pytest.mark.parametrize(("capability", "precision"), [((8, 0), "fp32"), ((7, 0), "16-mixed"), ((6, 1), "fp32")])
def test_flash_where_there_is_none(capability: tuple[int, int], precision: str) -> None:
    """Flash attention in fp32, or on a card before Ampere, is refused."""
    with RecordingClient(spec("attention")) as recorder:
        asked = RecordingJob(StepConfig(precision=precision, flash=True), capability, GOOD, 24)
        error = error_of(recorder, asked)
        assert isinstance(error, InvalidValue), error
        assert "flash" in str(error)
        assert error.option == "attention"


def test_values_out_of_reach() -> None:
    """`.numpy()` needs values that are not there: a failed recording that says so, not a bug of the user's."""
    with RecordingClient(spec("reading", way="numpy")) as recorder:
        error = error_of(recorder, job(GOOD))
        assert type(error) is RecordingFailed
        assert "values" in str(error)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of a user's."""
    (tmp_path / "their_code.py").write_text(THEIRS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    return "their_code"


@pytest.mark.parametrize("kind", ["Mine", "RecordingFailed", "DamagedRecord"])
def test_users_own_subclass_of_our_error(theirs: str, kind: str) -> None:
    """An error derived from ours, but not one of ours, is the user's: nobody waits for ever for it."""
    with RecordingClient(WorkloadSpec(f"{theirs}:failing", {"kind": kind, "where": "make_batch"})) as recorder:
        error = error_of(recorder, job(BAD))
        assert type(error) is UserCodeFailed
        assert f"{kind}: no luck" in error.traceback
        assert recorder.submit(job(GOOD)).result(SECONDS).batch_size == GOOD
    with RecordingClient(WorkloadSpec(f"{theirs}:failing", {"kind": kind, "where": "build"})) as recorder:
        assert type(recorder._facts.exception(SECONDS)) is UserCodeFailed


def test_fields_that_are_no_json(theirs: str) -> None:
    """An error of ours whose field JSON has no word for still arrives, with the field in words."""
    with RecordingClient(WorkloadSpec(f"{theirs}:odd_value")) as recorder:
        error = recorder._facts.exception(SECONDS)
        assert isinstance(error, InvalidValue)
        assert error.value == repr(object)


def test_answer_that_is_rubbish(theirs: str) -> None:
    """An answer that cannot be read ends the process, and everybody who waits is told."""
    with RecordingClient(WorkloadSpec(f"{theirs}:rubbish")) as recorder:
        early = recorder.submit(job(GOOD))
        for error in (recorder._facts.exception(SECONDS), early.exception(SECONDS), error_of(recorder, job(GOOD))):
            assert isinstance(error, RecordingDied)
            assert "an answer that cannot be read (JSONDecodeError: " in str(error)


def test_trace_that_cannot_be_read(mlp: RecordingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trace that cannot be read fails alone."""

    def from_json(trace: object) -> None:
        raise KeyError("stages")

    with monkeypatch.context() as patched:
        patched.setattr("batchfinder.recording.client.Trace.from_json", from_json)
        error = error_of(mlp, job(GOOD))
        assert isinstance(error, RecordingDied)
        assert "batch size 7" in str(error)
        assert error.last_words == "an answer that cannot be read (KeyError: 'stages')"
    assert mlp.submit(job(GOOD)).result(SECONDS).batch_size == GOOD


def test_no_frames_of_cpp(theirs: str) -> None:
    """What PyTorch's C++ says is kept, and where in C++ it was raised is not."""
    with RecordingClient(WorkloadSpec(f"{theirs}:too_large")) as recorder:
        error = error_of(recorder, job(GOOD))
        assert "zeros()" in str(error)
        for text in (str(error), getattr(error, "traceback", "")):
            assert "Exception raised from" not in text
            assert "c10::" not in text


@pytest.mark.parametrize(("builder", "number"), [("slow", signal.SIGKILL), ("mlp", signal.SIGTERM)])
def test_ends_with_a_killed_parent(builder: str, number: signal.Signals) -> None:
    """However the near process ends, busy or not: server, forks and folder are gone in a moment."""
    code = f"""
        import time
        from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec
        from batchfinder.recording.client import RecordingClient
        recorder = RecordingClient(WorkloadSpec("tests.builders.small:{builder}"))
        recorder.facts()
        futures = [recorder.submit(RecordingJob(StepConfig(), (7, 0), size, None)) for size in (2, 3)]
        print(recorder._child.pid, recorder._child.folder, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        time.sleep(0.5)
        assert processes_of_group(int(pid))
        parent.send_signal(number)
        parent.wait()
    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
    while (processes_of_group(int(pid)) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_of_group(int(pid)) == []
    assert not Path(folder).exists()


def test_server_that_is_killed_alone() -> None:
    """Its forks go on, and yet the end is told."""
    with RecordingClient(spec("slow")) as recorder:
        recorder.facts()
        running = recorder.submit(job(GOOD))
        deadline = time.monotonic() + SECONDS
        while len(processes_of_group(recorder._child.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(recorder._child.pid, signal.SIGKILL)
        error = running.exception(SECONDS)
        assert isinstance(error, RecordingDied)
        assert error.exit_code == -signal.SIGKILL


def test_the_recording_process_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's environment shows; all else in it is passed on."""
    environments: list[dict[str, str]] = []

    def start(module: str, descriptors: Any, arguments: Any, log: Any, environment: Any) -> Any:
        environments.append(dict(environment))
        return subprocess.Popen(["true"], start_new_session=True)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setattr(child_process, "start", start)
    with RecordingClient(WorkloadSpec("no_such_module:build")) as opened, pytest.raises(RecordingDied):
        opened.facts()
    (environment,) = environments
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["HIP_VISIBLE_DEVICES"]) == ("", "")
    assert environment["MINE"] == "kept"
