"""`reproduce titan-x`: what google-research/bert published for a 12 GB Titan X, and what that card trains today."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchfinder.accumulation import plan_accumulation
from batchfinder.devices import Device, device_for, find_gpu
from batchfinder.models.catalog import find_model
from batchfinder.recording.answers import search_simulated
from batchfinder.report.table import Table
from batchfinder.reproductions.published import Context, Reproduction, largest_measured, published_titan_x, row
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import BEFORE_2_12
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import format_bytes


def forward_flops(config: Mapping[str, Any], seq_len: int) -> tuple[int, int]:
    """Floating-point operations of one sample's forward, a multiplication and an addition being two.

    Per layer of width h and inner width i, with s tokens: four products of h x h and two of h x i for each token, and
    two of s x h for each token in the attention. Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix
    (24 s h^2 + 4 s^2 h, where i = 4 h). The pooler and the classifier see one token.

    Args:
        config: of a BERT that classifies into two labels.

    Returns:
        Those of the layers, which checkpointing repeats, and of what follows them.
    """
    hidden, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    layer = seq_len * (8 * hidden**2 + 4 * hidden * inner) + 4 * seq_len**2 * hidden
    return layers * layer, 2 * hidden**2 + 2 * hidden * config.get("num_labels", 2)


def checkpointing_cost(config: Mapping[str, Any], seq_len: int) -> float:
    """A step's operations with each layer checkpointed, by those of one without: the layers' forward comes twice.

    A backward takes twice its forward (same source), so this is a little under 4/3.
    """
    layers, rest = forward_flops(config, seq_len)
    return 1 + layers / (3 * (layers + rest))


Rows = Sequence[dict[str, Any]]

_SETUPS = {
    "fp32_eager": "fp32 eager",
    "fp32_sdpa": "fp32 sdpa",
    "bf16_mixed_sdpa": "bf16-mixed sdpa",
    "bf16_mixed_sdpa_checkpointing": "bf16-mixed sdpa, checkpointing",
}
_CHANGES = {
    "gradient_checkpointing": "gradient checkpointing",
    "adamw_8bit": "8-bit AdamW",
    "sgd": "SGD, no state",
    "half_the_length": "half the length",
}


def tables(rows: Rows, card: Device) -> tuple[Table, ...]:
    """The largest batches, the plans, and what one change makes of the cells that did not fit."""
    usable = f"{format_bytes(card.usable_bytes)} usable"
    target = rows[0]["target_batch_size"]

    def cells(rows: Rows, *members: str) -> dict[str, list[str]]:
        headings = ("model", "seq len", "published", "no change")
        return {
            heading: [str(row[member]) for row in rows]
            for heading, member in zip(headings, ("model", "seq_len", *members), strict=False)
        }

    def sizes(rows: Rows, member: str, headings: Mapping[str, str]) -> dict[str, list[str]]:
        return {heading: [str(row[member][name]) for row in rows] for name, heading in headings.items()}

    largest = cells(rows, "published") | sizes(rows, "max_batch_sizes", _SETUPS)
    largest["fp32 eager / published"] = ["-" if row["ratio"] is None else f"{row['ratio']:.2f}" for row in rows]
    plans = cells(rows)
    for name in rows[0]["plans"]:
        plans[{"published": "published", **_SETUPS}[name]] = [
            f"{plan['micro_batch_size']} x {plan['accumulation']}" if plan else "-"
            for plan in (row["plans"][name] for row in rows)
        ]
    plans["checkpointing's FLOPs"] = [f"x {row['checkpointing_flops_ratio']:.2f}" for row in rows]
    found = [
        Table(f"Largest training batch of BERT on {card.name}, simulated", ("AdamW", usable), largest),
        Table(
            f"Accumulation plan for an effective batch of {target} on {card.name}, simulated",
            ("micro-batch x accumulation", usable),
            plans,
        ),
    ]
    unfit = [row for row in rows if "one_change" in row]
    if unfit:
        found.append(
            Table(
                f"Largest training batch on {card.name} after one change, simulated",
                ("where nothing fitted in 2018; fp32 eager with AdamW but for the change", usable),
                cells(unfit, "published", "ours") | sizes(unfit, "one_change", _CHANGES),
            )
        )
    if "measured" in rows[0]:
        title = "Largest training batch within the same memory, measured"
        found.append(Table(title, (usable,), cells(rows) | sizes(rows, "measured", _SETUPS)))
    return tuple(found)


def notes(rows: Rows, unmodelled: Iterable[str]) -> tuple[str, ...]:
    """What the figures of some rows rest on, and what they leave out."""
    cost = max(row["checkpointing_flops_ratio"] for row in rows)
    found = [
        "published: google-research/bert, README.md, for one Titan X of 12 GB: TensorFlow 1.11.0, the default scripts, "
        "Adam in fp32; 0 where not even one sample fits. TensorFlow is not simulated: fp32 eager, which does the same "
        "arithmetic, shows what the software of today makes of the card of then",
        "not in the source: gradient accumulation and checkpointing for larger effective batches, which it announced "
        "and did not publish. The plans are made here: the largest micro-batch that divides the effective batch and "
        "fits beside the gradients of the one before; those under published are made of the published sizes alone",
        f"checkpointing costs up to {cost:.2f} times the FLOPs: the layers' forward is computed twice, and a backward "
        "takes twice a forward (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473)",
        "a Titan X has no bf16 units. PyTorch lets autocast begin there, since a bf16 tensor can be made, but cuBLAS "
        "has refused bf16 matrix products on Pascal (https://github.com/pytorch/pytorch/issues/57773): the bf16 "
        "columns say what the memory would hold. PyTorch has no fused attention in bf16 for that card either, which is "
        "why fp32 sdpa can hold more",
        "emulated: 8-bit AdamW takes what bitsandbytes' states take, 2 bytes per parameter and 2 fp32 scales per 256",
    ]
    if "measured" in rows[0]:
        found.append("measured: by real steps on the GPU here, whose kernels may be others than a Titan X's")
    return (*found, *(f"left out: {text}" for text in unmodelled))


NAME = "titan-x"
TARGET_BATCH_SIZE = 256
CARD = device_for(find_gpu("titan x"))

_ZOO = "batchfinder.models:build_workload"


@dataclass(frozen=True)
class Setup:
    """One way to train; precision and optimizer as `StepConfig` has them."""

    attention: str
    precision: str
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"

    def spec(self, model: str) -> WorkloadSpec:
        """How to build a model of the zoo for it."""
        options = {"attention": self.attention, "gradient_checkpointing": self.gradient_checkpointing}
        return WorkloadSpec(_ZOO, {"spec": model, **options})

    def how(self, micro_batches: int = 1) -> StepConfig:
        """How a step is taken."""
        return StepConfig(precision=self.precision, optimizer=self.optimizer, micro_batches=micro_batches)


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
    "adamw_8bit": Setup("eager", "fp32", optimizer="adamw-8bit"),
    "sgd": Setup("eager", "fp32", optimizer="sgd"),
}
"""Each one change to the setup that is like for like."""

WORKLOAD = SETUPS[LIKE_FOR_LIKE].spec("bert-base")


NEEDED_BYTES = CARD.usable_bytes
"""What a Titan X leaves to PyTorch's allocator."""


