"""A row of a sweep as one record, and the table, JSON and CSV that are made of it."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.devices import Card, Device, Price, without_bf16
from batchfinder.devices.training_cost import TrainingCost
from batchfinder.errors import InvalidValue
from batchfinder.memory_use.breakdown import OverTime
from batchfinder.recording.what_fits import WhatFits, changes_as_typed
from batchfinder.report.estimate import Alternative
from batchfinder.report.made_by import made_by_words
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.report.what_fits import what_fits_lines
from batchfinder.results import Measurement, SearchResult, StopReason, Throughput, Trial, Verdict
from batchfinder.training.spec import StepOptions, is_cuda_build, recorder_in_words
from batchfinder.units import format_bytes, format_dollars

SCHEMA = 1


@dataclass(frozen=True)
class Cell:
    """What is asked of one cell of a sweep.

    Attributes:
        card: with what of it may be used, the headroom included.
        options: of the step; its optimizer is `OWN_OPTIMIZER` where the workload brings one.
        headroom_bytes: what has to stay free of the card.
        exact: whether the target is to be met, however small the micro-batch.
    """

    model: str
    seq_len: int | None
    card: Card
    options: StepOptions
    headroom_bytes: int = 0
    target_batch_size: int | None = None
    published: int | None = None
    min_batch_size: int = 1
    multiple_of: int = 1
    exact: bool = False

    @property
    def device(self) -> Device:
        """The card's, with the headroom taken from what is usable."""
        return self.card.device.with_headroom(self.headroom_bytes)

    @property
    def smallest(self) -> int:
        """The smallest size that is tried."""
        return -(-self.min_batch_size // self.multiple_of) * self.multiple_of

    def __str__(self) -> str:
        return f"{self.where} on {self.card.name}"

    @property
    def plan_command(self) -> str:
        """The options with which `batchfinder plan` is asked the same."""
        options, limits = self.options, self.card.device.name.split(", ")
        words = [] if limits[0].endswith(" budget") else ["--gpu", limits.pop(0)]
        for limit in limits:  # as `device_for` and `device_with_budget` name them
            size, unit, kind = limit.split(" ")[:3]
            words += [f"--{kind}", f"{size}{unit}"]
        words += [] if self.seq_len is None else ["--seq-len", str(self.seq_len)]
        words += ["--target-batch-size", str(self.target_batch_size or 8)]
        words += changes_as_typed(StepOptions(), options).split()
        words += ["--exact"] if self.exact else []
        words += ["--packed"] if options.packed else []
        words += [] if options.compile is None else ["--compile", options.compile]
        words += [] if options.strategy is None else ["--strategy", options.strategy, "--gpus", str(options.gpus)]
        return shlex.join(["--model", self.model, *words])

    @property
    def where(self) -> str:
        """The model and the length, in words."""
        return self.model if self.seq_len is None else f"{self.model} at {self.seq_len}"


@dataclass(frozen=True)
class SweepRow:
    """The largest batch of one cell: what was asked, what the search found, and how this run came by it.

    Attributes:
        cell: the model, the sequence length, the GPU and the options asked for.
        result: as it is cached: with its original source and all trials.
        trials: of this run; none where the result came from the cache.
        seconds: spent on this row, with the recordings that it was the first to need.
        unscaled: how many of the sizes tried were recorded themselves, not scaled; 0 from the cache.
        raised: what a single sample raised, where sizes from 2 on were tried for that; not part of the JSON.
        curve: (batch size, peak reserved bytes) for the picture, where one was asked for; not part of the JSON.
        over_time: the memory of the largest batch, for a page, where one was asked for; not part of the JSON.
        changes: what other options would change, likewise.
        throughput: the smallest size at full speed, where it was asked for.
        what_fits: options under which it trains, where not one sample does; None where nobody looked.
        need_source: how `needed_bytes` was found, where that is not how the row was.
        cost: what training costs at a stated share of the peak FLOP/s, where one was stated and the row has a price.
        not_cached: why it, or one before it, could not be cached; empty where all could. Not part of the JSON.
        recorder_version: of the PyTorch that recorded the steps of a simulated row, or took them.
    """

    cell: Cell
    result: SearchResult
    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0
    cached: bool = False
    unscaled: int = 0
    raised: str = ""
    curve: tuple[tuple[int, int], ...] = ()
    over_time: OverTime | None = None
    changes: tuple[Alternative, ...] | None = None
    throughput: Throughput | None = None
    what_fits: WhatFits | None = None
    not_cached: str = ""
    need_source: str = ""
    cost: TrainingCost | None = None
    recorder_version: str = ""

    def __repr__(self) -> str:
        return f"<{self.cell}: {self.batch_size}>"

    @property
    def model(self) -> str:
        """As it was asked for."""
        return self.cell.model

    @property
    def gpu(self) -> str:
        """Its name; of an instance with the instance's."""
        return self.cell.card.name

    @property
    def seq_len(self) -> int | None:
        """Tokens per sample, or pixels of an image's side; None for data of one fixed shape."""
        return self.cell.seq_len

    @property
    def batch_size(self) -> int:
        """The largest that trains; 0 where the smallest that was to be tried does not fit."""
        return self.result.max_batch_size

    @property
    def peak_allocated_bytes(self) -> int | None:
        """`torch.cuda.max_memory_allocated` at that size; None for 0."""
        return None if self.at_max is None else self.at_max.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        """`torch.cuda.max_memory_reserved` at that size; None for 0."""
        return None if self.at_max is None else self.at_max.peak_reserved_bytes

    @property
    def usable_bytes(self) -> int:
        """What the caching allocator can reserve of the GPU, the headroom included."""
        return self.cell.card.device.usable_bytes

    @property
    def published(self) -> int | None:
        """The published batch size of the same training; None where nobody has published one."""
        return self.cell.published

    @property
    def at_max(self) -> Measurement | None:
        """What was seen at the largest batch size; None when that is 0."""
        return self.result.measurement if self.result.max_batch_size else None

    @property
    def needed_bytes(self) -> int | None:
        """What the smallest size, one sample if none was asked for, would take when the largest batch size is 0."""
        seen = self.result.measurement
        return seen.needed_bytes if seen and not self.result.max_batch_size else None

    @property
    def need_words(self) -> str:
        """`needed_bytes`, and how it was found where that is not how the row was; empty where it is not known."""
        if self.needed_bytes is None:
            return ""
        return f"{format_bytes(self.needed_bytes)}{f', {self.need_source}' if self.need_source else ''}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the largest micro-batch."""
        return self.result.max_batch_size * (self.cell.seq_len or 1)

    @property
    def plan(self) -> AccumulationPlan | None:
        """How the effective batch is made up, where one was asked for and sizes that may be tried make it up."""
        cell, size = self.cell, self.result.max_batch_size
        if self.throughput is not None:
            size = self.throughput.batch_size
        if cell.target_batch_size is None or not size:
            return None
        try:
            return plan_accumulation(
                cell.target_batch_size,
                size,
                cell.card.count,
                min_batch_size=cell.smallest,
                multiple_of=cell.multiple_of,
                exact=cell.exact,
            )
        except InvalidValue:
            return None

    @property
    def exact_plan(self) -> AccumulationPlan | None:
        """The one that meets the target, where `plan` does not and sizes that may be tried make it up."""
        return None if self.plan is None else self.plan.exactly(self.cell.smallest, self.cell.multiple_of)

    @property
    def recorder_in_words(self) -> str:
        """What recorded its steps; or took them, as the CUDA build does with each size that is tried."""
        words = recorder_in_words(self.cell.options.recorder, self.recorder_version)
        return f"{words}, on which each size is tried" if is_cuda_build(self.cell.options.recorder) else words

    @property
    def stopped_by(self) -> Verdict | None:
        """How the smallest size above the largest batch failed; None where none was tried."""
        result = self.result
        failed = [trial for trial in result.trials if not trial.fits and trial.batch_size > result.max_batch_size]
        return min(failed, key=lambda trial: trial.batch_size).measurement.verdict if failed else None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values.

        `budget_bytes` is what the allocator may take of the GPU, the headroom included. `source` is `simulated`,
        `measured` or `cache`; `found_by` is never `cache`. `stop` says why the search ended: `exact` (the next size
        failed), `tolerance` (one a little larger did) or `cap` (no larger one was tried). `stopped_by` is how the
        smallest size above the largest batch failed. `needed_found_by` is `simulated` for a `needed_bytes` that was not
        measured, whatever the row's. `trials` and `failed_trials` are those of this run.
        `message` is the device's own, where the largest batch is 0. `throughput` has the speed of all sizes that were
        timed; the `full_speed_batch_size` is null where it cannot be told, and `samples_per_second` is that of the
        largest then.
        """
        cell, result, seen, stopped_by = self.cell, self.result, self.result.measurement, self.stopped_by
        row = {
            "model": cell.model,
            "seq_len": cell.seq_len,
            "gpu": cell.card.name,
            "budget_bytes": cell.card.device.usable_bytes,
            **cell.options.to_json(),
            "max_batch_size": result.max_batch_size,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "source": "cache" if self.cached else result.source,
            "trials": len(self.trials),
            "seconds": round(self.seconds, 3),
            "unmodelled": list(result.unmodelled),
            "unscaled": self.unscaled,
            "stop": result.stop.name.lower(),
            "needed_bytes": self.needed_bytes,
            "needed_found_by": None if self.needed_bytes is None else self.need_source or result.source,
            "headroom_bytes": cell.headroom_bytes,
            "failed_trials": sum(not trial.fits for trial in self.trials),
            "stopped_by": stopped_by and stopped_by.name.lower(),
            "found_by": result.source,
            "message": seen.message if seen and not result.max_batch_size else "",
            "published": cell.published,
        }
        if self.recorder_version:
            row |= {"recorder": cell.options.recorder, "recorder_version": self.recorder_version}
        sizes = {"min_batch_size": cell.min_batch_size, "multiple_of": cell.multiple_of}
        row |= {name: size for name, size in sizes.items() if size > 1}
        if self.what_fits is not None:
            row["what_fits"] = self.what_fits.to_json()
        if self.throughput is not None:
            found = self.throughput
            rate = found.rate(found.batch_size)
            row["full_speed_batch_size"] = found.batch_size if found.certain else None
            row["samples_per_second"] = rate.samples_per_second
            row["samples_per_second_spread"] = rate.spread
            row["throughput"] = asdict(found)
        if cell.card.price is not None:
            row["usd_per_hour"] = cell.card.price.usd_per_hour
        if self.cost is not None:
            row |= self.cost.to_json()
        if cell.options.packed:
            row["tokens_per_step"] = self.tokens_per_step
        if cell.target_batch_size is not None:
            row["target_batch_size"] = cell.target_batch_size
            for name in ("micro_batch_size", "accumulation", "num_devices", "effective_batch_size"):
                row[name] = getattr(self.plan, name, None)
            for name in ("micro_batch_size", "accumulation"):
                row[f"exact_{name}"] = getattr(self.exact_plan, name, None)
        return row


_KINDS = {"train": "training", "forward": "forward", "inference": "inference"}


def sweep_table(rows: Sequence[SweepRow], conditions: Iterable[str] = (), explain: bool = False) -> Table:
    """The rows, of which there must be one, as a table. What is the same in all of them stands above it.

    Args:
        conditions: what else the figures hold under, in words.
        explain: whether what the figures assume is listed rather than counted.
    """
    first = rows[0].cell
    usable = {row.cell.card.name: format_bytes(row.cell.card.device.usable_bytes) for row in rows}
    title = f"Largest {_KINDS[first.options.mode]} batch"
    each = f"{usable[first.card.name]} usable"
    source = rows[0].result.source
    if source == "measured" and len(usable) == 1:
        title += f", measured on {first.card.name}"
    elif source == "stub":
        title += f"{f' on {first.card.name}' if len(usable) == 1 else ''}, tried on the CUDA build without a GPU"
        if len(usable) > 1:
            each = f"usable: {', '.join(f'{size} of {gpu}' for gpu, size in usable.items())}"
    elif len(usable) == 1:
        title += f" on {first.card.name}, simulated"
    else:
        title += f", {source}"
        each = f"usable: {', '.join(f'{size} of {gpu}' for gpu, size in usable.items())}"
    recorders = dict.fromkeys(f"recorder: {row.recorder_in_words}" for row in rows if row.recorder_version)
    optimizers = " or ".join(dict.fromkeys(row.cell.options.optimizer for row in rows))
    step = ", ".join([*replace(first.options, optimizer=optimizers).words(), *conditions])
    counts = list(dict.fromkeys(str(row.cell.options.gpus) for row in rows))
    step = step.replace(f" on {counts[0]} GPUs", f" on {', '.join(counts)} GPUs")
    cells = [row.cell for row in rows]
    columns: Columns = {"model": [cell.model for cell in cells]}
    if len(usable) > 1:
        columns["GPU"] = [cell.card.name for cell in cells]
    if any(cell.seq_len is not None for cell in cells):
        columns["seq len"] = ["-" if cell.seq_len is None else str(cell.seq_len) for cell in cells]
    columns["max batch"] = [str(row.result.max_batch_size) for row in rows]
    if first.options.packed:
        columns["tokens per step"] = [f"{row.tokens_per_step:,}" for row in rows]
    if any(cell.published is not None for cell in cells):
        columns["published"] = ["" if cell.published is None else str(cell.published) for cell in cells]
    columns["peak reserved"] = []
    for row in rows:
        if row.at_max is not None and row.at_max.peak_reserved_bytes is not None:
            columns["peak reserved"].append(format_bytes(row.at_max.peak_reserved_bytes))
        else:
            needs = "-" if row.needed_bytes is None else f"{row.cell.smallest} needs {row.need_words}"
            columns["peak reserved"].append(needs)
    if any(row.throughput is not None for row in rows):
        columns["full speed"], columns["samples/s"] = [], []
        for row in rows:
            found = row.throughput
            columns["full speed"].append("-" if found is None else str(found.batch_size) if found.certain else "?")
            columns["samples/s"].append("-" if found is None else str(found.rate(found.batch_size).figures))
    if any(cell.target_batch_size is not None for cell in cells):
        columns["micro-batch x accumulation"] = plans = []
        for row in rows:
            words = "-" if row.plan is None else row.plan.beside_exact(row.cell.smallest, row.cell.multiple_of)
            plans.append(words)
    prices = {cell.card.name: cell.card.price for cell in cells if cell.card.price is not None}
    if prices:
        paid = [None if cell.card.price is None else cell.card.price.usd_per_hour for cell in cells]
        columns["$/h"] = [format_dollars(dollars) for dollars in paid]
    for unit in dict.fromkeys(row.cost.unit for row in rows if row.cost is not None):
        paid = [row.cost.usd_per_million if row.cost and row.cost.unit == unit else None for row in rows]
        columns[f"$ per M {unit}"] = [format_dollars(dollars, digits=3) for dollars in paid]
    columns["source"] = [row.result.source for row in rows]
    notes = []
    if prices:
        when = ", ".join(dict.fromkeys(price.words for price in prices.values()))
        notes.append(f"$/h: on demand {when}, for all GPUs of a row; --prices takes your own")
        notes += _cheapest(rows)
    if priced := [(row.cell, row.cost) for row in rows if row.cost is not None]:
        notes += _cost_notes(priced)
    if any(row.cell.published is not None for row in rows):
        notes.append(
            "published: by google-research/bert in 2018 for a 12 GB Titan X: TensorFlow 1.11, Adam in fp32. The "
            "other figures are of today's PyTorch; `batchfinder reproduce titan-x` has both"
        )
    if any(row.plan is not None and row.plan.num_devices > 1 for row in rows):
        notes.append("where a plan has three factors, the last is the number of GPUs")
    if missed := [row.plan for row in rows if row.plan is not None and not row.plan.exact]:
        off = max(abs(plan.deviation) for plan in missed)
        notes.append(
            f"the effective batch of {missed[0].target_batch_size} is missed by up to {off}, where no large "
            f"micro-batch divides it: {len(missed)} of {len(rows)} rows"
            + ("; --exact has it met" if any(row.exact_plan is not None for row in rows) else "")
        )
    if timed := [row for row in rows if row.throughput is not None]:
        notes.append("full speed: the smallest batch within 3 % of the best samples/s, ± how far timings scatter")
        notes += [
            f"{row.cell.where}, {row.throughput}" for row in timed if row.throughput and not row.throughput.certain
        ]
    if capped := sorted({row.result.max_batch_size for row in rows if row.result.stop is StopReason.CAP}):
        notes.append(f"nothing above {' or '.join(map(str, capped))} was tried: --max-batch-size")
    if near := sum(row.result.stop is StopReason.TOLERANCE for row in rows):
        notes.append(f"to within the tolerance rather than exact: {near} of {len(rows)} rows")
    notes += [
        f"larger batches of {row.cell.where} do not fit: {row.stopped_by.value}"
        for row in rows
        if row.stopped_by is not None and row.stopped_by is not Verdict.OUT_OF_MEMORY
    ]
    for row in rows:
        if row.at_max is None and row.needed_bytes is None and row.result.measurement is not None:
            samples = "one sample" if row.cell.smallest == 1 else f"{row.cell.smallest} samples"
            words = " ".join(row.result.measurement.message.split())
            notes.append(f"{samples} of {row.cell.where} failed: {words}")
    for row in rows:
        if row.what_fits is not None:
            lines = what_fits_lines(row.what_fits, row.cell.card, row.cell.plan_command)
            notes += [f"{row.cell}: {line}" for line in lines]
    notes += [f"{row.cell.where} from 2 on, since batch size 1 raised {row.raised}" for row in rows if row.raised]
    notes += without_bf16(first.options.precision, [cell.card.device for cell in cells])
    if cached := sum(row.cached for row in rows):
        notes.append(f"from the cache: {cached} of {len(rows)} rows")
    notes += assumptions((text for row in rows for text in row.result.unmodelled), explain)
    if explain and (unscaled := sum(row.unscaled for row in rows)):
        notes.append(f"recorded at the size itself rather than scaled: {unscaled} of the sizes tried")
    return Table(title, (step, each, *recorders), columns, tuple(notes))


def _cheapest(rows: Iterable[SweepRow]) -> list[str]:
    """For each model and length, of several GPUs with a price the cheapest on which it trains, on demand and spot."""
    notes = []
    by_place: dict[str, list[tuple[SweepRow, Price]]] = {}
    for row in rows:
        if (price := row.cell.card.price) is not None:
            place = row.model if row.seq_len is None else f"{row.model} at {row.seq_len}"
            by_place.setdefault(place, []).append((row, price))
    for place, priced in by_place.items():
        said = []
        for kind, word in (("usd_per_hour", "on demand"), ("spot_usd_per_hour", "spot")):
            paid = [(getattr(price, kind), row.gpu) for row, price in priced if row.batch_size]
            known = [(dollars, gpu) for dollars, gpu in paid if dollars is not None]
            if known and len(priced) > 1:
                dollars, gpu = min(known)
                said.append(f"{gpu} for ${format_dollars(dollars)}/h {word}")
        if said:
            notes.append(f"{place}: the cheapest on which it trains is {', or '.join(said)}")
    return notes


def _cost_notes(costs: Sequence[tuple[Cell, TrainingCost]]) -> list[str]:
    """What costs are by, and for which cells the peak or the FLOPs are not known."""
    options, mfu = costs[0][0].options, costs[0][1].mfu
    units = " and ".join(dict.fromkeys(cost.unit for _, cost in costs))
    words = f"$ per M {units}: at {100 * mfu:g}% of the peak FLOP/s, as stated (--mfu); no measurement"
    if options.gradient_checkpointing:
        words += ". The share is HFU: what checkpointing recomputes is among the FLOPs"
    notes = [words]
    gpus = dict.fromkeys(cell.card.device.name.partition(",")[0] for cell, cost in costs if cost.peak_flops is None)
    if gpus:
        notes.append(f"no peak FLOP/s in {options.precision} is known of {', '.join(gpus)}")
    models = dict.fromkeys(cell.model for cell, cost in costs if cost.peak_flops and not cost.sample_flops)
    if models:
        notes.append(f"no FLOPs of matrix products were counted of {', '.join(models)}")
    return notes


def comma_separated(rows: Sequence[SweepRow]) -> str:
    """All figures as CSV with a heading, and last in each row what made it.

    Lists are joined by semicolons, and the speed is that of one size alone.
    """
    values = [{name: value for name, value in row.to_json().items() if name != "throughput"} for row in rows]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in values for name in row))
    writer = csv.DictWriter(text, [*names, "made_by"], lineterminator="\n")
    writer.writeheader()
    for row in values:
        joined = {name: "; ".join(map(str, value)) for name, value in row.items() if isinstance(value, list)}
        writer.writerow({**row, **joined, "made_by": made_by_words()})
    return text.getvalue()
