"""What a dry run says: its verdict, where the peak is, what holds it, and each process of several."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from batchfinder.cuda_stub import StubCard
from batchfinder.devices import smallest_gpus
from batchfinder.memory_use.breakdown import NAMES, OverTime
from batchfinder.programs import DryRun, ProcessMemory
from batchfinder.programs.dry_run import FAILED, FITS, INTERRUPTED, NO_GPU, OUT_OF_MEMORY
from batchfinder.report.page import PageCell
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.simulator.trace import StageMark
from batchfinder.units import format_bytes

_PHASES = {
    "forward": "the forward pass",
    "no_grad": "a forward pass without gradients",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
    "other": "what is outside of modules",
}
_HELD = {
    "forward": "activations and temporaries of the forward pass",
    "no_grad": "forward passes without gradients",
    "backward": "made in the backward pass",
    "optimizer": "temporaries of the optimizer",
    "other": "batches and other tensors",
}
WITHIN_EPOCH = (
    "ended within the first epoch: what comes later, as longer samples, an evaluation or a checkpoint, was not run; "
    "--epochs 1 goes on to the next"
)
"""Of runs that were not asked to go further."""
_WORTH_TELLING = 50
"""A line that made one in so many bytes, or more."""
_ENDED = {
    "steady": "the last 5 added nothing to it",
    "most steps": "after which it was ended",
    "steps": "as asked",
    "epochs": "as many epochs as asked",
    "time": "ended from outside",
    "": "to the command's own end",
}


def dry_run_tables(run: DryRun, explain: bool = False, roomy: DryRun | None = None) -> Iterator[Table]:
    """The verdict with what holds the memory; of several processes a second table with a row for each.

    Args:
        run: of the command.
        explain: whether to list each thing that was assumed.
        roomy: the same with as much memory as it wants, where it did not fit.
    """
    process = run.fullest
    details = [f"command: {' '.join(run.command)}"]
    if run.world_size is not None:
        details.append(f"the first rank of {run.world_size} alone: what the others send is taken to be as its own")
    notes = [*_doubts(run), *assumptions(run.assumed, explain)]
    if process is None:
        yield Table(_verdict(run), tuple(details), {}, tuple(notes))
        return
    steps = len(process.steps)
    place = f" at {process.peak['line']}" if process.peak.get("line") else ""
    if process.peak and not process.out_of_memory:
        details.append(f"the peak is in {_PHASES[process.peak['phase']]} of step {process.peak['step']}{place}")
    taken = f"{steps} optimizer step{'' if steps == 1 else 's'}, {_ENDED[process.ended]}"
    details.append(f"{taken}; {run.seconds:.0f} s; recorder: CUDA build {run.build}")
    held = dict(sorted(process.peak.get("held", {}).items(), key=lambda item: -item[1]))
    total = sum(held.values())
    columns: Columns = {
        "held by": [_HELD.get(name) or name for name in held],
        "memory": [format_bytes(size) for size in held.values()],
        "share": [f"{size / total:.0%}" for size in held.values()],
    }
    by_line: dict[str, int] = process.peak.get("lines", {})
    lines = [f"made at {line}: {format_bytes(size)}" for line, size in by_line.items() if size * _WORTH_TELLING > total]
    would_fit = () if roomy is None else _would_fit(run.cards[process.device], roomy)
    yield Table(_verdict(run), tuple(details), columns if held else {}, (*lines, *would_fit, *notes))
    if len(run.processes) > 1:
        yield Table(
            f"{len(run.processes)} processes",
            (),
            {
                "rank": [str(each.rank) for each in run.processes],
                "card": [f"cuda:{each.device}" for each in run.processes],
                "allocated": [format_bytes(each.peak_allocated_bytes) for each in run.processes],
                "reserved": [format_bytes(each.peak_reserved_bytes) for each in run.processes],
                "retries": [str(each.retries) for each in run.processes],
                "steps": [str(len(each.steps)) for each in run.processes],
            },
        )


def _verdict(run: DryRun) -> str:
    """One sentence, with the numbers."""
    process = run.fullest
    if run.outcome == NO_GPU:
        return "no answer: the command ended without using a GPU"
    if process is None:
        if run.outcome == INTERRUPTED:
            return "no answer: interrupted before the command had used a GPU"
        return f"no answer: the command failed by itself, {_end_of(run)}, before it had used a GPU"
    card = run.cards[process.device].name if process.device < len(run.cards) else f"cuda:{process.device}"
    peak = (
        f"peak {format_bytes(process.peak_reserved_bytes)} reserved, {format_bytes(process.peak_allocated_bytes)} "
        f"allocated, of {format_bytes(process.total_bytes)} on {card}"
    )
    if run.outcome == OUT_OF_MEMORY:
        error = process.out_of_memory[0]
        place = f" at {error['line']}" if error["line"] else ""
        return (
            f"does not fit: out of memory in {_PHASES[error['phase']]} of step {error['step']}{place}, which asked for "
            f"{format_bytes(error['wanted'])} with {format_bytes(error['free'])} free; {peak}"
        )
    if run.outcome == FITS:
        return f"{'fits' if process.ended != 'time' else 'fits so far'}: {peak}"
    if run.outcome == INTERRUPTED:
        return f"interrupted: {peak}"
    return f"no answer: the command failed by itself, {_end_of(run)}: {peak}"


def dry_run_cell(run: DryRun) -> PageCell:
    """What a page has of a run that used a card."""
    process, seen = run.fullest, run.timeline
    assert process is not None
    assert seen is not None
    card = run.cards[process.device]
    by_kind = {kind: tuple(seen["by_kind"][kind]) for kind in NAMES if any(seen["by_kind"].get(kind, ()))}
    totals = [sum(sizes) for sizes in zip(*by_kind.values(), strict=True)]
    marks = tuple(StageMark(position, step, stage) for position, step, stage in seen["marks"])
    peak = max(range(len(totals)), key=totals.__getitem__, default=0)
    return PageCell(
        model=process.program,
        gpu=card.name.removeprefix("NVIDIA "),
        seq_len=None,
        technique=f"recorder: CUDA build {run.build}",
        batch_size=0,
        heading=_verdict(run),
        peak_bytes=process.peak_reserved_bytes,
        usable_bytes=card.total_bytes - card.context_bytes - card.held_bytes,
        facts=[
            ("command", " ".join(run.command)),
            ("peak reserved", format_bytes(process.peak_reserved_bytes)),
            ("peak allocated", format_bytes(process.peak_allocated_bytes)),
            ("optimizer steps", str(len(process.steps))),
        ],
        unmodelled=run.assumed,
        over_time=OverTime(by_kind, marks, peak, max(totals, default=0), tuple(seen["lines"])),
    )


def _would_fit(card: StubCard, roomy: DryRun) -> Iterator[str]:
    """What a command takes that does not fit, what makes it less, from the mildest change on, and GPUs that have it."""
    process = roomy.fullest
    assert process is not None
    takes, held = process.peak_reserved_bytes, process.peak.get("held", {})
    usable = card.total_bytes - card.context_bytes - card.held_bytes
    more = takes - usable
    missing = f"{format_bytes(more)} more than here" if more > 0 else "which is here, in pieces that are too small"
    yield f"it takes {format_bytes(takes)} reserved where there is room, {missing}"
    activations = held.get("forward", 0)
    changes = {
        "half the batch size with twice the accumulation": (activations + held.get("backward", 0)) // 2,
        "activation checkpointing": activations * 3 // 4,
        "an optimizer with 8-bit states": held.get("optimizer state", 0) * 3 // 4,
    }
    for change, saved in changes.items():
        if saved * _WORTH_TELLING > takes:
            yield f"{change}: about {format_bytes(saved)} less{', enough' if takes - saved <= usable else ''}"
    enough = [gpu.name for gpu in smallest_gpus(takes, oldest=card.compute_capability)]
    yield f"GPUs with as much memory: {', '.join(enough) or 'none of the catalogue'}"
    yield "batchfinder find finds the largest batch size that fits"


def _end_of(run: DryRun) -> str:
    if run.exit_code >= 0:
        return f"with exit code {run.exit_code}"
    return f"ended by {signal.Signals(-run.exit_code).name}"


def _doubts(run: DryRun) -> Iterator[str]:
    """What else is to be known of it."""
    for each in run.processes:
        who = f"rank {each.rank}: " if len(run.processes) > 1 else ""
        yield from (f"{who}{words}" for words in _of_process(each))
    if run.outcome == FAILED and run.processes and any(each.out_of_memory for each in run.processes):
        wanted = max(error["wanted"] for each in run.processes for error in each.out_of_memory)
        yield f"{format_bytes(wanted)} were asked for at once: a wrong number rather than a lack of memory"
    elif run.outcome == FAILED:
        yield "its own error stands above; the Hub and loggers are offline in a dry run: --online lets them be reached"


def _of_process(process: ProcessMemory) -> Iterator[str]:
    errors = len(process.out_of_memory)
    if errors and len(process.steps) >= process.out_of_memory[0]["step"]:
        yield f"the command caught {errors} out-of-memory error{'' if errors == 1 else 's'} and went on"
    if process.retries and not errors:
        yield (
            f"the allocator gave its cache back {process.retries} time{'' if process.retries == 1 else 's'} to make "
            "room: on a card that is slow, and a little more does not fit"
        )
    if grows := process.grows_by:
        yield f"memory grows: each of the last steps left {format_bytes(grows)} more alive, as a list of losses does"
    if not process.steps and process.out_of_memory == []:
        yield "no optimizer took a step: the peak is of all that the command did"
    elif process.ended == "most steps":
        yield f"memory was not steady after {len(process.steps)} steps: a longer run may need more"
    elif process.ended == "steady" and process.in_first_epoch:
        yield WITHIN_EPOCH
