"""`reproduce bert-2019`: the notebook "Bert Memory Consumption" of 2019, on the card it really ran on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchfinder.devices import find_gpu
from batchfinder.outcome import Shape
from batchfinder.published.bert_2019 import RUNGS, Figure, Ladder, bert_2019
from batchfinder.report.sheet import Sheet
from batchfinder.reproduce.measuring import RealStep
from batchfinder.reproduce.notebook_2019 import NotebookProcess, Torch12Probe, last_rung
from batchfinder.reproduce.reproduction import Bench, Reproduction, row
from batchfinder.simulator.memory import DeviceMemory
from batchfinder.simulator.source import TraceSource
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.simulated_search import search_simulated
from batchfinder.tracing.simulation import HowToStep
from batchfinder.units import MIB, format_bytes

NAME = "bert-2019"
_CAPABILITY = find_gpu("K80").compute_capability or (3, 7)
_MODES = {False: "forward", True: "inference"}

Model = tuple[str, str]


@dataclass(frozen=True)
class _Traces:
    """The recordings of one model, by mode."""

    spec: WorkloadSpec
    by_mode: dict[str, TraceSource]


def needed_bytes() -> int:
    """What the notebook's card left to PyTorch's allocator."""
    return bert_2019().usable_bytes


def reproduce(bench: Bench) -> Reproduction:
    """Find all 17 figures and 8 ladders."""
    notebook = bert_2019()
    card = DeviceMemory(notebook.total_bytes, notebook.usable_bytes)
    bench.doing("recording the BERTs of 2019")
    traces = {model: _record(bench, model) for model in notebook.model_mib}
    rows: list[dict[str, Any]] = []
    models = {}
    for (head, size), recorded in traces.items():
        process = NotebookProcess(recorded.by_mode["forward"], card)
        figures = [figure for figure in notebook.figures if (figure.head, figure.size) == (head, size)]
        models[head, size] = process.model_mib(figures[0].seq_len)
        rows += [
            _figure_row(bench, recorded, figure, mib)
            for figure, mib in zip(figures, process.allocated_mib(figures), strict=True)
        ]
    ladders = [_ladder_row(bench, traces[ladder.head, ladder.size], ladder, card) for ladder in notebook.ladders]
    notes = _notes(models)
    return Reproduction(NAME, (*rows, *ladders), _sheets(rows, ladders), notes)


def _record(bench: Bench, model: Model) -> _Traces:
    notebook = bert_2019()
    spec = WorkloadSpec("batchfinder.reproduce.models.bert_2019:build", dict(zip(("head", "size"), model, strict=True)))
    lengths = {
        "forward": {figure.seq_len for figure in notebook.figures},
        "inference": {each.seq_len for each in notebook.ladders if each.no_grad and (each.head, each.size) == model},
    }
    by_mode = {
        mode: bench.recordings.source(spec, HowToStep(mode=mode), _CAPABILITY, sorted(seq_lens))
        for mode, seq_lens in lengths.items()
        if seq_lens
    }
    return _Traces(spec, by_mode)


def _figure_row(bench: Bench, traces: _Traces, figure: Figure, ours_mib: int) -> dict[str, Any]:
    cell = f"forward {figure.head} {figure.size} {figure.batch_size}x{figure.seq_len}"
    more: dict[str, Any] = {"unit": "MiB"}
    if bench.device is not None:
        bench.doing(f"running {cell}")
        step = RealStep(bench.device, traces.spec, HowToStep(mode="forward"), needed_bytes(), figure.seq_len)
        peak = step.peak_bytes(figure.batch_size)
        more["measured_peak"] = None if peak is None else peak // MIB
    return row(cell, figure.allocated_mib, ours_mib, **more)


def _ladder_row(bench: Bench, traces: _Traces, ladder: Ladder, card: DeviceMemory) -> dict[str, Any]:
    mode = _MODES[ladder.no_grad]
    cell = f"ladder {ladder.head} {ladder.size} {ladder.seq_len}" + (" no_grad" if ladder.no_grad else "")
    probe = Torch12Probe(traces.by_mode[mode], card)
    exact = search_simulated(probe, Shape(ladder.seq_len)).max_batch_size
    more: dict[str, Any] = {"unit": "samples", "exact_maximum": exact}
    if bench.device is not None:
        bench.doing(f"running {cell}")
        step = RealStep(bench.device, traces.spec, HowToStep(mode=mode), needed_bytes(), ladder.seq_len)
        more["measured"] = step.last_rung(RUNGS)
    return row(cell, ladder.largest, last_rung(probe, ladder.seq_len), **more)


def _sheets(figures: list[dict[str, Any]], ladders: list[dict[str, Any]]) -> tuple[Sheet, ...]:
    notebook = bert_2019()
    usable = f"{format_bytes(notebook.usable_bytes)} usable of {format_bytes(notebook.total_bytes)}"
    memory = {
        "cell": [row["cell"] for row in figures],
        "published": [str(row["published"]) for row in figures],
        "ours": [str(row["ours"]) for row in figures],
        "off by": [f"{row['ratio'] - 1:+.2%}" if row["ratio"] != 1 else "0" for row in figures],
    }
    steps = {
        "cell": [row["cell"] for row in ladders],
        "published": [str(row["published"]) for row in ladders],
        "ours": [str(row["ours"]) for row in ladders],
        "exact maximum": [str(row["exact_maximum"]) for row in ladders],
    }
    if "measured_peak" in figures[0]:
        memory["measured peak"] = [_or_dash(row["measured_peak"]) for row in figures]
        steps["measured"] = [_or_dash(row["measured"]) for row in ladders]
    return (
        Sheet(
            "BERT of 2019: MiB allocated after one forward pass on a Tesla K80, simulated",
            ("fp32, eval mode; the output and its graph are alive", usable),
            memory,
        ),
        Sheet(
            f"BERT of 2019: largest batch of {', '.join(map(str, RUNGS))} on a Tesla K80, simulated",
            ("fp32, eval mode, one forward pass; exact maximum: of all batch sizes", usable),
            steps,
        ),
    )


def _or_dash(figure: int | None) -> str:
    return "-" if figure is None else str(figure)


def _notes(models: dict[Model, int]) -> tuple[str, ...]:
    notebook = bert_2019()
    k80, v100 = find_gpu("K80"), find_gpu("V100 16GB")
    larger = [
        f"{published} MiB for {head} {size}, which takes {models[head, size]}"
        for (head, size), published in notebook.model_mib.items()
        if published != models[head, size]
    ]
    return (
        'published: the notebook "Bert Memory Consumption" (krishan), run on 2019-09-18 with pytorch-transformers on '
        "PyTorch 1.2",
        "where it went wrong: its text speaks of an Azure NC24s v3 with four V100s. Every out-of-memory message it "
        f"prints says {format_bytes(notebook.total_bytes)} total capacity, which is a Tesla K80's "
        f"({k80.memory_bytes:,} bytes); a V100 has {format_bytes(v100.memory_bytes)}. So this was a K80",
        "where it went wrong: its ladder doubles the batch, so that an answer can be nearly half of what fits: see the "
        "exact maximum, the next size above which does not fit",
        f"where it went wrong: before any forward it prints {' and '.join(larger)}. Other models were in the process; "
        "the figures that are off are off by what these left behind",
        "emulated: PyTorch 1.2's softmax, which kept its input for the backward, and its matmul, which copied its "
        "operands; the layer normalisation written out in Python of pytorch-transformers 1.0 and 1.1; cuBLAS without a "
        "workspace in PyTorch's allocator. The model is batchfinder/reproduce/models/bert_2019.py",
        "forwards of one model run one after the other in one process and share the allocator's cache, as in the "
        "notebook; each ladder starts afresh",
    )
