"""`plan`: the options under which a target batch trains on one GPU that change least, and what each costs and saves.

Options are tried in a fixed order, each combination by a recorded step, and the first that trains is the answer. Its
order is by what a combination changes about training, and then by what it computes again:

    nothing      checkpointing and a chunked loss: the same gradients, but for rounding
    precision    mixed precision
    optimizer    8-bit states
    weights      bf16 weights and states
    LoRA         adapters alone are trained; only where it is allowed
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.cli.from_file import check_write, write_sizes
from batchfinder.cli.options import asked_card, check_file, seq_lens_of, step_options, whole_number, write_file
from batchfinder.devices import Card
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation, search_simulated
from batchfinder.report.page import PageCell, check_page, page_of
from batchfinder.report.progress import StatusLine
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.report.terminal import tell
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.training.spec import StepOptions
from batchfinder.training.synonyms import one_of
from batchfinder.units import format_bytes

SCHEMA = 1
LORA_RANK = 16
_BF16_CAPABILITY = (8, 0)
_CHECKPOINTING: tuple[bool | str, ...] = (False, "selective", "every-4", "every-2", True)
"""By what is computed again: no matrix products, then a fourth, a half and all of those of the layers' forward."""

_CHANGED = {"16-mixed": 1, "bf16-mixed": 1, "bf16-true": 4, "adamw-8bit": 2, "lora": 8}
"""How much each choice changes about training: each is more than those before it together."""

_WORDS = {
    "precision": "--precision {}",
    "optimizer": "--optimizer {}",
    "lora": "--lora {}",
    "gradient_checkpointing": "--gradient-checkpointing {}",
    "loss": "--loss {}",
}
"""The options that may be changed, in the order in which the table adds them."""


@dataclass(frozen=True)
class PlanRow:
    """One step of a plan, at the plan's micro-batch.

    Attributes:
        change: the option that is added, as typed; empty for the options that were asked for.
        options: with it and those before it.
        peak_bytes: the process's whole memory at the plan's micro-batch, on a card with room for it.
        flops: of a sample, in matrix products, convolutions and attention.
        max_batch_size: the largest batch on this GPU, with accumulation where the plan has it.
    """

    change: str
    options: StepOptions
    peak_bytes: int
    flops: int
    max_batch_size: int


@dataclass(frozen=True)
class Planned:
    """What was found.

    Attributes:
        rows: from the options that were asked for to the answer; empty where nothing trains.
        plan: micro-batch and accumulation; None where nothing trains.
        tried: how many combinations were recorded.
        least_bytes: what one sample takes at least, where nothing trains.
    """

    rows: tuple[PlanRow, ...]
    plan: AccumulationPlan | None
    tried: int
    unmodelled: tuple[str, ...]
    least_bytes: int | None = None


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
        one_of("--allow", name, ("lora",))
    for name in arguments.keep or ():
        one_of("--keep", name, ("precision", "optimizer", "loss", "checkpointing"))
    target = whole_number("--target-batch-size", arguments.target_batch_size)
    if target is None:
        raise InvalidValue("--target-batch-size", None, "a number: how many samples an optimizer step is to see")
    if asked.optimizer_in_backward:
        expected = "a plan without it: no gradients are left for another micro-batch to add to"
        raise InvalidValue("--optimizer-in-backward", True, expected)
    check_write(arguments)
    one = asked_card(arguments, whole_number("--gpus", arguments.gpus))
    one = replace(one, device=one.device.among_others(asked.communicators))
    seq_len = whole_number("--seq-len", arguments.seq_len)
    with StatusLine() as line, Simulation(asked.workload(model), asked.step()) as simulation:
        line.update(f"building {model}")
        facts = simulation.facts()
        (length,) = seq_lens_of(model, () if seq_len is None else (seq_len,), facts)
        kept = {*(arguments.keep or ()), *(["optimizer"] if facts.brings_optimizer else [])}
        planner = Planner(model, asked, one, target, Shape(length), simulation, line)
        found = planner.plan(planner.combinations(kept, arguments.allow or ()))
    table = plan_table(model, one, asked, target, length, found, arguments.explain)
    if arguments.json:
        print(json.dumps(to_json(model, one, target, length, found), indent=1))
    else:
        table.show()
    if arguments.markdown is not None:
        write_file("--markdown", arguments.markdown, table.to_markdown())
    if arguments.html is not None:
        cell = page_cell(model, one, asked, length, found, table.title)
        heading = "What each option of the plan buys, added to those above it"
        write_file("--html", arguments.html, page_of(table.title, cell.technique, [cell], heading))
    if arguments.write:
        write_sizes(arguments, found.plan, 0 if found.plan is None else found.plan.micro_batch_size)
        if found.rows and (changes := _typed(asked, found.rows[-1].options)):
            tell(f"batchfinder: the sizes are for a training with {changes}, which is left to you to set there")
    return 0


