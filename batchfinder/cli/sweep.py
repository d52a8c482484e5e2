"""Running a sweep: model after model, one search per cell.

The largest batch size for each model, GPU and sequence length, as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from batchfinder.cli.exit_codes import OK, USER_ERROR
from batchfinder.cli.files import check_file, write_file
from batchfinder.cli.options import DEFAULT_IMAGE_SIDE
from batchfinder.cli.sweep_cells import Cell, ModelCells, row_of, simulate_cells
from batchfinder.cli.sweep_measured import measure_cells
from batchfinder.cli.sweep_request import DEFAULT_SEQ_LENS, SweepRequest, read_request
from batchfinder.errors import ContextDied, InvalidValue, ProbeDied
from batchfinder.recording.simulation import Simulation
from batchfinder.report.plots import check_picture, draw_sweep
from batchfinder.report.progress import StatusLine, SweepProgress
from batchfinder.report.sweep import SCHEMA, SweepRow, comma_separated, sweep_sheet
from batchfinder.training.spec import WorkloadFacts


def run_sweep(request: SweepRequest, progress: SweepProgress) -> bool:
    """Find every cell, telling `progress` of each.

    The next model is built while this one is at work; more would only fill the host's memory.

    Args:
        request: what to find.
        progress: is told of each row as it is found, with its place in the order asked for.

    Returns:
        Whether every cell was found. Where a model ended the process that trained it, or the card's context there, the
        sweep goes on with the next model, without the rest of that one's cells.

    Raises:
        BatchFinderError: a model could not be built, recorded or run.
    """
    usual: tuple[int | None, ...] = request.seq_lens or DEFAULT_SEQ_LENS
    lengths = dict.fromkeys((model for model, _ in request.models), usual)
    simulations: dict[str, Simulation] = {}
    complete = True
    with ExitStack() as stack:
        for index in range(len(request.models)):
            progress.expect(sum(map(len, lengths.values())) * len(request.cards))
            near = request.models[index : index + 2]
            new = [(model, spec) for model, spec in near if model not in simulations]
            if new:
                progress.doing(f"building {' and '.join(model for model, _ in new)}")
            for model, spec in new:
                simulations[model] = stack.enter_context(Simulation(spec, request.how))
            model = near[0][0]
            lengths[model] = _seq_lens(model, simulations[model].facts(), request)
            progress.expect(sum(map(len, lengths.values())) * len(request.cards))
            found = partial(_found, progress, request, index, lengths[model])
            doing: Callable[[str], None] = partial(progress.doing, worth_a_line=False)
            try:
                find = measure_cells if request.measured else simulate_cells
                find(ModelCells(model, simulations[model], lengths[model], request), doing, found)
            except (ContextDied, ProbeDied) as error:
                progress.failed(error)
                complete = False
            simulations[model].close()
    return complete


def _found(
    progress: SweepProgress, request: SweepRequest, model: int, seq_lens: tuple[int | None, ...], cell: Cell
) -> None:
    names = [card.name for card in request.cards]
    place = model, names.index(cell.card.name), seq_lens.index(cell.outcome.shape.seq_len)
    progress.found(row_of(cell, request), place)


def _seq_lens(model: str, facts: WorkloadFacts, request: SweepRequest) -> tuple[int | None, ...]:
    """The lengths for one model: those asked for, which it must allow, or the defaults that it allows.

    Raises:
        InvalidValue: a length asked for is beyond the model's positions.
    """
    most = facts.max_seq_len
    if request.seq_lens:
        for seq_len in request.seq_lens:
            if most is not None and seq_len > most:
                raise InvalidValue(
                    "--seq-len", seq_len, f"at most {most} {facts.seq_len_unit}, the most that {model} allows"
                )
        return request.seq_lens
    if facts.seq_len_unit == "pixels":
        return (DEFAULT_IMAGE_SIDE,)
    if facts.seq_len_unit == "none":
        return (None,)
    return tuple(seq_len for seq_len in DEFAULT_SEQ_LENS if most is None or seq_len <= most) or (most,)


def main(arguments: argparse.Namespace) -> int:
    """Run the sweep; whatever was found is printed, also when it ends early."""
    for option in ("markdown", "csv"):
        check_file(f"--{option}", getattr(arguments, option))
    check_picture("--plot", arguments.plot)
    with StatusLine() as activity:
        activity.doing("looking at what is here", worth_a_line=False)
        request = read_request(arguments)
    for note in request.place.notes:
        print(f"batchfinder: {note}", file=sys.stderr)
    progress = SweepProgress(request.conditions)
    try:
        with progress:
            complete = run_sweep(request, progress)
    except KeyboardInterrupt:
        _write(progress.rows, request, arguments)
        raise KeyboardInterrupt(*_kept(progress, request)) from None
    except BaseException:
        _write(progress.rows, request, arguments)
        for words in _kept(progress, request):
            print(f"batchfinder: {words}", file=sys.stderr)
        raise
    _write(progress.rows, request, arguments)
    if complete:
        return OK
    for words in _kept(progress, request):
        print(f"batchfinder: {words}", file=sys.stderr)
    return USER_ERROR


def _kept(progress: SweepProgress, request: SweepRequest) -> list[str]:
    if not progress.rows:
        return []
    kept = "; they are kept, and the same command goes on from there" if request.cache is not None else ""
    return [f"{len(progress.rows)} of {progress.cells} cells were found{kept}"]


def _write(rows: list[SweepRow], request: SweepRequest, arguments: argparse.Namespace) -> None:
    if not rows:
        return
    sheet = sweep_sheet(rows, request.conditions)
    if arguments.json:
        print(json.dumps({"schema": SCHEMA, "rows": [row.to_json() for row in rows]}, indent=1))
    else:
        sheet.show()
    for option, text in (("markdown", sheet.to_markdown()), ("csv", comma_separated(rows))):
        path = getattr(arguments, option)
        if path is not None:
            write_file(f"--{option}", path, text)
    if arguments.plot is not None:
        draw_sweep(rows, sheet.title, arguments.plot)
