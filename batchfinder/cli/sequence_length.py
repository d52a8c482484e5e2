"""`sweep --find seq-len`: the longest sequence that trains at a batch size, for each model and GPU, simulated."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.cli.options import check_file, whole_number, write_file
from batchfinder.cli.sweep_request import read_request
from batchfinder.devices import Card, without_bf16
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.recording.answers import LengthProbe, search_seq_len, search_tried
from batchfinder.recording.simulation import Simulation
from batchfinder.report.made_by import made_by
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.report.terminal import tell
from batchfinder.results import SearchResult, Shape
from batchfinder.sizing.recorder import instead_of_cuda_build
from batchfinder.sizing.sweep_request import SIMULATED, SweepRequest
from batchfinder.training.spec import FAKE_DEVICE, StepOptions, is_cuda_build, recorder_in_words
from batchfinder.units import format_bytes

SCHEMA = 1
USUAL_STEP = 128
"""Lengths are multiples of this where nothing else is asked for: kernels pad to it at most."""
_LONGEST = 1 << 20  # for a model whose positions have no end


@dataclass(frozen=True)
class LengthRow:
    """The longest sequence of one model, batch size and GPU.

    Attributes:
        result: its sizes are lengths.
        longest: the longest that was of interest.
        allowed: the longest that the model's positions allow; None where there is no such limit.
        recorder_version: of the PyTorch that recorded or tried it.
    """

    model: str
    batch_size: int
    card: Card
    options: StepOptions
    result: SearchResult
    longest: int
    allowed: int | None
    recorder_version: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values: `max_seq_len` is 0 where not even the shortest length fits."""
        seen = self.result.measurement if self.result.max_batch_size else None
        return {
            "model": self.model,
            "batch_size": self.batch_size,
            "gpu": self.card.name,
            "budget_bytes": self.card.device.usable_bytes,
            **self.options.to_json(),
            "max_seq_len": self.result.max_batch_size,
            "allowed_seq_len": self.allowed,
            "peak_allocated_bytes": seen and seen.peak_allocated_bytes,
            "peak_reserved_bytes": seen and seen.peak_reserved_bytes,
            "source": self.result.source,
            "recorder": self.options.recorder,
            "recorder_version": self.recorder_version,
            "trials": len(self.result.trials),
            "unmodelled": list(self.result.unmodelled),
        }


def find_lengths(arguments: argparse.Namespace) -> int:
    """Find and print them; a model that cannot be built or recorded is named, and the others are found."""
    given = {"--seq-len": arguments.seq_len, "--target-batch-size": arguments.target_batch_size}
    given |= {"--max-batch-size": arguments.max_batch_size, "--csv": arguments.csv, "--plot": arguments.plot}
    given |= {"--batch-sizes": arguments.batch_sizes, "--lhotse": arguments.lhotse, "--mfu": arguments.mfu}
    for option, value in given.items():
        if value is not None:
            raise InvalidValue(option, value, "none of it with --find seq-len, whose answer is a length")
    if arguments.gpus is not None and "," in arguments.gpus:
        raise InvalidValue("--gpus", arguments.gpus, "one number with --find seq-len")
    if arguments.markdown is not None:
        check_file("--markdown", arguments.markdown)
    step = whole_number("--multiple-of", arguments.multiple_of) or USUAL_STEP
    sizes = [whole_number("--batch-size", size) for size in dict.fromkeys(arguments.batch_size or ["1"])]
    request = read_request(arguments)
    if request.place.device != SIMULATED:
        raise InvalidValue("--find", "seq-len", "a GPU to simulate with it: --gpu or --device simulated")
    rows: list[LengthRow] = []
    complete = True
    with StatusLine() as line:
        for model in request.models:
            line.update(f"building {model}")
            try:
                options = request.options
                with Simulation(options.workload(model), request.step, options.recorder) as simulation:
                    rows += lengths_of(model, simulation, request, sizes, step, line)
            except InvalidValue:
                raise
            except BatchFinderError as error:
                tell(f"batchfinder: {error}")
                complete = False
    if rows:
        table = length_table(rows, step, arguments.explain)
        if arguments.json:
            listed = {"schema": SCHEMA, "made_by": made_by(), "rows": [row.to_json() for row in rows]}
            print(json.dumps(listed, indent=1))
        else:
            table.show()
        if arguments.markdown is not None:
            write_file("--markdown", arguments.markdown, length_table(rows, step, True).to_markdown())
    return 0 if complete else 1


