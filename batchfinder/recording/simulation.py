"""A workload on any simulated GPU, and the exact search there. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from batchfinder.devices import Device
from batchfinder.find import find_max_batch_size
from batchfinder.recording.client import RecordingClient
from batchfinder.results import SearchResult, Shape
from batchfinder.search import Capped, Search, Secant
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadFacts, WorkloadSpec


class Simulation:
    """One workload, recorded as needed by one process for all GPUs and sequence lengths.

    Args:
        spec: how to build it.
        how: how the step is taken.
        recorder: a recording process to share, which this simulation does not close; None for a new one.
    """

    def __init__(self, spec: WorkloadSpec, how: StepConfig, recorder: RecordingClient | None = None) -> None:
        self.spec = spec
        self.how = how
        self._owns_recorder = recorder is None
        self._recorder = recorder or RecordingClient(spec)
        self._sources: dict[tuple[int, int], TraceSource] = {}

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the recording process, unless it is shared."""
        if self._owns_recorder:
            self._recorder.close()

    def facts(self) -> WorkloadFacts:
        """What there is to know about the workload that the process was opened with; waits until it is built."""
        return self._recorder.facts()

    def with_spec(self, spec: WorkloadSpec, how: StepConfig) -> Simulation:
        """Another workload, or another way to take its steps, in this simulation's recording process.

        Args:
            spec: how to build it; where it is not what the process was opened with, each recording builds it.
            how: how the step is taken.
        """
        return Simulation(spec, how, self._recorder)

    def source(self, capability: tuple[int, int], seq_lens: Iterable[int | None]) -> TraceSource:
        """The step's traces on GPUs of one compute capability, at these lengths and any others."""
        if capability not in self._sources:

            def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
                workload = None if self.spec == self._recorder.spec else self.spec
                return self._recorder.submit(RecordingJob(self.how, capability, batch_size, seq_len, workload))

            self._sources[capability] = TraceSource(submit, seq_lens)
        return self._sources[capability]

    def probe(
        self, device: Device, seq_lens: Iterable[int | None], allocator: AllocatorSettings | None = None
    ) -> SimulatedProbe:
        """A probe for one GPU.

        Args:
            device: the GPU, and how much of it may be used.
            seq_lens: the lengths that will be asked for.
            allocator: the caching allocator's settings.
        """
        memory = DeviceMemory(device.total_bytes, device.usable_bytes)
        major, minor = device.compute_capability
        assumed = f"the card's own kernels: those of compute capability {major}.{minor} are assumed"
        unmodelled = [assumed] if device.assumed_capability else []
        if allocator is not None:
            unmodelled += [f"the allocator's setting {setting}" for setting in allocator.unmodelled]
        return SimulatedProbe(self.source(device.compute_capability, seq_lens), memory, allocator, unmodelled)


def search_simulated(probe: SimulatedProbe, shape: Shape, max_batch_size: int | None = None) -> SearchResult:
    """Find the largest batch size that fits, with tolerance 0.

    Args:
        probe: the simulated GPU and the step.
        shape: one sample's shape.
        max_batch_size: the largest size of interest; None for no such bound.
    """
    search: Search[Any] = Secant(tolerance=0.0, predicted=predict_max_batch_size(probe, shape), margin=0.0)
    if max_batch_size is not None:
        search = Capped(search, max_batch_size)
    return find_max_batch_size(probe, shape, search=search)
