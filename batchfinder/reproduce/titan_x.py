"""`reproduce titan-x`: what google-research/bert published for a 12 GB Titan X, and what that card trains today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.devices import Device, device_for, find_gpu
from batchfinder.outcome import Shape
from batchfinder.published import titan_x
from batchfinder.reproduce.flops import checkpointing_cost
from batchfinder.reproduce.measuring import RealStep
from batchfinder.reproduce.reproduction import Bench, Reproduction, row
from batchfinder.reproduce.titan_x_sheets import notes, sheets
from batchfinder.simulator.memory import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.source import TraceSource
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.simulated_search import search_simulated
from batchfinder.tracing.simulation import HowToStep
from batchfinder.zoo.catalogue import find_model

NAME = "titan-x"
TARGET_BATCH_SIZE = 256
CARD = device_for(find_gpu("titan x"))

_ZOO = "batchfinder.zoo:build_workload"
_EIGHT_BIT = "batchfinder.reproduce.models.titan_x:build"


@dataclass(frozen=True)
class Setup:
    """One way to train.

    Attributes:
        attention: `eager` or `sdpa`.
        precision: as `HowToStep` has it.
        gradient_checkpointing: whether activations are recomputed.
        optimizer: as `HowToStep` has it.
        builder: of the workload.
    """

    attention: str
    precision: str
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    builder: str = _ZOO

    def spec(self, model: str) -> WorkloadSpec:
        """How to build a model of the zoo for it."""
        options = {"attention": self.attention, "gradient_checkpointing": self.gradient_checkpointing}
        return WorkloadSpec(self.builder, {"spec": model, **options})

    def how(self, micro_batches: int = 1) -> HowToStep:
        """How a step is taken."""
        return HowToStep(precision=self.precision, optimizer=self.optimizer, micro_batches=micro_batches)


LIKE_FOR_LIKE = "fp32_eager"
"""The setup that computes what TensorFlow 1.11 did: fp32, and attention without a fused kernel."""

SETUPS = {
    LIKE_FOR_LIKE: Setup("eager", "fp32"),
    "fp32_sdpa": Setup("sdpa", "fp32"),
    "bf16_mixed_sdpa": Setup("sdpa", "bf16-mixed"),
    "bf16_mixed_sdpa_checkpointing": Setup("sdpa", "bf16-mixed", gradient_checkpointing=True),
}
PLANNED = ("fp32_sdpa", "bf16_mixed_sdpa_checkpointing")
"""The setups that an accumulation plan is made for: today's default, and the one with the most room."""
CHANGES = {
    "gradient_checkpointing": Setup("eager", "fp32", gradient_checkpointing=True),
    "adamw_8bit": Setup("eager", "fp32", builder=_EIGHT_BIT),
    "sgd": Setup("eager", "fp32", optimizer="sgd"),
}
"""Each one change to the setup that is like for like."""


def needed_bytes() -> int:
    """What a Titan X leaves to PyTorch's allocator."""
    return CARD.usable_bytes


def reproduce(bench: Bench) -> Reproduction:
    """Find all 12 cells in each setup, with plans, and what else would make the cells fit that did not."""
    published = titan_x()
    models = tuple(dict.fromkeys(model for model, _ in published))
    bench.doing(f"recording {' and '.join(models)}")
    seq_lens = tuple(dict.fromkeys(seq_len for _, seq_len in published))
    found = {model: _Model(bench, model, seq_lens, CARD) for model in models}
    rows = []
    for (model, seq_len), size in published.items():
        bench.doing(f"{model} at {seq_len}")
        rows.append(found[model].row(seq_len, size))
    unmodelled = dict.fromkeys(text for model in found.values() for text in model.unmodelled)
    return Reproduction(NAME, tuple(rows), sheets(rows, CARD), notes(rows, unmodelled))


class _Model:
    """One model's recordings, all of which are under way from the start.

    Args:
        bench: makes them.
        model: its name in the zoo.
        seq_lens: of its cells.
        card: what is simulated.

    Attributes:
        unmodelled: what the answers so far leave out, in words.
    """

    def __init__(self, bench: Bench, model: str, seq_lens: tuple[int, ...], card: Device) -> None:
        self._bench = bench
        self._model = model
        self.unmodelled: dict[str, None] = {}
        self._card = card
        self._memory = DeviceMemory(card.total_bytes, card.usable_bytes)
        unfit = [seq_len for (name, seq_len), size in titan_x().items() if name == model and size == 0]
        changed = sorted({length for seq_len in unfit for length in (seq_len // 2, seq_len)})

        def record(setup: Setup, lengths: tuple[int, ...], micro_batches: int = 1) -> TraceSource:
            return bench.recordings.source(
                setup.spec(model), setup.how(micro_batches), card.compute_capability, lengths
            )

        # All lengths at once, as lengths between two recorded ones need no recording of their own.
        lengths = {name: (*seq_lens, *changed) if name == LIKE_FOR_LIKE else seq_lens for name in SETUPS}
        self._sources = {name: record(setup, lengths[name]) for name, setup in SETUPS.items()}
        # With accumulation the gradients of one micro-batch are there while the next one runs.
        self._accumulating = {name: record(SETUPS[name], seq_lens, micro_batches=2) for name in PLANNED}
        self._changed = {name: record(setup, tuple(changed)) for name, setup in CHANGES.items() if changed}

    def row(self, seq_len: int, published: int) -> dict[str, Any]:
        """One cell."""
        largest = {name: self._largest(source, seq_len) for name, source in self._sources.items()}
        more: dict[str, Any] = {
            "model": self._model,
            "seq_len": seq_len,
            "max_batch_sizes": largest,
            "target_batch_size": TARGET_BATCH_SIZE,
            "plans": {
                "published": _plan(published),
                **{name: _plan(self._largest(source, seq_len)) for name, source in self._accumulating.items()},
            },
            "checkpointing_flops_ratio": round(checkpointing_cost(find_model(self._model).config, seq_len), 4),
        }
        if published == 0:
            more["one_change"] = {
                **{name: self._largest(source, seq_len) for name, source in self._changed.items()},
                "half_the_length": self._largest(self._sources[LIKE_FOR_LIKE], seq_len // 2),
            }
        if self._bench.device is not None:
            more["measured"] = {name: self._measured(name, seq_len, largest[name]) for name in SETUPS}
        return row(f"{self._model} {seq_len}", published, largest[LIKE_FOR_LIKE], **more)

    def _largest(self, source: TraceSource, seq_len: int) -> int:
        outcome = search_simulated(SimulatedProbe(source, self._memory), Shape(seq_len))
        self.unmodelled |= dict.fromkeys(outcome.unmodelled)
        return outcome.max_batch_size

    def _measured(self, name: str, seq_len: int, predicted: int) -> int:
        assert self._bench.device is not None
        self._bench.doing(f"training {self._model} at {seq_len}, {name}")
        setup, limit = SETUPS[name], self._card.usable_bytes
        return RealStep(self._bench.device, setup.spec(self._model), setup.how(), limit, seq_len).largest(predicted)


def _plan(max_batch_size: int) -> dict[str, int] | None:
    if not max_batch_size:
        return None
    plan: AccumulationPlan = plan_accumulation(TARGET_BATCH_SIZE, max_batch_size)
    return {"micro_batch_size": plan.micro_batch_size, "accumulation": plan.accumulation}
