from __future__ import annotations

import gc
import platform
import weakref

import pytest
import torch
from torch import nn

from batchfinder.measure.host_limits import status
from batchfinder.measure.trial import Failure, attempt, clear
from batchfinder.results import Verdict

OOM = torch.OutOfMemoryError


@pytest.fixture(autouse=True)
def no_collection():
    """Reference counts alone must do: no garbage collection runs unless it is asked for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Witness:
    """Weak references to the tensors that a failing step has made."""

    def __init__(self):
        self.references = []

    def tensor(self, *shape, **options):
        made = torch.ones(*(shape or (8,)), **options)
        self.references.append(weakref.ref(made))
        return made

    def all_dead(self):
        assert self.references
        return all(reference() is None for reference in self.references)


def _nested(witness):
    local = witness.tensor()

    def inner(argument):
        deeper = witness.tensor()
        raise OOM(f"CUDA out of memory. {len(argument) + len(deeper)}")

    inner(local)


def _in_the_backward(witness):
    class Exploding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            saved = ctx.saved_tensors[0]
            held = witness.tensor()
            raise OOM(f"CUDA out of memory. {saved.shape} {held.shape}")

    x = witness.tensor(requires_grad=True)
    y = Exploding.apply(x * 3)
    witness.references.append(weakref.ref(y))
    y.sum().backward()


def _in_a_backward_hook(witness):
    def hook(gradient):
        held = witness.tensor()
        raise OOM(f"CUDA out of memory. {held.shape}")

    x = witness.tensor(requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()


def _chained(witness):
    first = witness.tensor()
    try:
        second = witness.tensor()
        raise OOM(f"CUDA out of memory. {first.shape} {second.shape}")
    except OOM as error:
        third = witness.tensor()
        raise ValueError(f"training failed {third.shape}") from error


def _in_the_context(witness):
    try:
        held = witness.tensor()
        raise KeyError(held.shape)
    except KeyError:
        held_as_well = witness.tensor()
        raise OOM(f"CUDA out of memory. {held_as_well.shape}") from None


def _keeping_its_own_exception(witness):
    held = witness.tensor()
    try:
        raise OOM(f"CUDA out of memory. {held.shape}")
    except OOM as error:
        kept = error  # a cycle: the exception, its traceback, this frame
        raise kept from None


def _in_a_generator(witness):
    def batches():
        held = witness.tensor()
        yield held
        raise OOM("CUDA out of memory.")

    for batch in batches():
        witness.references.append(weakref.ref(batch * 2))


def _in_a_module(witness):
    class Net(nn.Module):
        def forward(self, x):
            hidden = x * 2
            witness.references.append(weakref.ref(hidden))
            raise OOM("CUDA out of memory.")

    Net()(witness.tensor())


STEPS = [
    _nested,
    _in_the_backward,
    _in_a_backward_hook,
    _chained,
    _in_the_context,
    _keeping_its_own_exception,
    _in_a_generator,
    _in_a_module,
]


@pytest.mark.parametrize("step", STEPS)
def test_the_failed_step_is_dead_when_attempt_returns(step):
    """Every tensor of the failed step is dead before anything is cleared, with no garbage collection."""
    witness = Witness()
    outcome = attempt(lambda: step(witness))
    assert isinstance(outcome, Failure)
    assert outcome.verdict is Verdict.OUT_OF_MEMORY
    assert outcome.message.startswith("CUDA out of memory.")
    assert witness.all_dead()


def test_without_attempt_it_lives_in_the_traceback():
    """The control: while the exception is handled, the failed step's tensors are alive."""
    witness = Witness()
    try:
        _nested(witness)
    except OOM:
        assert not witness.all_dead()


@pytest.mark.parametrize("keep", [lambda error: error, lambda error: error.__traceback__])
def test_even_an_exception_that_is_kept_keeps_no_tensors(keep):
    """User code that logs exceptions, or their tracebacks, in a list keeps these, but no longer the step."""
    witness, log = Witness(), []

    def step():
        try:
            _nested(witness)
        except OOM as error:
            log.append(keep(error))
            raise

    attempt(step)
    assert len(log) == 1
    assert witness.all_dead()


def test_a_bug_passes_unchanged():
    """An error that is not about the size is raised: the same object, with its traceback."""
    bug = KeyError("memory")

    def step():
        raise bug

    with pytest.raises(KeyError) as caught:
        attempt(step)
    assert caught.value is bug
    assert "step" in {entry.name for entry in caught.traceback}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2)])
def test_an_interrupt_passes(error):
    """Ctrl-C and an exit are never a verdict."""

    def step():
        raise error

    with pytest.raises(type(error)):
        attempt(step)


def test_a_step_that_runs_returns_its_value():
    """Whatever the step returns is returned, None too."""
    assert attempt(lambda: 7) == 7
    assert attempt(lambda: None) is None


def test_an_unsure_sign_says_so():
    """A text that other faults share comes with a caveat."""

    def step():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")

    outcome = attempt(step)
    assert outcome == Failure(
        Verdict.OUT_OF_MEMORY,
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. (cuDNN says the same of faults other than a full memory.)",
    )


def test_a_failure_without_words_is_named():
    """`MemoryError()` has no text; its name is given."""

    def step():
        raise MemoryError

    assert attempt(step) == Failure(Verdict.HOST_OUT_OF_MEMORY, "MemoryError")


def test_clear_collects_cycles_and_runs_on_the_cpu():
    """Cycles of the user's own die in `clear`."""

    class Node:
        pass

    node = Node()
    node.itself, node.tensor = node, torch.ones(4)
    reference = weakref.ref(node.tensor)
    del node
    assert reference() is not None
    clear(torch.device("cpu"))
    assert reference() is None


def test_the_heap_is_returned():
    """Pages of the heap that were freed below one in use are the system's again after `clear`, with glibc."""
    parts = [torch.ones(24 << 10) for _ in range(640)]  # of 96 KiB, 60 MiB in all, none of them mapped by itself
    last = parts.pop()
    parts.clear()
    before = status("VmRSS")
    clear(torch.device("cpu"))
    if platform.libc_ver()[0] == "glibc" and before is not None:
        assert before - status("VmRSS") > 40 << 20
    assert last[0] == 1
