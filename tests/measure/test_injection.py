"""An out-of-memory injected anywhere in a real training step is recognised, and leaves nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.measure.trial import Failure, attempt
from batchfinder.results import Verdict
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step
from tests.measure.workloads import convolutions, encoder

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


class FailingOperator(TorchDispatchMode):
    """Raises in the Nth operator, and watches every tensor that an operator returned."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at
        self.count = 0
        self.references = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError(MESSAGE)
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.references.append(weakref.ref(output.untyped_storage()))
        return output


def _forward_hook(workload, step):
    def hook(module, args, output):
        raise torch.OutOfMemoryError(MESSAGE)

    list(workload.model.modules())[-1].register_forward_hook(hook)


def _backward_hook(workload, step):
    def hook(gradient):
        raise torch.OutOfMemoryError(MESSAGE)

    next(workload.model.parameters()).register_hook(hook)


def _loss(workload, step):
    def loss(output, batch):
        raise torch.OutOfMemoryError(MESSAGE)

    object.__setattr__(workload, "loss", loss)


def _optimizer(workload, step):
    def hook(optimizer, args, kwargs):
        raise torch.OutOfMemoryError(MESSAGE)

    def make(parameters):
        optimizer = torch.optim.AdamW(parameters)
        optimizer.register_step_post_hook(hook)
        return optimizer

    object.__setattr__(workload, "optimizer", make)


@pytest.mark.parametrize("build", [encoder, convolutions])
@pytest.mark.parametrize("inject", [_forward_hook, _backward_hook, _loss, _optimizer])
def test_in_each_stage(build, inject):
    """In the forward, the loss, the backward and the optimizer: recognised, with the device's own words."""
    workload = build()
    step = Step(workload, StepConfig(micro_batches=2), torch.device("cpu"))
    inject(workload, step)
    assert attempt(lambda: step.run(2, 8)) == Failure(Verdict.OUT_OF_MEMORY, MESSAGE)


def _operators(step):
    counting = FailingOperator()
    with counting:
        step.run(2, 8)
    return counting.count


def test_in_the_nth_operator():
    """In 12 operators spread over the step, backward and optimizer included: nothing but the model stays alive."""
    workload = convolutions()
    workload.model.requires_grad_()
    step = Step(workload, StepConfig(), torch.device("cpu"))
    total = _operators(step)
    for at in range(1, total + 1, total // 11):
        workload.model.zero_grad(set_to_none=True)
        step.optimizer = None
        gc.collect()
        held = {tensor.untyped_storage()._cdata for tensor in (*workload.model.parameters(), *workload.model.buffers())}
        failing = FailingOperator(at)

        def run(failing=failing):
            with failing:
                step.run(2, 8)

        outcome = attempt(run)
        assert outcome == Failure(Verdict.OUT_OF_MEMORY, MESSAGE), at
        workload.model.zero_grad(set_to_none=True)
        step.optimizer = None
        alive = [reference() for reference in failing.references if reference() is not None]
        left = [storage for storage in alive if storage._cdata not in held]
        assert not left, f"{len(left)} storages live on after a failure in operator {at} of {total}"
