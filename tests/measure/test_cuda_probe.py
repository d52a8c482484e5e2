from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from batchfinder.errors import ContextDied, InvalidValue, UserCodeFailed
from batchfinder.find import find_max_batch_size
from batchfinder.measure.child_probe import ChildProcessProbe
from batchfinder.measure.cuda_probe import CudaProbe
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.search import Secant
from batchfinder.training.spec import WorkloadSpec
from batchfinder.training.step import Step, StepSettings
from tests.measure.workloads import encoder

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB."
CARD = torch.device("cuda")
needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class MadeUpCard:
    """Memory that is told how it fares, and writes down what it is asked for."""

    def __init__(self, retries=(), kernel_fails=False, dead=False):
        self.asked = []
        self.fraction = 0.9
        self.on_clear = lambda: None
        self._retries = [0, *retries]
        self._kernel_fails = kernel_fails
        self._dead = dead

    def limit(self, limit_bytes):
        before, self.fraction = self.fraction, limit_bytes / 1000
        self.asked.append(f"limit {self.fraction}")
        return before

    def restore(self, fraction):
        if self._dead:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        self.fraction = fraction
        self.asked.append(f"restore {fraction}")

    def synchronize(self):
        self.asked.append("synchronize")
        if self._kernel_fails:
            raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous.")

    def clear(self):
        self.asked.append("clear")
        self.on_clear()

    def retries(self):
        return self._retries.pop(0) if len(self._retries) > 1 else self._retries[0]

    def peaks(self):
        return 300, 400

    def held(self):
        return 120


def _raise(error):
    raise error


def test_a_size_that_runs():
    """Peaks, the limit set before and taken back after, the device waited for."""
    card, sizes = MadeUpCard(), []
    seen = CudaProbe(lambda *size: sizes.append(size), CARD, 500, card)(8, Shape(128))
    assert (seen.verdict, seen.peak_allocated_bytes, seen.peak_reserved_bytes) == (Verdict.FITS, 300, 400)
    assert seen.seconds > 0
    assert sizes == [(8, 128)]
    assert card.asked == ["clear", "limit 0.5", "synchronize", "clear", "restore 0.9"]


def test_without_a_limit_the_share_is_left_alone():
    """No limit, no change of the process's share."""
    card = MadeUpCard()
    CudaProbe(lambda *size: None, CARD, None, card)(8, Shape())
    assert card.asked == ["clear", "synchronize", "clear"]


def test_memory_is_cleared_after_the_failed_step_is_dead():
    """When the card is cleared, every tensor of the failed step is dead already."""
    references, alive = [], []

    def steps(batch_size, seq_len):
        tensor = torch.ones(batch_size)
        references.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(OOM)

    card = MadeUpCard()
    card.on_clear = lambda: alive.append([reference() is not None for reference in references])
    seen = CudaProbe(steps, CARD, None, card)(8, Shape())
    assert (seen.verdict, seen.message) == (Verdict.OUT_OF_MEMORY, OOM)
    assert alive == [[], [False]]


def test_what_a_kernel_fails_with_is_the_steps_failure():
    """An error that only the wait for the device brings is still classified."""
    seen = CudaProbe(lambda *size: None, CARD, None, MadeUpCard(kernel_fails=True))(8, Shape())
    assert seen.verdict is Verdict.OUT_OF_MEMORY
    assert seen.message.startswith("CUDA error: out of memory")


@pytest.mark.parametrize(("retries", "times"), [((0, 1), "once"), ((2, 5), "3 times")])
def test_thrashing_counts_as_not_fitting_and_says_so(retries, times):
    """A size that ran only because the allocator gave back its cache does not fit, as far as its steps can tell."""
    seen = CudaProbe(lambda *size: None, CARD, None, MadeUpCard(retries=retries))(8, Shape())
    message = f"it ran, but only by giving back all cached memory {times}, at 400 B reserved"
    assert seen == Measurement(Verdict.THRASHING, 300, 400, seen.seconds, message)


def test_steps_that_go_on_until_the_cache_is_kept_fit():
    """Steps that take another as long as they are told to are judged by the last of them."""
    card, steps = MadeUpCard(retries=(0, 1, 2, 2)), []

    def take(batch_size, seq_len):
        steps.append("two")
        while probe.settling.goes_on():
            steps.append("more")

    probe = CudaProbe(take, CARD, card=card)
    assert probe(8, Shape()).fits
    assert steps == ["two", "more", "more"]


def test_a_bug_passes_and_the_share_is_restored():
    """The user's error is raised unchanged, with the process's share as it was."""
    bug, card = KeyError("memory"), MadeUpCard()
    with pytest.raises(KeyError) as caught:
        CudaProbe(lambda *size: _raise(bug), CARD, 500, card)(8, Shape())
    assert caught.value is bug
    assert card.fraction == 0.9


def test_what_a_context_dies_of_is_what_is_raised():
    """On a dead context the share cannot be restored; the error of the step is raised, not that one."""
    bug = torch.AcceleratorError("CUDA error: device-side assert triggered, in the step")
    with pytest.raises(torch.AcceleratorError) as caught:
        CudaProbe(lambda *size: _raise(bug), CARD, 500, MadeUpCard(dead=True))(8, Shape())
    assert caught.value is bug