def lengths_of(
    model: str, simulation: Simulation, request: SweepRequest, sizes: list[int], step: int, line: StatusLine
) -> list[LengthRow]:
    """One model's rows.

    Raises:
        InvalidValue: its samples have no length in tokens, or none that is a multiple of `step`.
        BatchFinderError: it could not be built or recorded.
    """
    facts = simulation.facts()
    if facts.seq_len_unit != "tokens":
        raise InvalidValue("--find", "seq-len", f"a model of text: samples of {model} are no sequences of tokens")
    most = facts.max_seq_len or _LONGEST
    longest = most // step * step
    if not longest:
        raise InvalidValue("--multiple-of", step, f"at most {most}, the most tokens that {model} allows")
    rows = []
    # Of many lengths the fake device records few, and scales them.
    scaled, recorder = simulation.on_fake_device(), request.options.recorder
    if request.options.compile is not None:  # else each length would compile for as long as on a card
        recorder = FAKE_DEVICE
    instead = ""
    for card in request.place.cards:
        for batch_size in sizes:
            line.update(f"{model} at batch size {batch_size} on {card.name}")
            device = card.device.with_headroom(request.reserve_bytes(card))
            result = search_seq_len(scaled.probe(device, [], request.allocator), batch_size, step, longest)
            if is_cuda_build(recorder):
                tried = LengthProbe(simulation.tried_sizes(device, request.allocator), batch_size)
                predicted = result.max_batch_size or step
                try:
                    result = search_tried(tried, Shape(), longest, step, step, predicted=predicted)
                except BatchFinderError as error:
                    if not request.chooses_recorder or isinstance(error, InvalidValue):
                        raise
                    recorder, instead = FAKE_DEVICE, instead_of_cuda_build(error)
            result = replace(result, unmodelled=(*result.unmodelled, *([instead] if instead else [])))
            options = replace(request.options, recorder=recorder)
            version = facts.versions["torch"]
            rows.append(LengthRow(model, batch_size, card, options, result, longest, facts.max_seq_len, version))
    return rows


def length_table(rows: list[LengthRow], step: int, explain: bool = False) -> Table:
    """The rows, of which there must be one, as a table."""
    usable = {row.card.name: format_bytes(row.card.device.usable_bytes) for row in rows}
    where = f" on {rows[0].card.name}" if len(usable) == 1 else ""
    columns: Columns = {"model": [row.model for row in rows]}
    if len(usable) > 1:
        columns["GPU"] = [row.card.name for row in rows]
    columns["batch size"] = [str(row.batch_size) for row in rows]
    columns["max seq len"] = [str(row.result.max_batch_size) for row in rows]
    columns["peak reserved"] = []
    for row in rows:
        seen = row.result.measurement if row.result.max_batch_size else None
        peak = None if seen is None else seen.peak_reserved_bytes
        columns["peak reserved"].append("-" if peak is None else format_bytes(peak))
    notes = [f"lengths are multiples of {step}: --multiple-of"] if step > 1 else []
    for row in rows:
        if row.result.max_batch_size == row.longest:
            limit = "the most that its positions allow" if row.allowed else "no longer one was tried"
            notes.append(f"{row.model} at batch size {row.batch_size}: {row.longest} is {limit}")
    notes += without_bf16(rows[0].options.precision, [row.card.device for row in rows])
    notes += assumptions((text for row in rows for text in row.result.unmodelled), explain)
    each = "usable: " + ", ".join(f"{size} of {gpu}" for gpu, size in usable.items())
    details = (", ".join(rows[0].options.words()), each if len(usable) > 1 else f"{usable[rows[0].card.name]} usable")
    recorders = []
    for recorder, version in dict.fromkeys((row.options.recorder, row.recorder_version) for row in rows):
        tried = ", on which each length is tried" if is_cuda_build(recorder) else ""
        recorders.append(f"recorder: {recorder_in_words(recorder, version)}{tried}")
    return Table(f"Longest sequence that trains{where}, simulated", (*details, *recorders), columns, tuple(notes))
