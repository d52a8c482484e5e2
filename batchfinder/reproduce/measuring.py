"""The same cells by real steps, on a GPU that is here, under the table's budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchfinder.errors import CardNeeded, InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.outcome import Shape
from batchfinder.probing.card import look_at
from batchfinder.probing.process import ProcessProbe
from batchfinder.search import Secant
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.simulation import HowToStep
from batchfinder.units import format_bytes

DEVICE = "cuda:0"


def require_card(needed_bytes: dict[str, int], device: str = DEVICE) -> str:
    """A GPU that is here and has room for the cells.

    Args:
        needed_bytes: what PyTorch's allocator must be able to take of it, by table.
        device: which, as `torch.device` takes it.

    Returns:
        The device.

    Raises:
        CardNeeded: there is none, or too little of it is free.
    """
    table = max(needed_bytes, key=needed_bytes.__getitem__)
    needed = needed_bytes[table]
    needs = f"reproduce {table} --measured needs a GPU with {format_bytes(needed)} free beside its CUDA context"
    try:
        card = look_at(device)
    except InvalidValue:
        raise CardNeeded(needed, f"{needs}; there is none here that PyTorch can use") from None
    if card.free_bytes < needed:
        raise CardNeeded(needed, f"{needs}; of the {card.name} here {format_bytes(card.free_bytes)} is free")
    return device


@dataclass(frozen=True)
class RealStep:
    """A step on a device that is here, under a limit.

    Attributes:
        device: as `torch.device` takes it.
        spec: how to build the workload.
        how: how the step is taken.
        limit_bytes: what the allocator may reserve.
        seq_len: tokens per sample.
    """

    device: str
    spec: WorkloadSpec
    how: HowToStep
    limit_bytes: int
    seq_len: int

    def largest(self, predicted: int) -> int:
        """The largest batch that trains: it ran, and the next one up did not.

        Args:
            predicted: where to look first.
        """
        with self._probe() as probe:
            search = Secant(self.limit_bytes, tolerance=0.0, predicted=max(predicted, 1))
            return find_max_batch_size(probe, Shape(self.seq_len), search=search).max_batch_size

    def last_rung(self, rungs: Sequence[int]) -> int:
        """The last of a ladder's batch sizes before the first that does not run; 0 if that is the first.

        Args:
            rungs: the sizes, smallest first.
        """
        largest = 0
        with self._probe() as probe:
            for batch_size in rungs:
                if not probe(batch_size, Shape(self.seq_len)).fits:
                    break
                largest = batch_size
        return largest

    def peak_bytes(self, batch_size: int) -> int | None:
        """The most that was allocated at one time; None where the size does not run.

        Args:
            batch_size: samples in a micro-batch.
        """
        with self._probe() as probe:
            return probe(batch_size, Shape(self.seq_len)).peak_allocated_bytes

    def _probe(self) -> ProcessProbe:
        return ProcessProbe(self.spec, self.how.settings(), self.device, self.limit_bytes)
