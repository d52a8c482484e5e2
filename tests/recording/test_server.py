"""Tests of recording/server.py in a process of its own, as users have it: what must neither hang nor run twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchfinder.errors import RecordingDied, RecordingFailed
from batchfinder.recording.client import RecordingClient
from batchfinder.training import child_process
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec

SECONDS = 120
ROOT = Path(__file__).parents[2]
THEIRS = """
import os, signal, sys, time
import torch
from batchfinder import Workload

class Real(torch.nn.Module):
    # A table computed from values, as timm's position tables are, and a step that computes on the CPU as well.
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)
        self.size = int((torch.rand(1000, 1000) @ torch.rand(1000, 1000)).sum().numpy() > 0) + 1

    def forward(self, x):
        return self.linear(x)

def batch(batch_size, seq_len):
    return (torch.zeros(batch_size, 256),)

def real():
    def make_batch(batch_size, seq_len):
        from torch.utils._python_dispatch import _disable_current_modes
        with _disable_current_modes():
            (torch.rand(2000, 2000) + 1).exp_()
        return batch(batch_size, seq_len)

    return Workload(Real(), make_batch)

def huge():
    class Huge(Real):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Linear(1 << 21, 1 << 21)

    return Workload(Huge(), batch)

def forks():
    os.fork()
    return Workload(torch.nn.Linear(256, 256), batch)

def forks_in_the_step():
    def make_batch(batch_size, seq_len):
        os.fork()
        return batch(batch_size, seq_len)

    return Workload(torch.nn.Linear(256, 256), make_batch)

def leaves_a_process():
    def make_batch(batch_size, seq_len):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        return batch(batch_size, seq_len)

    return Workload(torch.nn.Linear(256, 256), make_batch)

def waits_in_the_step():
    def make_batch(batch_size, seq_len):
        time.sleep(0 if batch_size == 1 else 600)
        return batch(batch_size, seq_len)

    return Workload(torch.nn.Linear(256, 256), make_batch)

def waits():
    time.sleep(600)

class Module(torch.nn.Linear):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def make_batch(self, batch_size, seq_len):
        asked.append(seq_len)
        assert asked.count(None) <= 2, "somebody else has asked for batches"
        return batch(batch_size, seq_len)

asked = []

def module():
    return Module(256, 256)

def of_lengths():
    return Workload(torch.nn.Linear(256, 256), lambda batch_size, seq_len: torch.zeros(batch_size, seq_len or 1, 256))

def waits_for_batches():
    return Workload(torch.nn.Linear(256, 256), lambda batch_size, seq_len: time.sleep(600))

