"""`reproduce multimodal-bert`: an estimate on paper beside ours, line by line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchfinder.devices import device_for, find_instance
from batchfinder.memory_use.breakdown import Estimate, estimate
from batchfinder.memory_use.sharding import buckets_of
from batchfinder.recording.answers import search_simulated
from batchfinder.report.table import Table
from batchfinder.reproductions.published import Context, Reproduction, largest_measured, published_multimodal_bert, row
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import BEFORE_2_12
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import add_blocks
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import format_bytes

NAME = "multimodal-bert"
WORKLOAD = WorkloadSpec("batchfinder.reproductions.models:build_multimodal_bert")
_FP32_BYTES = 4
_LAYERS, _HIDDEN = 12, 768

_LINES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "activations": "activations",
    "batch": "inputs",
    "graph": None,
    "optimizer": "optimizer",
    "temporary buffers": "temporary",
    "DDP buckets": "communication",
    "cuBLAS workspaces": "workspace",
    "fragmentation": "fragmentation",
    "CUDA context": "context",
}
"""Each line of the estimate, then what it leaves out, with the kind of bytes that is ours."""


NEEDED_BYTES = device_for(find_instance(published_multimodal_bert().instance).gpu).usable_bytes
"""What one GPU of the instance leaves to PyTorch's allocator."""


def one_gpu(context: Context) -> SimulatedProbe:
    """One GPU of the instance, as one of all that train side by side under DistributedDataParallel."""
    instance = find_instance(published_multimodal_bert().instance)
    device = device_for(instance.gpu)
    source = context.source(WORKLOAD, StepConfig(), device.compute_capability, [published_multimodal_bert().seq_len])
    return SimulatedProbe(
        source,
        DeviceMemory(device.total_bytes, device.usable_bytes),
        BEFORE_2_12,
        # The reducer's buckets are the same for any number of GPUs.
        edit=lambda trace: add_blocks(trace, buckets_of(trace, rebuilds=False)),
    )


def reproduce(context: Context) -> Reproduction:
    """Find every line of the estimate, whether it fits, and the largest batch."""
    paper = published_multimodal_bert()
    instance = find_instance(paper.instance)
    device = device_for(instance.gpu)
    context.status("recording Multimodal BERT")
    probe, shape = one_gpu(context), Shape(paper.seq_len)
    context_bytes = device.total_bytes - device.usable_bytes
    ours = estimate(probe.trace(paper.batch_size_per_gpu, shape), probe.memory, context_bytes)
    outcome = search_simulated(probe, shape)
    measured = None
    if context.device is not None:
        context.status("training Multimodal BERT")
        measured = largest_measured(
            context.device, WORKLOAD, StepConfig(), NEEDED_BYTES, paper.seq_len, outcome.max_batch_size
        )
    kinds = ours.kinds.shown()
    rows = [
        row(line, paper.mb_per_gpu.get(line), 0.0 if kind is None else round(kinds[kind] / 1e6, 1), unit="MB")
        for line, kind in _LINES.items()
    ]
    rows.append(row("total", paper.mb_per_gpu["total"], round(ours.peak_bytes / 1e6, 1), unit="MB"))
    fits = "fits" if ours.fits else "does not fit"
    rows.append({"cell": "verdict", "published": paper.verdict, "ours": fits, "ratio": None})
    largest = outcome.max_batch_size
    more = {} if measured is None else {"measured": measured}
    rows.append(row("largest batch on one GPU", None, largest, unit="samples", **more))
    rows.append(row("largest batch on the instance", None, largest * instance.num_gpus, unit="samples"))
    return _reproduction(rows, ours, outcome.unmodelled)


def _reproduction(rows: list[dict[str, Any]], estimate: Estimate, unmodelled: Iterable[str]) -> Reproduction:
    """The rows with the tables and notes that are made of them."""
    paper, kinds = published_multimodal_bert(), estimate.kinds
    instance = find_instance(paper.instance)
    usable, least = format_bytes(device_for(instance.gpu).usable_bytes), format_bytes(estimate.required_bytes)
    memory = [row for row in rows if row.get("unit") == "MB"]
    samples = [row for row in rows if row.get("unit") == "samples"]
    table = {
        "cell": [row["cell"] for row in memory],
        "published MB": ["" if row["published"] is None else str(row["published"]) for row in memory],
        "our MB": [f"{row['ours']:,.0f}" for row in memory],
    }
    verdict = {
        "cell": ["verdict", *[row["cell"] for row in samples]],
        "published": [paper.verdict, *["" for _ in samples]],
        "ours": ["fits" if estimate.fits else "does not fit", *[str(row["ours"]) for row in samples]],
    }
    measured = samples[0].get("measured")
    if measured is not None:
        verdict["measured"] = ["", str(measured), str(measured * instance.num_gpus)]
    tables = (
        Table(
            f"Multimodal BERT at batch size {paper.batch_size_per_gpu}, sequence length {paper.seq_len}, "
            f"on one of {instance.num_gpus} {instance.gpu.name}, simulated",
            (
                f"{paper.precision}, adamw, sdpa attention, DistributedDataParallel",
                f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.capacity_bytes)} with the CUDA context",
            ),
            table,
        ),
        Table(
            f"Does it fit on {instance.name}?",
            (f"{usable} usable on each GPU beside the CUDA context; with that it runs on {least} and more",),
            verdict,
        ),
    )
    gpus = instance.num_gpus
    numbers = sum(paper.parameters.values())
    whole = numbers * _FP32_BYTES
    shared = paper.mb_per_gpu["parameters"]
    tokens = paper.batch_size_per_gpu * paper.seq_len
    one_per_layer = _LAYERS * tokens * _HIDDEN * _FP32_BYTES
    notes = (
        f'published: "{paper.source}", worked on paper on 2025-04-12; nothing was measured',
        f"an error in the source: it divides parameters and gradients by {gpus} GPUs. Under data parallelism every GPU "
        f"holds a whole copy of both, and the reducer's buckets are a third ({kinds.communication / 1e6:,.0f} MB)",
        f"an error in the source: {numbers / 1e6:.1f} M parameters in fp32 are {whole / 1e6:.0f} MB, and "
        f"{whole / gpus / 1e6:.0f} MB after its own division, not {shared} MB",
        f"an error in the source: {paper.mb_per_gpu['activations']} MB of activations for {tokens:,} tokens is about "
        f"one tensor per layer ({one_per_layer / 1e6:.0f} MB for {_LAYERS} layers); a layer of BERT keeps dozens: "
        f"{kinds.activations / 1e6:,.0f} MB",
        "an error in the source: it counts no optimizer state; Adam keeps two numbers per parameter: "
        f"{kinds.optimizer / 1e6:,.0f} MB",
        "the graph takes no memory of the GPU beside what it keeps, the activations; its nodes are on the host",
        "ours is the moment with the most memory in use, as the backward begins: gradients come as activations go, and "
        f"few are there yet; together they are as large as the parameters, {kinds.parameters / 1e6:,.0f} MB",
        "ours: the counts of parameters are the estimate's within 1 %; the widths of the small layers were chosen so "
        "that they are",
        *(f"left out: {text}" for text in unmodelled),
    )
    return Reproduction(NAME, tuple(rows), tables, notes)
