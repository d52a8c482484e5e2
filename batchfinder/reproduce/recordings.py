"""Recordings of many workloads by one process, which imports its libraries once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from types import TracebackType

from batchfinder.simulator.source import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.job import RecordingJob
from batchfinder.tracing.recorder import Recorder
from batchfinder.tracing.simulation import HowToStep


class Recordings:
    """Traces of any workload's steps. The process starts with the first workload that is asked for."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def __enter__(self) -> Recordings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def source(
        self, spec: WorkloadSpec, how: HowToStep, capability: tuple[int, int], seq_lens: Iterable[int | None]
    ) -> TraceSource:
        """A workload's step at any size, whose first recordings are under way.

        Args:
            spec: how to build the workload.
            how: how the step is taken.
            capability: the simulated GPU's compute capability.
            seq_lens: the lengths that will be asked for.
        """
        recorder = self._recorder = self._recorder or Recorder(spec)

        def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
            return recorder.submit(RecordingJob(how.settings(), capability, batch_size, seq_len, how.flash, spec))

        source = TraceSource(submit, seq_lens)
        source.prefetch()
        return source
