"""`sweep`: the largest batch size for each model, GPU and sequence length."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack

from batchfinder.cli.from_file import check_write, write_sizes
from batchfinder.cli.main import OK, USER_ERROR
from batchfinder.cli.options import check_file, seq_lens_of, write_file
from batchfinder.cli.sequence_length import find_lengths
from batchfinder.cli.sweep_cells import CARDS_OF_A_POOL, ModelCells, measure_cells, search_pool, simulate_cells
from batchfinder.cli.sweep_request import DEFAULT_SEQ_LENS, SIMULATED, SweepRequest, read_request
from batchfinder.data.size_table import checked, to_json, to_lhotse
from batchfinder.errors import BatchFinderError, CacheFailed, InvalidValue
from batchfinder.recording.simulation import Simulation
from batchfinder.report.made_by import made_by
from batchfinder.report.page import cell_of_row, check_page, page_of
from batchfinder.report.plots import check_picture, draw_sweep
from batchfinder.report.progress import StatusLine, SweepProgress
from batchfinder.report.sweep import SCHEMA, comma_separated, sweep_table
from batchfinder.report.terminal import tell
from batchfinder.training.synonyms import one_of


def main(arguments: argparse.Namespace) -> int:
    """Run the sweep; whatever was found is printed, also when it ends early."""
    if one_of("--engine", arguments.engine, ("here", "ray")) == "here" and arguments.address is not None:
        raise InvalidValue("--address", arguments.address, "--engine ray with it")
    if one_of("--find", arguments.find, ("batch-size", "seq-len")) == "seq-len":
        if arguments.engine == "ray":
            raise InvalidValue("--engine", "ray", "here with --find seq-len")
        if arguments.write:
            raise InvalidValue("--write", True, "--find batch-size with it: no length is written into a file")
        return find_lengths(arguments)
    if arguments.batch_size is not None:
        raise InvalidValue("--batch-size", arguments.batch_size[0], "--find seq-len with it: a sweep finds batch sizes")
    for option in ("markdown", "csv", "batch_sizes", "lhotse"):
        if getattr(arguments, option) is not None:
            check_file(f"--{option.replace('_', '-')}", getattr(arguments, option))
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
        check_file("--plot", arguments.plot)
    if arguments.html is not None:
        check_page("--html", arguments.html)
        check_file("--html", arguments.html)
    with StatusLine() as line:
        line.update("looking for GPUs", terminal_only=True)
        request = read_request(arguments)
    check_write(arguments, len(request.models) * len(request.place.cards) * max(1, len(request.seq_lens)))
    for note in request.place.notes:
        tell(f"batchfinder: {note}")
    progress = SweepProgress(request.conditions)
    try:
        with progress:
            if arguments.engine == "ray":
                from batchfinder.fleet import run_on_ray

                complete = run_on_ray(request, progress, arguments.address)
            else:
                complete = run_sweep(request, progress)
    finally:
        if rows := progress.rows:
            table = sweep_table(rows, request.conditions, arguments.explain)
            if arguments.json:
                listed = {"schema": SCHEMA, "made_by": made_by(), "rows": [row.to_json() for row in rows]}
                print(json.dumps(listed, indent=1))
            else:
                table.show()
            if arguments.markdown is not None:
                write_file("--markdown", arguments.markdown, sweep_table(rows, request.conditions, True).to_markdown())
            if arguments.csv is not None:
                write_file("--csv", arguments.csv, comma_separated(rows))
            if arguments.plot is not None:
                draw_sweep(rows, table.title, arguments.plot)
            if arguments.html is not None:
                details = ", ".join(request.conditions)
                write_file("--html", arguments.html, page_of(table.title, details, [cell_of_row(row) for row in rows]))
            if arguments.batch_sizes is not None or arguments.lhotse is not None:
                found = {row.cell.seq_len: row.result.max_batch_size for row in rows}
                sizes = checked(found)
                if left_out := [str(seq_len) for seq_len in found if seq_len not in sizes]:
                    lengths = ", ".join(left_out)
                    tell(f"batchfinder: no batch size for seq_len {lengths}: not one sample fits")
                if arguments.batch_sizes is not None:
                    write_file("--batch-sizes", arguments.batch_sizes, to_json(sizes) + "\n")
                if arguments.lhotse is not None:
                    write_file("--lhotse", arguments.lhotse, json.dumps(to_lhotse(sizes)) + "\n")
            if len(rows) < len(progress.cells):
                cached = "" if request.cache is None else "; they are cached, and the same command continues from there"
                if any(row.not_cached for row in rows):
                    cached = "; not all of them are cached"
                tell(f"batchfinder: {len(rows)} of {len(progress.cells)} cells were found{cached}")
    if arguments.write and complete:
        if len(rows) > 1:
            expected = f"a sequence length with it; {len(rows)} were swept, and {arguments.from_file} is left as it is"
            raise InvalidValue("--seq-len", None, expected)
        write_sizes(arguments, rows[0].plan, rows[0].result.max_batch_size)
    return OK if complete else USER_ERROR


def run_sweep(request: SweepRequest, progress: SweepProgress) -> bool:
    """Find every cell, model after model, telling `progress` of each.

    The next model is built while this one is at work; more would only fill the host's memory. A model that cannot be
    built, recorded or trained is told to `progress`, and the sweep goes on with the next one.

    Returns:
        Whether every model's cells were found.

    Raises:
        CacheFailed: the cache cannot be read.
    """
    lengths: dict[str, tuple[int | None, ...]] = dict.fromkeys(request.models, request.seq_lens or DEFAULT_SEQ_LENS)
    simulations: dict[str, Simulation] = {}
    complete = True

    def expect() -> None:
        cards = [card.name for card in request.place.cards]
        progress.expect([(model, card, length) for model in lengths for card in cards for length in lengths[model]])

    simulated = request.place.device == SIMULATED
    with ExitStack() as stack:
        pool = None
        many = simulated and len(request.place.cards) >= CARDS_OF_A_POOL
        if many and (os.cpu_count() or 1) > 1:
            pool = search_pool()
            stack.callback(pool.shutdown, cancel_futures=True)
        for index, model in enumerate(request.models):
            expect()
            new = [each for each in request.models[index : index + 2] if each not in simulations]
            if new:
                progress.update(f"building {' and '.join(new)}")
            for each in new:
                simulation = Simulation(request.options.workload(each), request.step)
                simulations[each] = stack.enter_context(simulation)
            try:
                facts = simulations[model].facts()
                lengths[model] = seq_lens_of(model, request.seq_lens, facts, DEFAULT_SEQ_LENS)
                expect()
                find = simulate_cells if simulated else measure_cells
                cells = ModelCells(model, simulations[model], lengths[model], request, pool)
                # Real steps take their time: each try is worth a line in a log.
                for row in find(cells, lambda status: progress.update(status, terminal_only=simulated)):
                    progress.found(row)
            except CacheFailed:
                raise
            except BatchFinderError as error:
                progress.failed(error)
                complete = False
            simulations[model].close()
    return complete
