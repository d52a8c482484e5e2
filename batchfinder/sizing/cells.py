"""The cells of one model in a sweep: what each is asked, and the key of its answer in the cache."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace

from batchfinder.cache import CacheKey
from batchfinder.devices import Card
from batchfinder.recording.simulation import Simulation
from batchfinder.report.sweep import Cell
from batchfinder.reproductions.published import published_titan_x
from batchfinder.simulator.alloc_conf import CUBLAS_WORKSPACES
from batchfinder.sizing.sweep_request import SweepRequest
from batchfinder.training.spec import FAKE_DEVICE, OWN_OPTIMIZER, StepOptions, WorkloadFacts

_TITANS = ("Titan X Pascal", "GTX Titan X")


@dataclass(frozen=True)
class ModelCells:
    """The cells of one model, still to be found.

    Attributes:
        pool: searches some of them; None without one.
        instead: why the fake device records them and not the CUDA build; empty where the request has its way.
    """

    model: str
    simulation: Simulation
    seq_lens: tuple[int | None, ...]
    request: SweepRequest
    pool: Executor | None = None
    instead: str = ""

    def on_fake_device(self, instead: str) -> ModelCells:
        """The same, found by the fake device's recordings, and why."""
        request = replace(self.request, options=replace(self.request.options, recorder=FAKE_DEVICE))
        return replace(self, simulation=self.simulation.on_fake_device(), request=request, instead=instead)

    def cell(self, seq_len: int | None, card: Card) -> Cell:
        """One of the cells."""
        request, options = self.request, self.request.options
        # The published figures are for a whole Titan X of 12 GB, training in fp32 with Adam.
        usual = replace(options, attention=None, recorder=FAKE_DEVICE) == StepOptions()
        like_published = card.name in _TITANS and usual
        published = published_titan_x().get((self.model, seq_len or 0))
        if self.simulation.facts().brings_optimizer:
            options = replace(options, optimizer=OWN_OPTIMIZER)
        if options.gpus > 1:
            options = replace(options, gpus=card.count)
        return Cell(
            model=self.model,
            seq_len=seq_len,
            card=card,
            options=options,
            headroom_bytes=request.reserve_bytes(card),
            target_batch_size=request.target_batch_size,
            min_batch_size=request.min_batch_size,
            multiple_of=request.multiple_of,
            exact=request.exact,
            published=published if like_published and options.attention != "flash" else None,
        )


def cache_key(cell: Cell, facts: WorkloadFacts, request: SweepRequest) -> CacheKey:
    """Everything that changes a simulated cell's result."""
    device, options = cell.card.device, cell.options
    workspaces = {name: os.environ[name] for name in (CUBLAS_WORKSPACES,) if name in os.environ}
    return CacheKey(
        model=facts.fingerprint,
        gpu=device.name,
        total_bytes=device.total_bytes,
        usable_bytes=device.usable_bytes,
        seq_len=cell.seq_len,
        mode=options.mode,
        precision=options.precision,
        optimizer=options.optimizer,
        optimizer_options={},
        attention=options.attention or "",
        gradient_checkpointing=bool(options.gradient_checkpointing),
        accumulation=request.step.micro_batches,
        allocator=asdict(request.allocator) | workspaces,
        max_batch_size=request.max_batch_size,
        floor=request.min_batch_size,
        multiple_of=request.multiple_of,
        tolerance=0.0,
        headroom_bytes=cell.headroom_bytes,
        source="simulated",
        versions=facts.versions,
        extra={"capability": device.compute_capability, "multiprocessors": device.reduces_on.number, **options.newer()},
    )
