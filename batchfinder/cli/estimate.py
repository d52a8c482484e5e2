"""What the memory of one size is for, whether a card has it, and what would make it fit."""

from __future__ import annotations

import argparse
import json

from batchfinder.cli.estimate_advice import advise
from batchfinder.cli.estimate_request import EstimateRequest, read_request
from batchfinder.cli.options import allocator_notes, one_seq_len
from batchfinder.cli.output_file import write_file
from batchfinder.estimate.estimate import Estimate, estimate
from batchfinder.estimate.sharding import STRATEGIES, side_by_side
from batchfinder.outcome import Shape
from batchfinder.report.drawing import check_picture
from batchfinder.report.estimate_figure import draw_estimate
from batchfinder.report.estimate_findings import EstimateFindings
from batchfinder.report.estimate_sheets import estimate_sheets
from batchfinder.report.progress import Activity
from batchfinder.simulator.trace import Trace
from batchfinder.tracing.simulation import Simulation


def main(arguments: argparse.Namespace) -> int:
    """Estimate one size; that it does not fit is a finding, not a failure."""
    check_picture("--plot", arguments.plot)
    request = read_request(arguments)
    found = run_estimate(request)
    sheets = estimate_sheets(found)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        for number, sheet in enumerate(sheets):
            print(end="\n" if number else "")
            sheet.show()
    if arguments.markdown is not None:
        write_file("--markdown", arguments.markdown, "\n".join(sheet.to_markdown() for sheet in sheets))
    if arguments.plot is not None:
        draw_estimate(found, arguments.plot)
    return 0


def run_estimate(request: EstimateRequest) -> EstimateFindings:
    """Record the size asked for and all that is said about it.

    Args:
        request: what was asked for.

    Raises:
        BatchFinderError: the model could not be built or recorded.
    """
    card, how = request.card, request.how
    with Activity() as activity, Simulation(request.spec, how) as simulation:
        activity.doing(f"building {request.model}")
        facts = simulation.facts()
        seq_len = one_seq_len(request.seq_len, facts)
        activity.doing(f"recording {request.model}")
        probe = simulation.probe(card.device, [seq_len], request.allocator)
        trace = probe.exact_trace(request.batch_size, Shape(seq_len))

        def estimated(one: Trace) -> Estimate:
            return estimate(one, probe.memory, card.device.context_bytes, request.allocator)

        alone = estimated(trace)
        advice = None
        if request.advice or not alone.fits:
            advice = advise(request, simulation, seq_len, activity)
    together = {}
    if card.count > 1:
        share = 0.5 if how.precision.endswith("-mixed") else 1.0
        together = {
            name: estimated(side_by_side(trace, stage, card.count, share)) for name, stage in STRATEGIES.items()
        }
    return EstimateFindings(
        model=request.model,
        gpu=card.name,
        num_gpus=card.count,
        mode=how.mode,
        precision=how.precision,
        optimizer="its own" if facts.brings_optimizer else how.optimizer,
        attention=request.options.attention or "default",
        gradient_checkpointing=request.options.gradient_checkpointing,
        accumulation=request.accumulation,
        estimate=alone,
        strategies=together,
        advice=advice,
        by_module=request.by_module,
        unmodelled=(*probe.unmodelled, *allocator_notes(request.allocator)),
    )
