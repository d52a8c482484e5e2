"""`plan`: the options under which a target batch trains on a GPU that change least, and the runners-up."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from batchfinder.cli.from_file import check_write, write_sizes
from batchfinder.cli.options import asked_card, check_file, step_options, whole_number, write_file
from batchfinder.devices import Card
from batchfinder.errors import InvalidValue
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.what_fits import ADAPTERS, KEEPABLE, WhatFits, check_micro_batch
from batchfinder.report.made_by import made_by
from batchfinder.report.page import PageCell, check_page, page_of
from batchfinder.report.progress import StatusLine
from batchfinder.report.terminal import tell
from batchfinder.report.what_fits import what_fits_table
from batchfinder.sizing.what_fits import PlanSearch
from batchfinder.training.synonyms import one_of
from batchfinder.units import format_bytes

SCHEMA = 2


def main(arguments: argparse.Namespace) -> int:
    """Print a plan; that nothing trains is a result, not an error."""
    if arguments.markdown is not None:
        check_file("--markdown", arguments.markdown)
    if arguments.html is not None:
        check_page("--html", arguments.html)
        check_file("--html", arguments.html)
    asked, model = step_options(arguments), arguments.model
    check_model_name(model)
    if asked.mode != "train":
        raise InvalidValue("--mode", asked.mode, "train: a plan is for training")
    for name in arguments.allow or ():
        one_of("--allow", name, ADAPTERS)
    for name in arguments.keep or ():
        one_of("--keep", name, KEEPABLE)
    target = whole_number("--target-batch-size", arguments.target_batch_size)
    if target is None:
        raise InvalidValue("--target-batch-size", None, "a number: how many samples an optimizer step is to see")
    if asked.optimizer_in_backward:
        expected = "a plan without it: no gradients are left for another micro-batch to add to"
        raise InvalidValue("--optimizer-in-backward", True, expected)
    if arguments.write:
        check_write(arguments)
    one, note = asked_card(arguments, whole_number("--gpus", arguments.gpus))
    least = whole_number("--min-micro-batch", arguments.min_micro_batch)
    check_micro_batch("--min-micro-batch", least, target, one.count)
    one = replace(one, device=one.device.among_others(asked.communicators))
    seq_len = whole_number("--seq-len", arguments.seq_len)
    if note:
        tell(f"batchfinder: {note}")
    keep, allow, recorder = arguments.keep or (), arguments.allow or (), arguments.recorder
    search = PlanSearch(model, asked, one, target, seq_len, least, arguments.exact, keep, allow, recorder)
    with StatusLine() as line:
        length, found = search.find(line.update)
    at = "" if length is None else f" at {length}"
    title = f"Plan for {target} samples of {model}{at} on {one.name}, simulated"
    table = what_fits_table(found, one, title, arguments.explain)
    if arguments.json:
        print(json.dumps(to_json(model, one, target, length, found), indent=1))
    else:
        table.show()
    if arguments.markdown is not None:
        write_file("--markdown", arguments.markdown, table.to_markdown())
    if arguments.html is not None:
        cell = page_cell(model, one, length, found, title)
        write_file("--html", arguments.html, page_of(title, cell.technique, [cell], "What trains"))
    if arguments.write:
        plan = found.fits[0].plan if found.fits else None
        write_sizes(arguments, plan, 0 if plan is None else plan.micro_batch_size)
        if found.fits and (change := found.fits[0].change):
            tell(f"batchfinder: the sizes are for a training with {change}, which is left to you to set there")
    return 0


def page_cell(model: str, card: Card, seq_len: int | None, found: WhatFits, heading: str) -> PageCell:
    """What a page has of a plan."""
    usable, micro = card.device.usable_bytes, 0
    sample = "one sample takes" if found.min_micro_batch == 1 else f"{found.min_micro_batch} samples take"
    facts = [("usable", format_bytes(usable)), (f"{sample} as asked for", format_bytes(found.sample_bytes))]
    if found.fits:
        least = found.fits[0]
        micro = least.plan.micro_batch_size
        typed = least.change or "the options as they are"
        facts = [("train with", typed), ("micro-batch x accumulation", str(least.plan)), *facts]
    changes = [
        {
            "change": f"{fit.change} (predicted)" if fit.predicted else fit.change,
            "batch_size": fit.plan.micro_batch_size,
            "peak_bytes": fit.peak_bytes,
            "max_batch_size": fit.plan.micro_batch_size,
            "flops": f"{fit.flops / found.flops - 1:+.0%}" if fit.change and found.flops else "as asked for",
        }
        for fit in found.fits
    ]
    return PageCell(
        model, card.name, seq_len, ", ".join(found.asked.words()), micro, heading,
        usable_bytes=usable, facts=facts, unmodelled=found.unmodelled, changes=changes or None,
    )  # fmt: skip


def to_json(model: str, card: Card, target: int, seq_len: int | None, found: WhatFits) -> dict[str, Any]:
    """All of it as JSON values."""
    plan = found.fits[0].plan if found.fits else None
    return {
        "schema": SCHEMA,
        "model": model,
        "gpu": card.name,
        "seq_len": seq_len,
        "target_batch_size": target,
        "trains": plan is not None,
        "micro_batch_size": plan and plan.micro_batch_size,
        "accumulation": plan and plan.accumulation,
        "num_devices": card.count,
        "effective_batch_size": plan and plan.effective_batch_size,
        "made_by": made_by(),
        **found.to_json(),
    }
