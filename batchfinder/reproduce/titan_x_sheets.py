"""The Titan X table in words and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from batchfinder.devices import Device
from batchfinder.report.sheet import Columns, Sheet
from batchfinder.units import format_bytes

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


def sheets(rows: Rows, card: Device) -> tuple[Sheet, ...]:
    """The largest batches, the plans, and what one change makes of the cells that did not fit.

    Args:
        rows: as `titan_x` makes them.
        card: what was simulated.
    """
    usable = f"{format_bytes(card.usable_bytes)} usable"
    target = rows[0]["target_batch_size"]
    found = [
        Sheet(f"Largest training batch of BERT on {card.name}, simulated", ("AdamW", usable), _largest(rows)),
        Sheet(
            f"Accumulation plan for an effective batch of {target} on {card.name}, simulated",
            ("micro-batch x accumulation", usable),
            _plans(rows),
        ),
    ]
    unfit = [row for row in rows if "one_change" in row]
    if unfit:
        found.append(
            Sheet(
                f"Largest training batch on {card.name} after one change, simulated",
                ("where nothing fitted in 2018; fp32 eager with AdamW but for the change", usable),
                _one_change(unfit),
            )
        )
    if "measured" in rows[0]:
        found.append(Sheet("Largest training batch within the same memory, measured", (usable,), _measured(rows)))
    return tuple(found)


def _cells(rows: Rows) -> Columns:
    return {"model": [row["model"] for row in rows], "seq len": [str(row["seq_len"]) for row in rows]}


def _largest(rows: Rows) -> Columns:
    table = _cells(rows)
    table["published"] = [str(row["published"]) for row in rows]
    for name, heading in _SETUPS.items():
        table[heading] = [str(row["max_batch_sizes"][name]) for row in rows]
    table["fp32 eager / published"] = ["-" if row["ratio"] is None else f"{row['ratio']:.2f}" for row in rows]
    return table


def _plans(rows: Rows) -> Columns:
    table = _cells(rows)
    headings = {"published": "published", **_SETUPS}
    for name in rows[0]["plans"]:
        table[headings[name]] = [_plan(row["plans"][name]) for row in rows]
    table["checkpointing's FLOPs"] = [f"x {row['checkpointing_flops_ratio']:.2f}" for row in rows]
    return table


def _plan(plan: dict[str, int] | None) -> str:
    return "-" if plan is None else f"{plan['micro_batch_size']} x {plan['accumulation']}"


def _one_change(rows: Rows) -> Columns:
    table = _cells(rows)
    table["published"] = [str(row["published"]) for row in rows]
    table["no change"] = [str(row["ours"]) for row in rows]
    for name, heading in _CHANGES.items():
        table[heading] = [str(row["one_change"][name]) for row in rows]
    return table


def _measured(rows: Rows) -> Columns:
    table = _cells(rows)
    for name, heading in _SETUPS.items():
        table[heading] = [str(row["measured"][name]) for row in rows]
    return table


def notes(rows: Rows, unmodelled: Iterable[str]) -> tuple[str, ...]:
    """What the figures rest on.

    Args:
        rows: as `titan_x` makes them.
        unmodelled: what they leave out.
    """
    cost = max(row["checkpointing_flops_ratio"] for row in rows)
    found = [
        "published: google-research/bert, README.md, for one Titan X of 12 GB: TensorFlow 1.11.0, the default scripts, "
        "Adam in fp32; 0 where not even one sample fits. TensorFlow is not simulated: fp32 eager, which does the same "
        "arithmetic, shows what the software of today makes of the card of then",
        "where it went wrong: it announced gradient accumulation and checkpointing for larger effective batches, and "
        "the code never came. The plans are made here: the largest micro-batch that divides the effective batch and "
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
