from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.errors import ContextDied, InvalidValue, ProbeDied, UserCodeFailed
from batchfinder.find import find_max_batch_size
from batchfinder.measure import child_probe
from batchfinder.measure.child_probe import ChildProcessProbe, CpuProbe, GpuFacts
from batchfinder.measure.oom import KILLED
from batchfinder.results import Shape, Verdict
from batchfinder.search import Capped, Doubling, Floored
from batchfinder.training.spec import StepConfig, WorkloadSpec

pytestmark = pytest.mark.usefixtures("forked_workers")

LIMIT = 200_000_000


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Children import the workloads from the checkout."""
    monkeypatch.chdir(Path(__file__).parents[2])


def _probe(deed, once=""):
    spec = WorkloadSpec("tests.measure.workloads:misbehaving", {"deed": deed, "at": 8, "once": str(once)})
    return CpuProbe(spec, StepConfig(), LIMIT, threads=1)


def test_a_bug_is_the_users_and_the_child_goes_on():
    """A user's error arrives with its own traceback, without our frames; the same child then probes on."""
    with _probe("raise") as probe:
        assert probe(4, Shape()).fits
        child = probe._child
        with pytest.raises(UserCodeFailed) as caught:
            probe(8, Shape())
        assert probe(2, Shape()).fits
        assert probe._child is child
    text = str(caught.value)
    assert text.startswith(
        "tests.measure.workloads:misbehaving at batch size 8 raised:\nTraceback (most recent call last)"
    )
    assert text.endswith('KeyError: "a bug of the user\'s"')
    assert "batchfinder/measure" not in text


def test_steps_are_timed_where_that_is_asked_for():
    """In the child, apart for a micro-batch that another follows; and no longer once it is not asked for."""
    spec = WorkloadSpec("tests.measure.workloads:misbehaving", {"deed": "raise", "at": 8, "once": ""})
    with CpuProbe(spec, StepConfig(micro_batches=2), LIMIT, threads=1) as probe:
        probe.timed_steps = 3
        timed = probe(4, Shape())
        probe.timed_steps = 0
        untimed = probe(4, Shape())
    assert 0 < timed.micro_batch_seconds < timed.seconds
    assert 0 < timed.step_seconds < timed.seconds
    assert (untimed.step_seconds, untimed.micro_batch_seconds) == (None, None)


def test_killed_twice_is_the_hosts_memory():
    """A SIGKILL is taken for the kernel's out-of-memory killer, once it has come twice; the next probe runs."""
    with _probe("SIGKILL") as probe:
        seen = probe(8, Shape(5))
        assert probe(4, Shape()).fits
    assert (seen.verdict, seen.message) == (Verdict.HOST_OUT_OF_MEMORY, KILLED)


def test_a_death_that_happens_once_is_not_believed(tmp_path):
    """One that does not come again in a second try is forgotten."""
    with _probe("SIGKILL", tmp_path / "once") as probe:
        assert probe(8, Shape()).fits
    assert (tmp_path / "once").exists()


@pytest.mark.parametrize("deed", ["out of memory", "exit"])
def test_what_happens_once_is_not_believed_by_a_search(deed, tmp_path):
    """A search tries a size again that it did not expect to run out of memory."""
    with _probe(deed, tmp_path / "once") as probe:
        found = find_max_batch_size(probe, Shape(), search=Floored(Capped(Doubling(), 8), 8))
    assert found.max_batch_size == 8
    assert (tmp_path / "once").exists()


