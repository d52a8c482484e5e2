from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from batchfinder.errors import ContextDied, InvalidValue, UserCodeFailed
from batchfinder.find import find_max_batch_size
from batchfinder.measure.child_probe import ChildProcessProbe
from batchfinder.measure.worker import CudaProbe, gpu_facts
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.search import Secant
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.training.step import Step
from tests.measure.made_up_cuda import TOTAL
from tests.measure.made_up_cuda import cuda as cuda
from tests.measure.workloads import encoder

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB."
CARD = torch.device("cuda")
CLEAR = ["synchronize", "clear"]
needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _raise(error):
    raise error


def test_a_size_that_runs(cuda):
    """Peaks, the limit set before and taken back after, the device waited for, the cache emptied before and after."""
    sizes = []
    seen = CudaProbe(lambda *size: sizes.append(size[:2]), CARD, 500)(8, Shape(128))
    assert (seen.verdict, seen.peak_allocated_bytes, seen.peak_reserved_bytes) == (Verdict.FITS, 300, 400)
    assert seen.seconds > 0
    assert sizes == [(8, 128)]
    assert cuda.asked == [*CLEAR, "limit 500", "synchronize", "limit None", *CLEAR]


def test_memory_is_cleared_after_the_failed_step_is_dead(cuda):
    """When the device is cleared, every tensor of the failed step is dead already."""
    references, alive = [], []

    def steps(batch_size, *arguments):
        tensor = torch.ones(batch_size)
        references.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(OOM)

    cuda.on_clear = lambda: alive.append([reference() is not None for reference in references])
    seen = CudaProbe(steps, CARD)(8, Shape())
    assert (seen.verdict, seen.message) == (Verdict.OUT_OF_MEMORY, OOM)
    assert alive == [[], [False]]


def test_what_a_kernel_fails_with_is_the_steps_failure(cuda):
    """An error that only the wait for the device brings is still classified."""

    def steps(*arguments):
        cuda.kernel_error = "CUDA error: out of memory\nCUDA kernel errors might be asynchronous."

    seen = CudaProbe(steps, CARD)(8, Shape())
    assert seen.verdict is Verdict.OUT_OF_MEMORY
    assert seen.message.startswith("CUDA error: out of memory")


@pytest.mark.parametrize(("retries", "times"), [([0, 1], "once"), ([2, 5], "3 times")])
def test_thrashing_counts_as_not_fitting_and_says_so(retries, times, cuda):
    """A size that ran only because the allocator gave back its cache does not fit, as far as its steps can tell."""

    def steps(*arguments):
        cuda.retries = [retries[1]]

    cuda.retries = [retries[0]]
    seen = CudaProbe(steps, CARD)(8, Shape())
    message = f"it ran, but only by giving back all cached memory {times}"
    assert seen == Measurement(Verdict.THRASHING, 300, 400, seen.seconds, message)


def test_steps_that_go_on_until_the_cache_is_kept_fit(cuda):
    """Steps that take another as long as they are told to are judged by the last of them."""
    steps = []

    def take(batch_size, seq_len, on_stage, more, loading):
        steps.append("two")
        cuda.retries = [1, 2, 2]
        while more():
            steps.append("more")

    assert CudaProbe(take, CARD)(8, Shape()).fits
    assert steps == ["two", "more", "more"]


def test_a_bug_passes_and_the_limit_is_taken_back(cuda):
    """The user's error is raised unchanged, with the process's share as it was."""
    bug = KeyError("memory")
    cuda.allowed = 9 << 30
    with pytest.raises(KeyError) as caught:
        CudaProbe(lambda *size: _raise(bug), CARD, 500)(8, Shape())
    assert caught.value is bug
    assert cuda.allowed == 9 << 30


def test_what_a_context_dies_of_is_what_is_raised(cuda):
    """On a dead context the limit cannot be taken back; the error of the step is raised, not that one."""
    bug = torch.AcceleratorError("CUDA error: device-side assert triggered, in the step")

    def steps(*arguments):
        cuda.is_dead = True
        raise bug

    with pytest.raises(torch.AcceleratorError) as caught:
        CudaProbe(steps, CARD, 500)(8, Shape())
    assert caught.value is bug


def test_a_dead_context_is_recognised(cuda):
    """Every later call on a dead context fails, the wait for it too."""
    probe = CudaProbe(lambda *size: None, CARD)
    assert not probe.is_dead()
    cuda.is_dead = True
    assert probe.is_dead()


def test_a_limit_must_be_positive(cuda):
    """A limit of nothing is refused with the number."""
    with pytest.raises(InvalidValue) as caught:
        CudaProbe(lambda *size: None, CARD, -1)
    assert str(caught.value) == "limit_bytes: invalid value -1; expected a positive number of bytes."


def test_what_stages_say_is_in_the_measurement(cuda):
    """Steps that tell of their stages get what stays and what the forward took measured."""
    stages = ((0, "batch", 0), (0, "backward", 0), (1, "batch", 0))
    seen = CudaProbe(lambda size, seq_len, on_stage, *_: [on_stage(*stage) for stage in stages], CARD)(8, Shape())
    assert (seen.resting_bytes, seen.forward_bytes) == (120, 180)
    silent = CudaProbe(lambda *arguments: None, CARD)(8, Shape())
    assert (silent.resting_bytes, silent.forward_bytes) == (None, None)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_card_is_looked_at_by_any_name(device, cuda):
    """`cuda` is what a sweep asks for where no GPU is named."""
    facts = gpu_facts(torch.device(device))
    assert (facts["name"], facts["total_bytes"], facts["compute_capability"]) == ("made up", TOTAL, [9, 0])
    assert cuda.current == 0


@pytest.mark.gpu
@needs_a_card
def test_a_budget_is_kept_and_taken_back():
    """Under a budget of 1 GiB the answer's peak is within it, the next size fails, and the card is whole afterwards."""
    device, limit = torch.device("cuda:0"), 1 << 30
    workload = encoder()
    workload.model.to(device)
    step = Step(workload, StepConfig(), device)
    before = torch.cuda.memory_allocated(device)
    probe = CudaProbe(step.run, device, limit)
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
    return ChildProcessProbe(WorkloadSpec(f"tests.measure.workloads:{name}", arguments), StepConfig(), "cuda:0", limit)


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
        card = probe.query_gpu()
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
