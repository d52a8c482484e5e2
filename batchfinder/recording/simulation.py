"""A workload on any simulated GPU, by recordings that a child process makes. Nothing here imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace

from batchfinder.devices import Device, Multiprocessors
from batchfinder.errors import BatchFinderError
from batchfinder.recording.answers import TriedSizes
from batchfinder.recording.client import RecordingClient, TriedSize
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import NO_SCRATCH, TraceSource, between_gpus
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.stub_cards import card_of_device, recording_card
from batchfinder.training.spec import FAKE_DEVICE, RecordingJob, StepConfig, WorkloadSpec, is_cuda_build


class Simulation(contextlib.AbstractContextManager["Simulation"]):
    """One workload, recorded as needed by one process for all GPUs and sequence lengths.

    Args:
        spec: the workload.
        how: its steps are taken.
        recorder: what records them, by name; or a recording process to share, which this simulation does not close.

    Attributes:
        recorder: its name.
    """

    recorder = FAKE_DEVICE

    def __init__(self, spec: WorkloadSpec, how: StepConfig, recorder: RecordingClient | str = FAKE_DEVICE) -> None:
        self.spec = spec
        self.how = how
        self._owns_recorder = isinstance(recorder, str)
        self._recorder = RecordingClient(spec, recorder=recorder) if isinstance(recorder, str) else recorder
        self.recorder = self._recorder.recorder
        self.facts = self._recorder.facts  # of the workload that the process was opened with
        self._sources: dict[tuple[tuple[int, int], Multiprocessors, str], TraceSource] = {}
        self._recorded: dict[tuple[int, int | None], dict[tuple[tuple[int, int], str], Future[Trace]]] = {}
        self._on_others: dict[tuple[int, int | None, tuple[tuple[int, int], ...]], Future[Trace]] = {}
        self._ends: tuple[Simulation, ...] = ()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the recording process, unless it is shared."""
        if self._owns_recorder:
            self._recorder.close()

    def with_spec(self, spec: WorkloadSpec, how: StepConfig) -> Simulation:
        """Another workload, or another way to take its steps, in this simulation's recording process.

        Where the workload is not what the process was opened with, each recording builds it.
        """
        other = Simulation(spec, how, self._recorder)
        other.recorder = self.recorder
        return other

    def on_fake_device(self) -> Simulation:
        """The same on the fake device, in this simulation's recording process, whichever recorder that has.

        What runs another PyTorch than the installed one has a second process for it, which is closed with it.
        """
        other = Simulation(self.spec, self.how, self._recorder.on_installed_pytorch())
        other.recorder = FAKE_DEVICE
        return other

    def on_several(self, counts: Collection[int]) -> dict[int, Simulation]:
        """The same on other numbers of GPUs, in this simulation's recording process, by their number.

        The fewest and the most are recorded. Numbers in between are interpolated, linearly in one over their number,
        where the size of every block is linear in it; where it is not, they are recorded too.
        """
        found = {count: self.with_spec(self.spec, replace(self.how, gpus=count)) for count in sorted(counts)}
        ends = tuple(found.values())
        for simulation in ends[1:-1]:
            simulation._ends = ends[0], ends[-1]
        return found

    def source(
        self,
        capability: tuple[int, int],
        seq_lens: Iterable[int | None],
        reduces_on: Multiprocessors = NO_SCRATCH,
        card: str = "",
    ) -> TraceSource:
        """The step's traces on one kind of GPU, at these lengths and any others.

        What was recorded for one compute capability serves the others on which the kernels are the same, but for their
        sizes.

        Args:
            reduces_on: `Device.reduces_on`; `NO_SCRATCH` for a PyTorch whose reductions allocate nothing.
            card: what PyTorch's CUDA build is told of the card, in the words of `StubCard.setting`.
        """
        kind = capability, reduces_on, card
        if kind not in self._sources:
            ends = [(end.how.gpus, end.source(capability, seq_lens)) for end in self._ends]

            def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
                between = None
                if ends:
                    with contextlib.suppress(BatchFinderError):  # one cannot be recorded, and this one may be
                        traces = [(gpus, source.recorded(batch_size, seq_len)) for gpus, source in ends]
                        between = between_gpus(traces[0], traces[1], self.how.gpus)
                if between is not None:
                    made: Future[Trace] = Future()
                    made.set_result(between)
                    return made
                recorded = self._recorded.setdefault((batch_size, seq_len), {})
                if (capability, card) in recorded:
                    return recorded[capability, card]
                for earlier in recorded.values():
                    done = earlier.done() and earlier.exception() is None
                    if done and capability in earlier.result().alike:
                        return self._on_other(earlier.result(), capability)
                workload = None if self.spec == self._recorder.spec else self.spec
                job = RecordingJob(self.how, capability, batch_size, seq_len, workload, card)
                recorded[capability, card] = self._recorder.submit(job)
                return recorded[capability, card]

            compiled = self.spec.arguments.get("compile") is not None
            # Kernels' scratch memory, which the CUDA build records as well, goes up in steps.
            scales = self.recorder == FAKE_DEVICE
            self._sources[kind] = TraceSource(submit, seq_lens, compiled, scales, reduces_on)
        return self._sources[kind]

    def _on_other(self, trace: Trace, capability: tuple[int, int]) -> Future[Trace]:
        """A trace that was recorded for another compute capability; the same object for all on which it is the same."""
        different = trace.alike[capability]
        key = trace.batch_size, trace.seq_len, different
        if key not in self._on_others:
            sizes = list(trace.sizes)
            for block, size in different:
                sizes[block] = size
            self._on_others[key] = Future()
            self._on_others[key].set_result(replace(trace, sizes=tuple(sizes)) if different else trace)
        return self._on_others[key]

    def probe(
        self, device: Device, seq_lens: Iterable[int | None], allocator: AllocatorSettings | None = None
    ) -> SimulatedProbe:
        """A probe for one GPU, at the sequence lengths that will be asked for."""
        memory = DeviceMemory(device.total_bytes, device.usable_bytes)
        major, minor = device.compute_capability
        assumed = f"the card's own kernels: those of compute capability {major}.{minor} are assumed"
        unmodelled = [assumed] if device.assumed_capability else []
        if allocator is not None:
            unmodelled += [f"the allocator's setting {setting}" for setting in allocator.unmodelled]
        card = recording_card(device) if is_cuda_build(self.recorder) else ""
        source = self.source(device.compute_capability, seq_lens, device.reduces_on, card)
        return SimulatedProbe(source, memory, allocator, unmodelled)

    def tried_sizes(self, device: Device, allocator: AllocatorSettings) -> TriedSizes:
        """A probe that takes the step itself on a GPU, by PyTorch's CUDA build on the stub.

        Args:
            allocator: the settings of this process's environment, which the CUDA build reads itself.
        """
        card = replace(card_of_device(device), name="").setting
        workload = None if self.spec == self._recorder.spec else self.spec

        def submit(batch_size: int, seq_len: int | None) -> Future[TriedSize]:
            job = RecordingJob(self.how, device.compute_capability, batch_size, seq_len, workload, card, tried=True)
            return self._recorder.submit(job)

        left_out = [f"the allocator's setting {setting}" for setting in allocator.unmodelled]
        return TriedSizes(submit, left_out, twice=self.spec.arguments.get("compile") is not None)