def test_an_out_of_memory_is_said_in_the_devices_words():
    """They are the message."""
    with _probe("out of memory") as probe:
        seen = probe(8, Shape())
    assert (seen.verdict, seen.message) == (Verdict.OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_segmentation_fault_is_a_clear_error():
    """A crash that says nothing about memory names the signal, the last words and the next move."""
    with _probe("SIGSEGV") as probe, pytest.raises(ProbeDied) as caught:
        probe(8, Shape(5))
    assert caught.value.exit_code == -11
    assert str(caught.value) == (
        "the process that trained tests.measure.workloads:misbehaving at batch size 8, sequence length 5 ended twice "
        "without an answer, with signal SIGSEGV. It printed last:\nabout to misbehave\nabout to misbehave\n"
        "Run one training step at this size in a process of your own to see why."
    )


def test_an_abort_for_want_of_memory_is_an_out_of_memory():
    """C++ code that ends the process with std::bad_alloc has run out of memory."""
    with _probe("bad_alloc") as probe:
        seen = probe(8, Shape())
    assert seen.verdict is Verdict.OUT_OF_MEMORY
    assert "std::bad_alloc" in seen.message


def test_a_workload_that_cannot_be_built():
    """What its builder raises is the user's error; the child is gone."""
    spec = WorkloadSpec("tests.measure.workloads:unbuildable")
    with CpuProbe(spec, StepConfig(), LIMIT) as probe:
        with pytest.raises(UserCodeFailed, match="no such data set"):
            probe(1, Shape())
        assert probe._child is None


def test_no_card_is_said_in_words():
    """Asked for a card on a machine without one, it names the device; nothing is blamed on the user's code."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    spec = WorkloadSpec("tests.measure.workloads:encoder")
    with ChildProcessProbe(spec, StepConfig(), "cuda:0") as probe, pytest.raises(InvalidValue) as caught:
        probe(1, Shape(8))
    built = "" if torch.version.cuda else ", which is a build for CPUs alone"
    expected = f"cpu, or a GPU that PyTorch {torch.__version__} can use here{built}."
    assert str(caught.value) == f"device: invalid value 'cuda:0'; expected {expected}"


def test_the_near_end_needs_no_torch():
    """Importing the probes costs no import of torch."""
    code = "import sys, batchfinder.measure.child_probe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def on_a_card(monkeypatch, tmp_path):
    """A probe of a worker that answers as one on a card does, and in which file it is noted that its context died."""
    monkeypatch.setattr(child_probe, "WORKER", "tests.measure.dying_worker")
    with ChildProcessProbe(
        WorkloadSpec("mine:model"), StepConfig(), "cuda:0", environment={"ONCE": str(tmp_path / "once")}
    ) as probe:
        yield probe, tmp_path / "once"


def test_a_dead_context_is_tried_again_in_a_new_process(on_a_card):
    """A context that died once is forgotten: a new process takes the step, with the same limit."""
    probe, once = on_a_card
    probe.limit_bytes = 1200
    first = probe(4, Shape())
    seen = probe(8, Shape())
    assert once.exists()
    assert (first.peak_reserved_bytes, seen.peak_reserved_bytes) == (1200, 1200)
    assert first.peak_allocated_bytes != seen.peak_allocated_bytes  # these are the processes' numbers


def test_a_context_that_dies_twice_is_a_clear_error(monkeypatch, tmp_path):
    """The message has the user's error and the next move; the next probe gets a new process."""
    monkeypatch.setattr(child_probe, "WORKER", "tests.measure.dying_worker")
    environment = {"ONCE": str(tmp_path / "never")}
    with ChildProcessProbe(WorkloadSpec("mine:model"), StepConfig(), "cuda:0", environment=environment) as probe:
        with pytest.raises(ContextDied) as caught:
            probe(8, Shape())
        assert probe._child is None
        assert probe(4, Shape()).fits
    assert isinstance(caught.value, UserCodeFailed)
    assert str(caught.value) == (
        "mine:model at batch size 8 left the CUDA context unusable, twice. It raised:\n"
        "Traceback (most recent call last):\nRuntimeError: CUDA error: device-side assert triggered\n"
        "Run one training step at this size on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see where."
    )


def test_a_look_is_taken_by_the_child_that_takes_the_steps(on_a_card):
    """What is free is asked in the process whose steps are to fit into it, before anything is built there."""
    probe, _ = on_a_card
    assert probe.query_gpu() == GpuFacts("a card", 2000, 1500, (9, 0))
    child = probe._child
    probe.limit_bytes = 700
    assert probe(1, Shape()).peak_reserved_bytes == 700
    assert probe._child is child