def reproduce(context: Context) -> Reproduction:
    """Find all 12 cells in each setup, with plans, and what else would make the cells fit that did not."""
    published = published_titan_x()
    models = tuple(dict.fromkeys(model for model, _ in published))
    seq_lens = tuple(dict.fromkeys(seq_len for _, seq_len in published))
    memory, capability = DeviceMemory(CARD.total_bytes, CARD.usable_bytes), CARD.compute_capability
    unmodelled: dict[str, None] = {}

    # All recordings of both models are under way from the start.
    context.status(f"recording {' and '.join(models)}")
    sources: dict[tuple[str, str], TraceSource] = {}  # by model and the name of a setup or a change
    accumulating: dict[tuple[str, str], TraceSource] = {}  # a micro-batch runs beside the gradients of the one before
    for model in models:
        unfit = [seq_len for (name, seq_len), size in published.items() if name == model and size == 0]
        changed = sorted({length for seq_len in unfit for length in (seq_len // 2, seq_len)})
        for name, setup in SETUPS.items():
            # All lengths at once, as lengths between two recorded ones need no recording of their own.
            lengths = (*seq_lens, *changed) if name == LIKE_FOR_LIKE else seq_lens
            sources[model, name] = context.source(setup.spec(model), setup.how(), capability, lengths)
        for name in PLANNED:
            twice = SETUPS[name].how(micro_batches=2)
            accumulating[model, name] = context.source(SETUPS[name].spec(model), twice, capability, seq_lens)
        for name, setup in CHANGES.items() if changed else ():
            sources[model, name] = context.source(setup.spec(model), setup.how(), capability, changed)

    def largest(source: TraceSource, seq_len: int) -> int:
        outcome = search_simulated(SimulatedProbe(source, memory, BEFORE_2_12), Shape(seq_len))
        unmodelled.update(dict.fromkeys(outcome.unmodelled))
        return outcome.max_batch_size

    rows = []
    for (model, seq_len), size in published.items():
        context.status(f"{model} at {seq_len}")
        found = {name: largest(sources[model, name], seq_len) for name in SETUPS}
        beside_gradients = {name: largest(accumulating[model, name], seq_len) for name in PLANNED}
        plans: dict[str, dict[str, int] | None] = {}
        for name, most in {"published": size, **beside_gradients}.items():
            plans[name] = None
            if most:
                plan = plan_accumulation(TARGET_BATCH_SIZE, most, exact=True)
                plans[name] = {"micro_batch_size": plan.micro_batch_size, "accumulation": plan.accumulation}
        more: dict[str, Any] = {
            "model": model,
            "seq_len": seq_len,
            "max_batch_sizes": found,
            "target_batch_size": TARGET_BATCH_SIZE,
            "plans": plans,
            "checkpointing_flops_ratio": round(checkpointing_cost(find_model(model).config, seq_len), 4),
        }
        if size == 0:
            more["one_change"] = {
                **{name: largest(sources[model, name], seq_len) for name in CHANGES},
                "half_the_length": largest(sources[model, LIKE_FOR_LIKE], seq_len // 2),
            }
        if context.device is not None:
            more["measured"] = {}
            for name, setup in SETUPS.items():
                context.status(f"training {model} at {seq_len}, {name}")
                more["measured"][name] = largest_measured(
                    context.device, setup.spec(model), setup.how(), CARD.usable_bytes, seq_len, found[name]
                )
        rows.append(row(f"{model} {seq_len}", size, found[LIKE_FOR_LIKE], **more))
    return Reproduction(NAME, tuple(rows), tables(rows, CARD), notes(rows, unmodelled))
