"""Readings: what stays between steps, and what the first forward takes."""

from __future__ import annotations

import torch

from batchfinder.measure.trial import StageReadings
from batchfinder.training.step import Step, StepSettings
from batchfinder.training.workload import Workload


class MadeUpMemory:
    """Counts up by ten with each reading; the peak is five above what is held."""

    def __init__(self):
        self.now = 100

    def held(self):
        self.now += 10
        return self.now

    def peak(self):
        return self.now + 5


def readings_of(**settings):
    """The readings of real steps of a small net, on memory that is made up."""
    memory = MadeUpMemory()
    readings = StageReadings(memory.held, memory.peak)
    workload = Workload(torch.nn.Linear(4, 4), lambda batch_size, seq_len: torch.ones(batch_size, 4))
    Step(workload, StepSettings(**settings), torch.device("cpu")).run(2, None, readings)
    return readings


def test_two_steps():
    """What stays is read as the second step begins; the first forward's peak counts from the first batch's base."""
    readings = readings_of()
    assert (readings.resting_bytes, readings.forward_bytes) == (120, 5)


def test_accumulation():
    """What stays is read as the last micro-batch begins, when gradients are alive."""
    assert readings_of(micro_batches=2).resting_bytes == 130


def test_one_step_tells_nothing_of_the_next():
    """A single step has no later one; a forward alone has no backward that would end it."""
    assert readings_of(steps=1).resting_bytes is None
    alone = readings_of(mode="forward")
    assert (alone.resting_bytes, alone.forward_bytes) == (None, None)