def test_a_dead_context_is_recognised():
    """Every later call on a dead context fails, the wait for it too."""
    assert CudaProbe(lambda *size: None, CARD, None, MadeUpCard(kernel_fails=True)).is_dead()
    assert not CudaProbe(lambda *size: None, CARD, None, MadeUpCard()).is_dead()


def test_a_limit_must_be_positive():
    """A limit of nothing is refused with the number."""
    with pytest.raises(InvalidValue) as caught:
        CudaProbe(lambda *size: None, CARD, -1, MadeUpCard())
    assert str(caught.value) == "limit_bytes: -1 will not do; expected a positive number of bytes."


def test_what_stages_say_is_in_the_measurement():
    """Steps that tell the probe's readings of their stages get what stays and what the forward took measured."""
    stages = ((0, "batch", 0), (0, "backward", 0), (1, "batch", 0))
    probe = CudaProbe(lambda batch_size, seq_len: [probe.readings(*stage) for stage in stages], CARD, card=MadeUpCard())
    seen = probe(8, Shape())
    assert (seen.resting_bytes, seen.forward_bytes) == (120, 180)
    silent = CudaProbe(lambda batch_size, seq_len: None, CARD, card=MadeUpCard())(8, Shape())
    assert (silent.resting_bytes, silent.forward_bytes) == (None, None)


@pytest.mark.gpu
@needs_a_card
def test_a_budget_is_kept_and_taken_back():
    """Under a budget of 1 GiB the answer's peak is within it, the next size fails, and the card is whole afterwards."""
    device, limit = torch.device("cuda:0"), 1 << 30
    workload = encoder()
    workload.model.to(device)
    step = Step(workload, StepSettings(), device)
    before = torch.cuda.memory_allocated(device)
    probe = CudaProbe(lambda *size: step.run(*size, probe.readings, probe.settling.goes_on), device, limit)
    outcome = find_max_batch_size(probe, Shape(64), search=Secant(limit, 0.0))
    answer = outcome.max_batch_size
    assert outcome.measurement.peak_reserved_bytes <= limit
    assert all(probe(answer, Shape(64)).fits for _ in range(5))
    assert not any(probe(answer + 1, Shape(64)).fits for _ in range(5))
    assert torch.cuda.get_per_process_memory_fraction(device) == 1.0
    workload.model.zero_grad(set_to_none=True)
    step.optimizer = None
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated(device) <= before + (1 << 20)


def _child(monkeypatch, name, limit=1 << 30, **arguments):
    monkeypatch.chdir(Path(__file__).parents[2])
    return ChildProcessProbe(WorkloadSpec(f"tests.measure.workloads:{name}", arguments), {}, "cuda:0", limit)


@pytest.mark.gpu
@needs_a_card
def test_the_child_answers_as_this_process_does(monkeypatch):
    """A child process finds a size under the budget, exactly; then a prediction of it takes few probes and 1 failure.

    Without a prediction there is no such promise: the first line is drawn from the origin.
    """
    limit = 1 << 30
    with _child(monkeypatch, "encoder", limit) as probe:
        exact = find_max_batch_size(probe, Shape(64), search=Secant(limit, 0.0))
        answer = exact.max_batch_size
        assert answer > 0
        guided = find_max_batch_size(probe, Shape(64), search=Secant(limit, predicted=answer))
    assert 0.99 * answer <= guided.max_batch_size <= answer
    assert sum(not trial.fits for trial in guided.trials) <= 1
    assert len(guided.trials) <= 6


@pytest.mark.gpu
@needs_a_card
def test_a_card_is_looked_at(monkeypatch):
    """What a child says of the card is what this process sees of it, less the child's own context."""
    properties = torch.cuda.get_device_properties(0)
    with _child(monkeypatch, "encoder") as probe:
        card = probe.look()
    assert (card.name, card.total_bytes) == (properties.name, properties.total_memory)
    assert card.compute_capability == (properties.major, properties.minor)
    assert 0 < card.free_bytes < card.total_bytes
    assert card.versions["torch"] == torch.__version__


@pytest.mark.gpu
@needs_a_card
def test_a_dead_context_is_survived(monkeypatch, tmp_path):
    """A device-side assertion, provoked for real, costs the child: once it is tried again, twice it is an error.

    Either way the next probe runs, in a new process.
    """
    with _child(monkeypatch, "out_of_range", at=8, once=str(tmp_path / "once")) as probe:
        assert probe(4, Shape(8)).fits
        first = probe._child
        assert probe(8, Shape(8)).fits
        assert (tmp_path / "once").exists()
        assert probe._child is not first
    with _child(monkeypatch, "out_of_range", at=8) as probe:
        with pytest.raises(ContextDied, match="device-side assert"):
            probe(8, Shape(8))
        assert probe(4, Shape(8)).fits


@pytest.mark.gpu
@needs_a_card
def test_a_bug_leaves_the_context_alive(monkeypatch):
    """An error that Python raised is the user's, and not said to have killed anything."""
    with _child(monkeypatch, "misbehaving", deed="raise", at=8) as probe, pytest.raises(UserCodeFailed) as caught:
        probe(8, Shape(8))
    assert type(caught.value) is UserCodeFailed
