"""`reproduce bert-2019`: the notebook "Bert Memory Consumption" of 2019, on the K80 that it ran on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.devices import find_gpu
from batchfinder.recording.simulation import search_simulated
from batchfinder.report.table import Table
from batchfinder.reproductions.base import Context, MeasuredStep, Reproduction, row
from batchfinder.reproductions.published import RUNGS, Figure, Ladder, published_bert_2019
from batchfinder.results import Shape
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import MIB, format_bytes


class Torch12Probe(SimulatedProbe):
    """A probe without the cuBLAS workspaces, which torch 1.2 did not take from its own allocator."""

    def trace(self, batch_size: int, shape: Shape, exact: bool = False) -> Trace:
        return without_workspaces(super().trace(batch_size, shape, exact))


def without_workspaces(trace: Trace) -> Trace:
    """A trace whose cuBLAS workspaces take nothing."""
    kinds = trace.structure.kinds
    return replace(trace, sizes=tuple(0 if k == "workspace" else n for k, n in zip(kinds, trace.sizes, strict=True)))


def last_rung(probe: SimulatedProbe, seq_len: int) -> int:
    """The last of the ladder's batch sizes before the first that does not fit; 0 if that is the first."""
    largest = 0
    for batch_size in RUNGS:
        if not probe(batch_size, Shape(seq_len)).fits:
            break
        largest = batch_size
    return largest


class NotebookProcess:
    """One model on the card and its forwards, whose allocator keeps its cache from one to the next.

    Args:
        traces: of the model's forward, its graph kept.
        memory: the card.
    """

    def __init__(self, traces: TraceSource, memory: DeviceMemory) -> None:
        self._traces = traces
        self._allocator = CachingAllocator(memory)

    def model_mib(self, seq_len: int) -> int:
        """Move the model to the card: MiB allocated then, rounded down.

        Args:
            seq_len: of any trace; the model is the same in all.
        """
        trace = self._trace(2, seq_len)
        for block in trace.structure.order[: _start(trace)]:
            self._allocator.allocate(trace.sizes[block])
        return self._allocator.allocated // MIB

    def allocated_mib(self, figures: Sequence[Figure]) -> list[int]:
        """MiB allocated after each forward, rounded down as the notebook does.

        Its batch sizes go up until one does not fit, and then to the next length: a failure leaves its mark on the
        cache, so it is run here too.
        """
        found = []
        for figure, following in zip(figures, [*figures[1:], None], strict=True):
            found.append(self._forward(figure.batch_size, figure.seq_len))
            last = following is None or following.seq_len != figure.seq_len
            if last and figure.batch_size > 1:
                self._forward(2 * figure.batch_size, figure.seq_len)
        return found

    def _trace(self, batch_size: int, seq_len: int) -> Trace:
        return without_workspaces(self._traces.at(batch_size, seq_len))

    def _forward(self, batch_size: int, seq_len: int) -> int:
        """MiB allocated at the end of a forward, or where the card was full; then all but the model is freed."""
        trace = self._trace(batch_size, seq_len)
        end = trace.structure.marks[-1].position
        live: dict[int, Block | None] = {}
        try:
            for event in trace.structure.order[_start(trace) : end]:
                if event >= 0:
                    live[event] = self._allocator.allocate(trace.sizes[event])
                else:
                    self._allocator.free(live.pop(~event))
        except SimulatedOutOfMemory:
            pass
        allocated = self._allocator.allocated // MIB
        for block in live.values():
            self._allocator.free(block)
        return allocated


def _start(trace: Trace) -> int:
    """Where the batch begins: all before is the model's."""
    (start,) = (mark.position for mark in trace.structure.marks if mark.stage == "batch")
    return start


NAME = "bert-2019"
_CAPABILITY = find_gpu("K80").compute_capability or (3, 7)
_MODES = {False: "forward", True: "inference"}

Model = tuple[str, str]


def _workload(head: str, size: str) -> WorkloadSpec:
    return WorkloadSpec("batchfinder.reproductions.bert_2019_model:build", {"head": head, "size": size})


WORKLOAD = _workload("classification", "base")


@dataclass(frozen=True)
class _Traces:
    """The recordings of one model, by mode."""

    spec: WorkloadSpec
    by_mode: dict[str, TraceSource]


