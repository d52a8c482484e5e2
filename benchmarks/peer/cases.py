"""What is searched: recorded steps on cards of chosen sizes, and real training within real limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from batchfinder.recording.simulation import Simulation, StepConfig
from batchfinder.results import Shape
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.scaling import TraceSource
from batchfinder.training.spec import WorkloadSpec
from batchfinder.units import GIB, MIB, format_bytes
from benchmarks.peer.card import Remembering, SimulatedCard
from benchmarks.peer.work import Work

_CAPABILITY = (8, 0)
_PLENTY = 1 << 50


@dataclass(frozen=True)
class Simulated:
    """A model's recorded step on a card that has just the memory of some batch size.

    Attributes:
        model: a name in the zoo.
        seq_len: its samples' length, or side in pixels.
        size: the batch size whose reserved bytes the card has. The true maximum is looked for by itself.
        cap: no larger size is of use.
    """

    model: str
    seq_len: int
    size: int
    cap: int | None = None

    @property
    def name(self) -> str:
        """In the table."""
        capped = "" if self.cap is None else f", cap {self.cap}"
        return f"{self.model} at {self.seq_len}{capped}"


@dataclass(frozen=True)
class Real:
    """Real training.

    Attributes:
        net: a name in `nets.NETS`.
        budget_bytes: what it may take, the model included.
    """

    net: str
    budget_bytes: int

    @property
    def name(self) -> str:
        """In the table."""
        return f"{self.net} in {format_bytes(self.budget_bytes)}"


SIMULATED = (
    *(Simulated("gpt2", 1024, size) for size in (1, 3)),
    *(Simulated("bert-large", 512, size) for size in (7, 13, 23)),
    *(Simulated("resnet50", 224, size) for size in (47, 97, 201, 389)),
    *(Simulated("distilbert", 32, size) for size in (777, 1531, 2999)),
    Simulated("resnet50", 224, 97, cap=60),
    Simulated("resnet50", 224, 97, cap=150),
)
REAL = {
    "cpu": (Real("transformer", 512 * MIB), Real("transformer", 1024 * MIB), Real("conv net", 768 * MIB)),
    "cuda": tuple(Real(net, size * GIB) for net in ("transformer", "conv net") for size in (4, 16)),
}
QUICK = (SIMULATED[2], SIMULATED[6])


def simulated_works(cases: tuple[Simulated, ...]) -> Iterator[tuple[Simulated, Work]]:
    """Record each model once, and put it on the cards. The recording processes have ended before the first is given.

    Args:
        cases: of any models.
    """
    sources: dict[tuple[str, int], TraceSource] = {}
    with ExitStack() as running:
        for key in dict.fromkeys((case.model, case.seq_len) for case in cases):
            spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": key[0]})
            simulation = running.enter_context(Simulation(spec, StepConfig()))
            sources[key] = simulation.source(_CAPABILITY, [key[1]])
            sources[key].prefetch()
        for (_, seq_len), source in sources.items():
            for size in (1, 2):
                source.at(size, seq_len)
    for case in cases:
        source, shape = sources[case.model, case.seq_len], Shape(case.seq_len)
        needed = SimulatedProbe(source, DeviceMemory(_PLENTY, _PLENTY)).needed_bytes(case.size, shape)
        yield (
            case,
            Work("small", case.cap, card=SimulatedCard(Remembering(source, DeviceMemory(needed, needed)), shape)),
        )
