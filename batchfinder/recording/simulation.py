"""A workload on any simulated GPU: one recording process, shared by all cards and sequence lengths.

Nothing here imports torch.

The largest batch on a simulated card.

A simulated step that behaves like a real one: it returns, or raises what CUDA raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from batchfinder.devices import Device
from batchfinder.find import find_max_batch_size
from batchfinder.recording.client import RecordingClient
from batchfinder.results import Measurement, SearchResult, Shape
from batchfinder.search import Capped, Search, Secant
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import RecordingJob, WorkloadFacts, WorkloadSpec


@dataclass(frozen=True)
class StepConfig:
    """How the step is taken, as values that pass to the recording process.

    Attributes:
        mode: `train`, `forward` or `inference`.
        precision: `fp32`, `bf16-mixed`, `16-mixed` or `bf16-true`.
        optimizer: a name in `batchfinder.training.step`.
        micro_batches: forwards and backwards per optimizer step.
        flash: whether attention must run as the flash kernel.
    """

    mode: str = "train"
    precision: str = "fp32"
    optimizer: str = "adamw"
    micro_batches: int = 1
    flash: bool = False

    def settings(self) -> dict[str, Any]:
        """The fields of a `StepSettings`."""
        return {
            "mode": self.mode,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "micro_batches": self.micro_batches,
        }


class Simulation:
    """One workload, recorded as needed.

    Args:
        spec: how to build it.
        how: how the step is taken.
        recorder: a recording process that is there already and belongs to somebody else; None for a new one.
    """

    def __init__(self, spec: WorkloadSpec, how: StepConfig, recorder: RecordingClient | None = None) -> None:
        self.spec = spec
        self.how = how
        self._owned = recorder is None
        self._recorder = recorder or RecordingClient(spec)
        self._sources: dict[tuple[int, int], TraceSource] = {}

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the recording process, if it is this simulation's own."""
        if self._owned:
            self._recorder.close()

    def facts(self) -> WorkloadFacts:
        """What there is to know about the workload that the process was opened with; waits until it is built."""
        return self._recorder.facts()

    def varied(self, spec: WorkloadSpec, how: StepConfig) -> Simulation:
        """The workload built or stepped otherwise, in the same recording process, which stays this simulation's.

        Args:
            spec: how to build it; where it differs, it is built anew for each recording.
            how: how the step is taken.
        """
        return Simulation(spec, how, self._recorder)

    def source(self, capability: tuple[int, int], seq_lens: Iterable[int | None]) -> TraceSource:
        """The step's traces on GPUs of one compute capability, at these lengths and any others."""
        if capability not in self._sources:

            def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
                workload = None if self.spec == self._recorder.spec else self.spec
                job = RecordingJob(self.how.settings(), capability, batch_size, seq_len, self.how.flash, workload)
                return self._recorder.submit(job)

            self._sources[capability] = TraceSource(submit, seq_lens)
        return self._sources[capability]

    def probe(
        self, device: Device, seq_lens: Iterable[int | None], allocator: AllocatorSettings | None = None
    ) -> SimulatedProbe:
        """A probe for one card.

        Args:
            device: the card, with what of it may be used.
            seq_lens: the lengths that will be asked for.
            allocator: the caching allocator's settings.
        """
        memory = DeviceMemory(device.total_bytes, device.usable_bytes)
        major, minor = device.compute_capability
        assumed = f"the card's own kernels: those of compute capability {major}.{minor} are assumed"
        unmodelled = [assumed] if device.assumed_capability else []
        return SimulatedProbe(self.source(device.compute_capability, seq_lens), memory, allocator, unmodelled)


def search_simulated(probe: SimulatedProbe, shape: Shape, max_batch_size: int | None = None) -> SearchResult:
    """The exact answer.

    Args:
        probe: knows the card and the step.
        shape: one sample's shape.
        max_batch_size: the search's cap; None without one.
    """
    search: Search[Any] = Secant(tolerance=0.0, predicted=predict_max_batch_size(probe, shape), margin=0.0)
    if max_batch_size is not None:
        search = Capped(search, max_batch_size)
    return find_max_batch_size(probe, shape, search=search)


def simulated_step(probe: SimulatedProbe, batch_size: int, shape: Shape) -> Measurement:
    """Take a step on the simulated card, for code that expects a genuine out-of-memory error.

    Args:
        probe: knows the card and the step.
        batch_size: samples in a micro-batch.
        shape: one sample's shape.

    Returns:
        What was seen, when the size fits.

    Raises:
        torch.OutOfMemoryError: it does not; the text is PyTorch's own, with the word "simulated".
    """
    measurement = probe(batch_size, shape)
    if not measurement.fits:
        raise torch.OutOfMemoryError(measurement.message)
    return measurement