def needed_bytes() -> int:
    """What the notebook's card left to PyTorch's allocator."""
    return published_bert_2019().usable_bytes


def reproduce(context: Context) -> Reproduction:
    """Find all 17 figures and 8 ladders."""
    notebook = published_bert_2019()
    card = DeviceMemory(notebook.total_bytes, notebook.usable_bytes)
    context.status("recording the BERTs of 2019")
    traces = {model: _record(context, model) for model in notebook.model_mib}
    rows: list[dict[str, Any]] = []
    models = {}
    for (head, size), recorded in traces.items():
        process = NotebookProcess(recorded.by_mode["forward"], card)
        figures = [figure for figure in notebook.figures if (figure.head, figure.size) == (head, size)]
        models[head, size] = process.model_mib(figures[0].seq_len)
        rows += [
            _figure_row(context, recorded, figure, mib)
            for figure, mib in zip(figures, process.allocated_mib(figures), strict=True)
        ]
    ladders = [_ladder_row(context, traces[ladder.head, ladder.size], ladder, card) for ladder in notebook.ladders]
    notes = _notes(models)
    return Reproduction(NAME, (*rows, *ladders), _tables(rows, ladders), notes)


def _record(context: Context, model: Model) -> _Traces:
    notebook = published_bert_2019()
    spec = _workload(*model)
    lengths = {
        "forward": {figure.seq_len for figure in notebook.figures},
        "inference": {each.seq_len for each in notebook.ladders if each.no_grad and (each.head, each.size) == model},
    }
    by_mode = {
        mode: context.source(spec, StepConfig(mode=mode), _CAPABILITY, sorted(seq_lens))
        for mode, seq_lens in lengths.items()
        if seq_lens
    }
    return _Traces(spec, by_mode)


def _figure_row(context: Context, traces: _Traces, figure: Figure, ours_mib: int) -> dict[str, Any]:
    cell = f"forward {figure.head} {figure.size} {figure.batch_size}x{figure.seq_len}"
    more: dict[str, Any] = {"unit": "MiB"}
    if context.device is not None:
        context.status(f"running {cell}")
        step = MeasuredStep(context.device, traces.spec, StepConfig(mode="forward"), needed_bytes(), figure.seq_len)
        peak = step.peak_bytes(figure.batch_size)
        more["measured_peak"] = None if peak is None else peak // MIB
    return row(cell, figure.allocated_mib, ours_mib, **more)


def _ladder_row(context: Context, traces: _Traces, ladder: Ladder, card: DeviceMemory) -> dict[str, Any]:
    mode = _MODES[ladder.no_grad]
    cell = f"ladder {ladder.head} {ladder.size} {ladder.seq_len}" + (" no_grad" if ladder.no_grad else "")
    probe = Torch12Probe(traces.by_mode[mode], card)
    exact = search_simulated(probe, Shape(ladder.seq_len)).max_batch_size
    more: dict[str, Any] = {"unit": "samples", "exact_maximum": exact}
    if context.device is not None:
        context.status(f"running {cell}")
        step = MeasuredStep(context.device, traces.spec, StepConfig(mode=mode), needed_bytes(), ladder.seq_len)
        more["measured"] = step.last_rung(RUNGS)
    return row(cell, ladder.largest, last_rung(probe, ladder.seq_len), **more)


def _tables(figures: list[dict[str, Any]], ladders: list[dict[str, Any]]) -> tuple[Table, ...]:
    notebook = published_bert_2019()
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
        Table(
            "BERT of 2019: MiB allocated after one forward pass on a Tesla K80, simulated",
            ("fp32, eval mode; the output and its graph are alive", usable),
            memory,
        ),
        Table(
            f"BERT of 2019: largest batch of {', '.join(map(str, RUNGS))} on a Tesla K80, simulated",
            ("fp32, eval mode, one forward pass; exact maximum: of all batch sizes", usable),
            steps,
        ),
    )


def _or_dash(figure: int | None) -> str:
    return "-" if figure is None else str(figure)


def _notes(models: dict[Model, int]) -> tuple[str, ...]:
    notebook = published_bert_2019()
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
        "workspace in PyTorch's allocator. The model is batchfinder/reproductions/bert_2019_model.py",
        "forwards of one model run one after the other in one process and share the allocator's cache, as in the "
        "notebook; each ladder starts afresh",
    )
