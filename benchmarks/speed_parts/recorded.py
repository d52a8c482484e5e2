"""A sweep that scales nothing: every size that is tried is recorded itself, then replayed through the allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchfinder.devices import Device
from batchfinder.find import find_max_batch_size
from batchfinder.recording.simulation import Simulation, StepConfig
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.search import Secant
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.training.spec import WorkloadSpec
from speed_parts.clock import Clock


class RecordedProbe:
    """Records each size it is asked about.

    Args:
        probe: knows the card and records.
    """

    source = "simulated"
    unmodelled: tuple[str, ...] = ()

    def __init__(self, probe: SimulatedProbe) -> None:
        self._probe = probe

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        later = self._probe.exact_outlook(batch_size, shape)
        timeline = later.timeline
        if not later.fits:
            return Measurement(Verdict.OUT_OF_MEMORY)
        return Measurement(Verdict.FITS, timeline.max_allocated_bytes, timeline.max_reserved_bytes)


def spec_of(model: str) -> WorkloadSpec:
    """How the recording process builds a model, as `sweep` would have it.

    Args:
        model: a name in the zoo, or a config.
    """
    return WorkloadSpec("batchfinder.models:build_workload", {"spec": model})


def recorded_each(model: str, seq_lens: Sequence[int], device: Device) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Find each length's largest size with few sizes, recording each of them.

    Args:
        model: a name in the zoo, or a config.
        seq_lens: the lengths.
        device: the card.

    Returns:
        The seconds it took, the recording process's start included, and the cells.
    """
    clock = Clock()
    cells = []
    with Simulation(spec_of(model), StepConfig()) as simulation:
        probe = RecordedProbe(simulation.probe(device, seq_lens))
        for seq_len in seq_lens:
            outcome = find_max_batch_size(
                probe, Shape(seq_len), search=Secant(limit_bytes=device.usable_bytes, tolerance=0.0)
            )
            tried = [trial.batch_size for trial in outcome.trials]
            cells.append({"seq_len": seq_len, "max_batch_size": outcome.max_batch_size, "tried": tried})
    return clock.read(), cells