def ignores_children():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return Workload(torch.nn.Linear(256, 256), batch)
"""


def job(batch_size: int) -> RecordingJob:
    """One recording with the default settings."""
    return RecordingJob(StepConfig(), (7, 0), batch_size, None)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], WorkloadSpec]:
    """One of the workloads above, by its function's name."""
    (tmp_path / "their_code.py").write_text(THEIRS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return lambda function: WorkloadSpec("batchfinder.models:build_workload", {"spec": f"their_code:{function}"})


def test_a_workload_of_real_tensors_is_recorded(
    theirs: Callable[[str], WorkloadSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building it started OpenMP's threads, which a fork does not have: its first parallel operation must not wait."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with RecordingClient(theirs("real")) as recorder:
        said = r"their_code:real was built with real weights, since their_code.py:11 \(self.size = .*\) does not run"
        with pytest.warns(UserWarning, match=said) as told:
            recorder.facts()
        recorder.facts()  # and once is enough
        trace = recorder.submit(job(2)).result(SECONDS)
    assert trace.batch_size == 2
    assert str(told[0].message) in trace.unmodelled


def test_real_weights_beyond_the_memory_are_refused(theirs: Callable[[str], WorkloadSpec]) -> None:
    """16 TiB of them are no reason for the kernel to end processes: the error names the line that wants values."""
    with (
        RecordingClient(theirs("huge")) as recorder,
        pytest.raises(RecordingFailed, match=r"their_code.py:11 \(self.size.* more than the [0-9.]+ .iB of memory"),
    ):
        recorder.facts()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param("forks", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        "forks_in_the_step",
        "leaves_a_process",
        pytest.param("ignores_children", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_processes_of_the_users(theirs: Callable[[str], WorkloadSpec], function: str) -> None:
    """A fork that goes on, in the factory or in a step, one that stays behind, and children nobody is told of."""
    with RecordingClient(theirs(function)) as recorder:
        for size in (2, 3):
            assert recorder.submit(job(size)).result(SECONDS).batch_size == size


@pytest.mark.parametrize(
    ("function", "unit"),
    [
        ("module", "none"),
        ("of_lengths", "tokens"),
        pytest.param("waits_for_batches", "tokens", marks=pytest.mark.slow),
    ],
)
def test_batches_of_one_shape_are_recognised(theirs: Callable[[str], WorkloadSpec], function: str, unit: str) -> None:
    """Of a LightningModule too; it is seen in a fork, so that a step gets the first batches."""
    with RecordingClient(theirs(function)) as recorder:
        assert recorder.facts().seq_len_unit == unit
        if function == "module":
            assert recorder.submit(job(2)).result(SECONDS).batch_size == 2


def test_children_are_waited_for_whatever_the_parent_ignores(theirs: Callable[[str], WorkloadSpec]) -> None:
    """A process started with SIGCHLD ignored hands that on to all that it starts."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with RecordingClient(WorkloadSpec("tests.builders.small:mlp")) as recorder:
            assert recorder.submit(job(2)).result(SECONDS).batch_size == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
def test_a_silent_recording_is_ended(theirs: Callable[[str], WorkloadSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says after how long; the others go on."""
    monkeypatch.setattr(child_process, "SILENT_SECONDS", 6.0)
    with RecordingClient(theirs("waits_in_the_step")) as recorder:
        silent = recorder.submit(job(2))
        assert recorder.submit(job(1)).result(SECONDS).batch_size == 1
        with pytest.raises(
            RecordingDied, match=r"batch size 2 ended.*(?s:.*)neither answered nor used the processor for 6 s"
        ):
            silent.result(SECONDS)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_silent_factory_is_ended(theirs: Callable[[str], WorkloadSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says after how long."""
    monkeypatch.setattr(child_process, "SILENT_SECONDS", 6.0)
    with (
        RecordingClient(theirs("waits")) as recorder,
        pytest.raises(RecordingDied, match="neither answered nor used the processor for 6 s"),
    ):
        recorder._facts.result(SECONDS)


@pytest.mark.parametrize(
    "closed",
    [*(pytest.param(each, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for each in ((0,), (1,), (2,))), (0, 1, 2)],
)
def test_standard_streams_that_are_closed(closed: tuple[int, ...]) -> None:
    """Pipes never take their numbers, which the child gives to its own streams."""
    code = f"""
        import os
        for stream in {closed}:
            os.close(stream)
        from batchfinder.recording.client import RecordingClient
        from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec
        with RecordingClient(WorkloadSpec("tests.builders.small:mlp")) as recorder:
            trace = recorder.submit(RecordingJob(StepConfig(), (7, 0), 3, None)).result({SECONDS})
        os._exit(trace.batch_size)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, cwd=ROOT, timeout=SECONDS).returncode == 3


def test_what_a_killed_sweep_leaves_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both killed at once, as the kernel does when a container's memory is full; folders in use are left alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "batchfinder-results").mkdir()
    code = """
        import time
        from batchfinder.training.child_process import Child
        child = Child("batchfinder.recording.server", ("/nowhere", "1", "300"))
        print(child.pid, flush=True)
        time.sleep(600)
    """
    spec = WorkloadSpec("tests.builders.small:mlp")
    with (
        RecordingClient(spec) as other,
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT) as sweep,
    ):
        assert sweep.stdout is not None
        child = int(sweep.stdout.readline())
        os.kill(child, signal.SIGSTOP)  # so that it cannot clean up behind its parent
        sweep.kill()
        sweep.wait()
        os.killpg(child, signal.SIGKILL)
        assert len(list(tmp_path.iterdir())) == 3
        with RecordingClient(spec):
            assert len(list(tmp_path.iterdir())) == 3
        assert other.facts().max_seq_len is None
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["batchfinder-results"]