@dataclass
class Planner:
    """Tries combinations of options for one model, length, GPU and target."""

    model: str
    asked: StepOptions
    card: Card
    target: int
    shape: Shape
    simulation: Simulation
    line: StatusLine
    tried: int = 0
    refused: set[tuple[str, Any]] = field(default_factory=set)
    recorded: dict[StepOptions, Simulation] = field(default_factory=dict)

    def combinations(self, keep: set[str], allow: Collection[str]) -> list[StepOptions]:
        """The options that may be used, the least change first, and of those the ones that compute least again."""
        asked, how = self.asked, self.asked.gradient_checkpointing
        bf16 = self.card.device.compute_capability >= _BF16_CAPABILITY
        precisions, optimizers, losses, ranks = [asked.precision], [asked.optimizer], [asked.loss], [asked.lora]
        schemes: tuple[bool | str, ...] = (how,)
        if "precision" not in keep:
            precisions += ["bf16-mixed" if bf16 else "16-mixed"] if asked.precision == "fp32" else []
            # Around quantized weights the rest is in fp32 anyway (`prepare_model_for_kbit_training`).
            whole = bf16 and asked.precision != "bf16-true" and asked.quantization is None
            precisions += ["bf16-true"] if whole else []
        if "optimizer" not in keep and asked.optimizer in ("adam", "adamw", "adamw-fused"):
            optimizers += ["adamw-8bit"]
        if "loss" not in keep and asked.loss == "default":
            losses += ["chunked"]
        if "checkpointing" not in keep and how in _CHECKPOINTING:
            schemes = _CHECKPOINTING[_CHECKPOINTING.index(how) :]
        if "lora" in allow and asked.lora is None:
            ranks += [LORA_RANK]

        def change(one: StepOptions) -> int:
            precision = _CHANGED[one.precision] if one.precision != asked.precision else 0
            optimizer = _CHANGED[one.optimizer] if one.optimizer != asked.optimizer else 0
            return precision + optimizer + (_CHANGED["lora"] if one.lora != asked.lora else 0)

        found = [
            replace(
                asked, precision=precision, optimizer=optimizer, lora=rank, gradient_checkpointing=scheme, loss=loss
            )
            for precision, optimizer, rank, scheme, loss in product(precisions, optimizers, ranks, schemes, losses)
        ]
        found = [one for one in found if one.refused_together() is None]
        return sorted(found, key=change)  # stable: within one change by checkpointing, then by loss

    def plan(self, combinations: list[StepOptions]) -> Planned:
        """The first combination under which one sample trains, with as large a micro-batch as fits."""
        groups: dict[tuple[Any, ...], list[StepOptions]] = {}
        for options in combinations:
            groups.setdefault((options.precision, options.optimizer, options.lora), []).append(options)
        least: int | None = None
        for group in groups.values():
            # The last is taken to save most: where it does not train, the others of its group are not recorded.
            most_saving = next(((one, seen) for one in reversed(group) if (seen := self.one_sample(one))), None)
            if most_saving is None:
                continue
            needed, fits = most_saving[1]
            least = min(needed, least or needed)
            if not fits:
                continue
            for options in group:
                if options == most_saving[0] or (self.one_sample(options) or (0, False))[1]:
                    return self._answer(options)
        return Planned((), None, self.tried, (), least)

    def one_sample(self, options: StepOptions) -> tuple[int, bool] | None:
        """What one sample takes with the CUDA context, in bytes, and whether it trains; None where a model refuses.

        Raises:
            BatchFinderError: the options that were asked for are refused.
        """
        if any((name, getattr(options, name)) in self.refused for name in _WORDS):
            return None
        self.line.update(f"trying {_typed(self.asked, options) or 'the options that were asked for'}")
        try:
            probe = self.probe(options)
            steady = probe.steady_state(1, self.shape, exact=True)
        except BatchFinderError as error:
            name = str(error).partition(":")[0]
            if name not in _WORDS or getattr(options, name) == getattr(self.asked, name):
                raise
            self.refused.add((name, getattr(options, name)))
            return None
        self.tried += 1
        return probe.needed_bytes(1, self.shape) + self.card.device.context_bytes, steady.fits

    def probe(self, options: StepOptions) -> SimulatedProbe:
        """A probe of these options, with accumulation where the target is more than one sample on each GPU."""
        if options not in self.recorded:
            spec, step = options.workload(self.model), options.step(2 if self.target > self.card.count else 1)
            self.recorded[options] = self.simulation.with_spec(spec, step)
        device, lengths = self.card.device, [self.shape.seq_len]
        return self.recorded[options].probe(device, lengths, AllocatorSettings.from_environment())

    def _answer(self, options: StepOptions) -> Planned:
        """The plan of a combination, and a row for each option that leads to it."""
        probe = self.probe(options)
        self.line.update("finding its largest micro-batch")
        part = -(-self.target // self.card.count)
        most = search_simulated(probe, self.shape, part).max_batch_size
        plan = plan_accumulation(self.target, most, self.card.count)
        rows, so_far = [], self.asked
        for name in ("", *_WORDS):
            if name and getattr(options, name) == getattr(self.asked, name):
                continue
            so_far = replace(so_far, **({name: getattr(options, name)} if name else {}))
            change = _typed(self.asked, replace(self.asked, **{name: getattr(options, name)})) if name else ""
            self.line.update(f"recording {change or 'the options that were asked for'}")
            one = self.probe(so_far)
            needed = one.needed_bytes(plan.micro_batch_size, self.shape) + self.card.device.context_bytes
            # PyTorch's chunked loss multiplies as often as one in one piece.
            whole = self.probe(replace(so_far, loss="default")) if so_far.loss == "chunked" else one
            flops = whole.trace(1, self.shape, exact=True).flops
            largest = search_simulated(one, self.shape, part).max_batch_size
            rows.append(PlanRow(change, so_far, needed, flops, largest))
        return Planned(tuple(rows), plan, self.tried, probe.unmodelled)


def _typed(asked: StepOptions, options: StepOptions) -> str:
    """The options that differ from those asked for, as they are typed."""
    changed = [
        (words, getattr(options, name))
        for name, words in _WORDS.items()
        if getattr(asked, name) != getattr(options, name)
    ]
    return " ".join(words.format("full" if value is True else value) for words, value in changed)


def plan_table(
    model: str, card: Card, asked: StepOptions, target: int, seq_len: int | None, found: Planned, explain: bool = False
) -> Table:
    """The plan, with a row for each option that it adds."""
    length = "" if seq_len is None else f" at {seq_len}"
    title = f"Plan for {target} samples of {model}{length} on {card.name}, simulated"
    details = (", ".join(asked.words()), f"{format_bytes(card.device.usable_bytes)} usable")
    if found.plan is None:
        least = "" if found.least_bytes is None else f"; one sample takes at least {format_bytes(found.least_bytes)}"
        note = f"nothing of {found.tried} combinations trains one sample{least}: take a larger GPU, or --allow lora"
        return Table(title, details, {"change": ["none"], "trains": ["no"]}, (note,))
    columns: Columns = {name: [] for name in ("change", "peak", "saves", "FLOPs", "max batch")}
    before: PlanRow | None = None
    for row in found.rows:
        columns["change"].append(row.change or "as asked for")
        columns["peak"].append(format_bytes(row.peak_bytes))
        columns["saves"].append("" if before is None else format_bytes(before.peak_bytes - row.peak_bytes))
        columns["FLOPs"].append("" if before is None else f"{row.flops / before.flops - 1:+.0%}")
        columns["max batch"].append(str(row.max_batch_size))
        before = row
    micro = found.plan.micro_batch_size
    notes = (
        f"train with {_typed(asked, found.rows[-1].options) or 'the options as they are'}: micro-batch x accumulation "
        f"{found.plan}",
        f"peaks are those of a micro-batch of {micro}, the CUDA context included; FLOPs are per sample",
        f"{found.tried} combinations were tried, those that change least about training first",
        *assumptions(found.unmodelled, explain),
    )
    return Table(title, details, columns, notes)


def page_cell(
    model: str, card: Card, asked: StepOptions, seq_len: int | None, found: Planned, heading: str
) -> PageCell:
    """What a page has of a plan."""
    usable, micro = card.device.usable_bytes, found.plan.micro_batch_size if found.plan else 0
    facts = [("usable", format_bytes(usable)), ("combinations tried", str(found.tried))]
    if found.plan is not None:
        typed = _typed(asked, found.rows[-1].options) or "the options as they are"
        facts = [("train with", typed), ("micro-batch x accumulation", str(found.plan)), *facts]
    elif found.least_bytes is not None:
        facts = [("one sample takes at least", format_bytes(found.least_bytes)), *facts]
    first = found.rows[0].flops if found.rows else 0
    changes = [
        {
            "change": row.change,
            "batch_size": micro,
            "peak_bytes": row.peak_bytes,
            "max_batch_size": row.max_batch_size,
            "flops": f"{row.flops / first - 1:+.0%}" if number else "as asked for",
        }
        for number, row in enumerate(found.rows)
    ]
    return PageCell(
        model, card.name, seq_len, ", ".join(asked.words()), micro, heading,
        usable_bytes=usable, facts=facts, unmodelled=found.unmodelled, changes=changes or None,
    )  # fmt: skip


def to_json(model: str, card: Card, target: int, seq_len: int | None, found: Planned) -> dict[str, Any]:
    """All of it as JSON values."""
    return {
        "schema": SCHEMA,
        "model": model,
        "gpu": card.name,
        "seq_len": seq_len,
        "target_batch_size": target,
        "trains": found.plan is not None,
        "micro_batch_size": found.plan and found.plan.micro_batch_size,
        "accumulation": found.plan and found.plan.accumulation,
        "num_devices": card.count,
        "effective_batch_size": found.plan and found.plan.effective_batch_size,
        "tried": found.tried,
        "least_bytes": found.least_bytes,
        "rows": [
            {
                "change": row.change,
                **row.options.to_json(),
                "peak_bytes": row.peak_bytes,
                "flops": row.flops,
                "max_batch_size": row.max_batch_size,
            }
            for row in found.rows
        ],
        "unmodelled": list(found.unmodelled),
    }
