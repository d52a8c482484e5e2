"""A row of a sweep, and the table, JSON and CSV that are made of rows."""

from __future__ import annotations

import csv
import io
import shlex
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from batchfinder.accumulation import AccumulationPlan
from batchfinder.cli.options import asked_card, step_options
from batchfinder.cli.parser import build_parser
from batchfinder.devices import Card, Device, Price
from batchfinder.devices.cards import card
from batchfinder.devices.training_cost import TrainingCost
from batchfinder.recording.what_fits import Fit, WhatFits
from batchfinder.report.made_by import made_by_words
from batchfinder.report.sweep import Cell, SweepRow, comma_separated, sweep_table
from batchfinder.results import Measurement, Rate, SearchResult, Shape, StopReason, Throughput, Trial, Verdict
from batchfinder.training.spec import StepOptions

GIB = 1 << 30
T4 = Card(Device("T4", 15 * GIB, 14 * GIB, (7, 5)), "T4")
V100 = Card(Device("V100", 16 * GIB, 15 * GIB, (7, 0)), "V100")
CELL = Cell("bert-base", 64, T4, StepOptions())


def tried(size: int, verdict: Verdict = Verdict.FITS) -> Trial:
    """A size and what came of it."""
    if verdict is Verdict.FITS:
        return Trial(size, Shape(64), Measurement(verdict, 12 * GIB, 13 * GIB))
    return Trial(size, Shape(64), Measurement(verdict, message="no"))


def row(size: int = 100, *trials: Trial, source: str = "simulated", **changes: Any) -> SweepRow:
    """A row; `changes` are of its cell, and of its result where a result has such a field."""
    trials = trials or (tried(size), tried(size + 1, Verdict.OUT_OF_MEMORY))
    measurement = next(trial.measurement for trial in trials if trial.batch_size == max(1, size))
    result = SearchResult(Shape(64), size, StopReason.EXACT, measurement, trials, source, ("workspaces",))
    names = ("stop", "measurement", "unmodelled")
    of_result = {name: changes.pop(name) for name in names if name in changes}
    return SweepRow(replace(CELL, **changes), replace(result, **of_result), trials, 0.25)


def needing(size: int | None, message: str = "no") -> SweepRow:
    """A row where nothing fits, and what one sample needs."""
    failed = Trial(1, Shape(64), Measurement(Verdict.OUT_OF_MEMORY, message=message, needed_bytes=size))
    return row(0, failed, target_batch_size=256)


@pytest.mark.parametrize("verdict", [Verdict.THRASHING, Verdict.SIZE_CEILING, Verdict.OUT_OF_MEMORY])
def test_what_stopped_it(verdict: Verdict) -> None:
    """It is the smallest size that failed above the answer which is named, and no smaller one, also from the cache."""
    trials = [tried(2, Verdict.HOST_OUT_OF_MEMORY), tried(4), tried(8, Verdict.HOST_OUT_OF_MEMORY), tried(5, verdict)]
    fresh = row(4, *trials)
    assert fresh.stopped_by is replace(fresh, trials=(), cached=True).stopped_by is verdict
    assert fresh.to_json()["stopped_by"] == verdict.name.lower()
    assert row(4, tried(4)).to_json()["stopped_by"] is None


def test_trials_are_counted() -> None:
    """Those of this run, and how many of them failed; none for an answer from the cache, which says who found it."""
    fresh = row(4, tried(4), tried(8, Verdict.OUT_OF_MEMORY), tried(5, Verdict.OUT_OF_MEMORY), source="measured")
    names = ("source", "found_by", "trials", "failed_trials")
    found, cached = fresh.to_json(), replace(fresh, trials=(), cached=True).to_json()
    assert tuple(found[name] for name in names) == ("measured", "measured", 3, 2)
    assert tuple(cached[name] for name in names) == ("cache", "measured", 0, 0)


def test_the_message_of_a_failure_only_where_nothing_fits() -> None:
    """The device's message and no peaks for 0; peaks and no message for an answer."""
    nothing, something = needing(None).to_json(), row().to_json()
    names = ("message", "peak_reserved_bytes", "peak_allocated_bytes")
    assert tuple(nothing[name] for name in names) == ("no", None, None)
    assert tuple(something[name] for name in names) == ("", 13 * GIB, 12 * GIB)


def test_one_gpu_stands_in_the_title() -> None:
    """What is the same in all rows is said once."""
    table = sweep_table([row(), row(seq_len=128)])
    assert table.title == "Largest training batch on T4, simulated"
    assert table.details == ("fp32, adamw", "14.00 GiB usable")
    assert list(table.columns) == ["model", "seq len", "max batch", "peak reserved", "source"]
    assert table.notes == ("1 assumption; --explain says which",)


def test_gpus_that_lack_bf16_are_named() -> None:
    """Once each, in a note; the figures stay."""
    a100 = Card(Device("A100", 40 * GIB, 38 * GIB, (8, 0)), "A100")
    options = StepOptions(precision="bf16-mixed")
    rows = [row(card=card, options=options) for card in (T4, a100, V100, T4)]
    said = "no bf16 units and no fused attention in bf16: T4, V100; "
    assert len([note for note in sweep_table(rows).notes if note.startswith(said)]) == 1
    assert not [note for note in sweep_table(rows[1:2]).notes if "bf16" in note]


def test_what_a_row_costs() -> None:
    """A column where one has a price, with a dash for the others, and what is known of the prices below."""
    price = Price(3.06, 1.0, "us-east-1", date(2026, 7, 20), "https://somewhere")
    rows = [row(), row(card=replace(V100, name="p3.2xlarge: 1 x V100", price=price))]
    table = sweep_table(rows)
    assert table.columns["$/h"] == ["-", "3.06"]
    assert "$/h: on demand in us-east-1 as of 2026-07-20, for all GPUs of a row; --prices takes your own" in table.notes
    assert [one.to_json().get("usd_per_hour") for one in rows] == [None, 3.06]
    assert "$/h" not in sweep_table(rows[:1]).columns
    assert not [note for note in table.notes if "cheapest" in note]


def test_the_cheapest_on_which_it_trains() -> None:
    """Of those with a price, by model and length; a spot price apart; not where there is nothing to choose from."""

    def priced(name: str, usd_per_hour: float | None, spot: float | None, **changes: Any) -> SweepRow:
        price = Price(usd_per_hour, spot, "us-east-1", date(2026, 7, 20), "https://somewhere")
        return row(card=replace(V100, name=name, price=price), **changes)

    small = priced("small", 0.5, 0.1)
    small = replace(small, result=replace(small.result, max_batch_size=0))
    rows = [
        row(),
        small,
        priced("middle", 2.0, None),
        priced("large", 3.0, 1.0),
        priced("middle", 2.0, 0.5, seq_len=128),
    ]
    said = [note for note in sweep_table(rows).notes if "cheapest" in note]
    where = f"{rows[0].model} at {rows[0].seq_len}"
    assert said == [
        f"{where}: the cheapest on which it trains is middle for $2.00/h on demand, or large for $1.00/h spot"
    ]


def costing(usd_per_hour: float, peak_flops: float | None = 1e12, **changes: Any) -> SweepRow:
    """A row with what its training costs."""
    tokens, flops = changes.pop("tokens", 10), changes.pop("sample_flops", 1e9)
    price = Price(usd_per_hour, None, "us-east-1", date(2026, 7, 20), "https://somewhere")
    changed = row(**{"card": replace(V100, name="p3.2xlarge: 1 x V100", price=price), **changes})
    return replace(changed, cost=TrainingCost(0.4, usd_per_hour, 1, peak_flops, flops, tokens))


def test_what_training_costs_at_a_stated_share_of_the_peak() -> None:
    """A column with enough digits, a dash where a peak or a price is missing, and whose statement it is."""
    rows = [row(), costing(3.6), costing(0.036), costing(5.0, None)]
    table = sweep_table(rows)
    # 400 samples in a second: 1.44 million in an hour, of ten tokens each.
    assert table.columns["$ per M tokens"] == ["-", "0.250", "0.00250", "-"]
    assert list(table.columns)[-3:] == ["$/h", "$ per M tokens", "source"]
    said = "$ per M tokens: at 40% of the peak FLOP/s, as stated (--mfu); no measurement"
    assert said in table.notes
    assert "no peak FLOP/s in fp32 is known of V100" in table.notes
    names = ("mfu", "usd_per_million_tokens")
    assert [rows[0].to_json().get(name) for name in names] == [None, None]
    assert [rows[1].to_json()[name] for name in names] == [0.4, pytest.approx(0.25)]
    assert ",mfu,peak_flops,sample_flops,usd_per_million_tokens" in comma_separated(rows).splitlines()[0]
    alone = sweep_table([costing(3.6)])
    assert not [note for note in alone.notes if "no peak" in note or "no FLOPs" in note]
    assert "$ per M tokens" not in sweep_table(rows[:1]).columns
    assert not [note for note in sweep_table(rows[:1]).notes if "--mfu" in note]


def test_samples_without_tokens_cost_by_the_million_of_their_own() -> None:
    """In a column beside that of tokens."""
    table = sweep_table([costing(3.6), costing(3.6, tokens=None, model="resnet50")])
    assert table.columns["$ per M tokens"] == ["0.250", "-"]
    assert table.columns["$ per M samples"] == ["-", "2.50"]
    assert [note for note in table.notes if note.startswith("$ per M tokens and samples: at 40% of the peak")]


def test_what_the_share_is_of_is_said() -> None:
    """Of FLOPs with what checkpointing recomputes; and a model without matrix products is named."""
    options = StepOptions(gradient_checkpointing=True)
    notes = sweep_table([costing(3.6, options=options, sample_flops=0)]).notes
    assert [note for note in notes if "no measurement. The share is HFU: what checkpointing recomputes" in note]
    assert "no FLOPs of matrix products were counted of bert-base" in notes
    assert not [note for note in sweep_table([costing(3.6)]).notes if "HFU" in note]


def test_several_gpus_are_a_column() -> None:
    """With several GPUs each row says which, and what is usable of each is said once."""
    table = sweep_table([row(), row(card=V100)])
    assert table.title == "Largest training batch, simulated"
    assert table.details[1] == "usable: 14.00 GiB of T4, 15.00 GiB of V100"
    assert table.columns["GPU"] == ["T4", "V100"]


def test_every_option_is_said() -> None:
    """Mode, attention, checkpointing and the conditions stand above the table; inference has no optimizer."""
    options = StepOptions("inference", "bf16-true", "adamw", "flash", gradient_checkpointing=True)
    table = sweep_table([row(options=options)], ["headroom 10%"])
    assert table.title == "Largest inference batch on T4, simulated"
    assert table.details[0] == "bf16-true, inference, flash attention, gradient checkpointing, headroom 10%"


def test_several_optimizers_are_said() -> None:
    """Where a model brings its own optimizer, both stand above the table."""
    own = replace(StepOptions(), optimizer="the module's optimizer")
    assert sweep_table([row(), row(options=own)]).details[0] == "fp32, adamw or the module's optimizer"


def test_columns_with_nothing_to_say_are_left_out() -> None:
    """Samples of one fixed shape need no length; a mixed table has a dash for it."""
    shapeless = row(seq_len=None)
    assert "seq len" not in sweep_table([shapeless]).columns
    assert sweep_table([shapeless, row()]).columns["seq len"] == ["-", "64"]


def test_nothing_fits() -> None:
    """Where nothing fits there is no plan, and what one sample needs stands in the place of the peak."""
    columns = sweep_table([needing(20 * GIB)]).columns
    assert columns["peak reserved"] == ["1 needs 20.00 GiB"]
    assert columns["micro-batch x accumulation"] == ["-"]
    assert needing(20 * GIB).to_json()["micro_batch_size"] is None


def test_plans() -> None:
    """A plan is the product it is; a third factor is explained."""
    one, eight = row(target_batch_size=256), row(10, target_batch_size=256, card=replace(T4, count=8))
    table = sweep_table([one, eight])
    assert table.columns["micro-batch x accumulation"] == ["85 x 3 = 255 (exactly 256: 64 x 4)", "8 x 4 x 8 = 256"]
    factors, missed, _ = table.notes
    assert factors == "where a plan has three factors, the last is the number of GPUs"
    assert missed == (
        "the effective batch of 256 is missed by up to 1, where no large micro-batch divides it: 1 of 2 rows; "
        "--exact has it met"
    )
    assert sweep_table([one]).notes[0].startswith("the effective batch of 256 is missed")
    assert len(sweep_table([row(64, target_batch_size=256)]).notes) == 1


def test_a_plan_is_made_of_multiples() -> None:
    """A plan is made of sizes that may be tried; a target that they cannot make up has no plan."""
    (plan,) = sweep_table([row(target_batch_size=240, multiple_of=16)]).columns["micro-batch x accumulation"]
    assert plan == "80 x 3 = 240"
    assert row(target_batch_size=240, multiple_of=16).to_json()["effective_batch_size"] == 240
    assert row(5, target_batch_size=6, min_batch_size=4).plan is None


def test_a_target_that_is_missed_has_the_exact_plan_beside_it() -> None:
    """As factors in the table, in the JSON by numbers, and nowhere for what meets the target; --exact takes it."""
    missed, met = row(15, target_batch_size=256), row(16, target_batch_size=256)
    table = sweep_table([missed, met])
    assert table.columns["micro-batch x accumulation"] == ["15 x 17 = 255 (exactly 256: 8 x 32)", "16 x 16 = 256"]
    assert table.notes[0].endswith("where no large micro-batch divides it: 1 of 2 rows; --exact has it met")
    figures = [
        tuple(one.to_json()[f"exact_{name}"] for name in ("micro_batch_size", "accumulation")) for one in (missed, met)
    ]
    assert figures == [(8, 32), (None, None)]
    exact = replace(missed, cell=replace(missed.cell, exact=True))
    assert sweep_table([exact]).columns["micro-batch x accumulation"] == ["8 x 32 = 256"]
    assert "--exact" in exact.cell.plan_command
    assert "--exact" not in missed.cell.plan_command
    least = replace(missed, cell=replace(missed.cell, min_batch_size=9))
    assert sweep_table([least]).columns["micro-batch x accumulation"] == ["15 x 17 = 255"]
    assert sweep_table([least]).notes[0].endswith("1 of 1 rows")


def test_what_one_sample_needs_is_marked_where_it_was_not_measured() -> None:
    """In the table, the JSON and the CSV; where it was found as the row was, nothing more is said."""
    real = replace(needing(24 * GIB), need_source="simulated")
    real = replace(real, result=replace(real.result, source="measured"))
    assert sweep_table([real]).columns["peak reserved"] == ["1 needs 24.00 GiB, simulated"]
    assert real.to_json()["needed_found_by"] == "simulated"
    (line,) = csv.DictReader(io.StringIO(comma_separated([real])))
    assert line["needed_found_by"] == "simulated"
    measured = replace(real, need_source="")
    assert sweep_table([measured]).columns["peak reserved"] == ["1 needs 24.00 GiB"]
    assert measured.to_json()["needed_found_by"] == "measured"
    assert row().to_json()["needed_found_by"] is None


def test_published_figures_have_their_source() -> None:
    """The published column is there where a row has a figure, 0 included, and says whose it is."""
    table = sweep_table([row(published=0), row()])
    assert table.columns["published"] == ["0", ""]
    assert table.notes[0].startswith("published: by google-research/bert ")


def test_assumptions_are_counted_or_explained() -> None:
    """One line counts them, each once; with --explain each has a line, and so have sizes that were not scaled."""
    rows = [row(unmodelled=("one", "two")), replace(row(unmodelled=("two", "three")), unscaled=2)]
    assert sweep_table(rows).notes == ("3 assumptions; --explain lists them",)
    assert sweep_table(rows, explain=True).notes == (
        "left out or assumed: one",
        "left out or assumed: two",
        "left out or assumed: three",
        "docs/glossary.md explains the words",
        "recorded at the size itself rather than scaled: 2 of the sizes tried",
    )
    assert sweep_table([row(unmodelled=())]).notes == ()


def test_cached_rows_are_counted() -> None:
    """Rows from the cache are counted; a cached figure is still a simulated one."""
    table = sweep_table([replace(row(), cached=True), row(), row()])
    assert table.columns["source"] == ["simulated"] * 3
    assert table.notes[0] == "from the cache: 1 of 3 rows"


def test_a_cap_is_no_maximum() -> None:
    """Where the search ended at its cap, a note says that nothing larger was tried."""
    notes = sweep_table([row(stop=StopReason.CAP), row()]).notes
    assert "nothing above 100 was tried: --max-batch-size" in notes
    assert not any("--max-batch-size" in note for note in sweep_table([row()]).notes)


MEASURED = row(source="measured", unmodelled=())


def test_measured_figures() -> None:
    """The title says what they were measured on; a cached figure is still a measured one."""
    table = sweep_table([MEASURED, replace(MEASURED, cached=True, trials=())])
    assert table.title == "Largest training batch, measured on T4"
    assert table.details == ("fp32, adamw", "14.00 GiB usable")
    assert table.columns["source"] == ["measured", "measured"]
    assert table.notes == ("from the cache: 1 of 2 rows",)


def test_a_tolerance_is_said() -> None:
    """Rows that a search left within its tolerance are counted."""
    notes = sweep_table([row(stop=StopReason.TOLERANCE), row()]).notes
    assert "to within the tolerance rather than exact: 1 of 2 rows" in notes


def test_other_ends_than_a_full_memory_are_named() -> None:
    """Thrashing and kernels that cannot index as much are named, with the cell; a full memory is not."""
    rows = [row(100, tried(100), tried(101, verdict), unmodelled=()) for verdict in Verdict if not verdict.fits]
    rows.append(row(100, tried(100), tried(101, Verdict.SIZE_CEILING), seq_len=None, unmodelled=()))
    notes = sweep_table(rows).notes
    assert f"larger batches of bert-base at 64 do not fit: {Verdict.THRASHING.value}" in notes
    assert f"larger batches of bert-base do not fit: {Verdict.SIZE_CEILING.value}" in notes
    assert not any(Verdict.OUT_OF_MEMORY.value in note for note in notes)


def test_nothing_fits_and_what_it_needs_is_not_known() -> None:
    """Then the device's own message stands below the table, on one line."""
    table = sweep_table([needing(None, "CUDA out of memory.\nTried to")])
    assert table.columns["peak reserved"] == ["-"]
    assert "one sample of bert-base at 64 failed: CUDA out of memory. Tried to" in table.notes
    assert not any("one sample" in note for note in sweep_table([needing(20 * GIB)]).notes)


def test_csv() -> None:
    """CSV has a heading with every key of any row, lists joined, and nothing where a row has no value."""
    rows = [row(4, tried(4), unmodelled=("one", "two")), row(4, tried(4), target_batch_size=8)]
    made = f',"{made_by_words()}"'
    heading, first, second = (line.removesuffix(made) for line in comma_separated(rows).splitlines())
    assert heading.endswith(
        "published,target_batch_size,micro_batch_size,accumulation,num_devices,effective_batch_size,"
        "exact_micro_batch_size,exact_accumulation,made_by"
    )
    assert first.startswith("bert-base,64,T4,")
    assert first.endswith("one; two,0,exact,,,0,0,,simulated,,,,,,,,,")
    assert second.endswith("workspaces,0,exact,,,0,0,,simulated,,,8,4,2,1,8,,")


RATES = (Rate(50, 300.0, 0.004), Rate(71, 408.0, 0.005), Rate(100, 412.0, 0.012))


def test_the_size_at_full_speed_stands_beside_the_largest() -> None:
    """With its samples per second and their spread; "?" and the reason where it cannot be told, "-" where not asked."""
    known = replace(row(source="measured"), throughput=Throughput(71, 100, RATES, True, 5, 0.004))
    unsure = replace(row(source="measured", seq_len=32), throughput=Throughput(100, 100, RATES, False, 15, 0.03))
    table = sweep_table([known, unsure, row(source="measured")])
    assert table.columns["full speed"] == ["71", "?", "-"]
    assert table.columns["samples/s"] == ["408 ± 0.5 %", "412 ± 1.2 %", "-"]
    assert any("at 32, full speed: cannot tell, the timings scatter by 9.0 %" in note for note in table.notes)
    found, not_told = known.to_json(), unsure.to_json()
    assert (found["full_speed_batch_size"], found["samples_per_second"], found["samples_per_second_spread"]) == (
        *(71, 408.0),
        0.005,
    )
    assert [rate["batch_size"] for rate in found["throughput"]["rates"]] == [50, 71, 100]
    assert not_told["full_speed_batch_size"] is None
    assert "throughput" not in comma_separated([known]).splitlines()[0].split(",")


def test_a_plan_is_made_of_the_size_at_full_speed() -> None:
    """Of 100 that fit, 64 x 4 where 71 are as fast."""
    known = replace(row(target_batch_size=256), throughput=Throughput(71, 100, RATES, True, 5, 0.004))
    assert known.plan is not None
    assert (known.plan.micro_batch_size, known.plan.accumulation) == (64, 4)


def test_what_fits_stands_below_a_row_in_which_nothing_does() -> None:
    """The first change, other GPUs, and the command that says more, with the options of the sweep; and in the JSON."""
    options = StepOptions(precision="bf16-true", gpus=16, strategy="fsdp2")
    changed = replace(options, loss="chunked")
    fit = Fit("--loss chunked", changed, AccumulationPlan(256, 2, 8, 16), 9 * GIB, 5, trains_adapters=False)
    found = WhatFits(options, 20 * GIB, 5, (fit,), tried=3, ruled_out=0, larger_gpus=("A10", "A30"))
    nothing = needing(20 * GIB)
    cell = replace(nothing.cell, options=options)
    notes = sweep_table([replace(nothing, cell=cell, what_fits=found)]).notes
    about = [
        note.removeprefix("bert-base at 64 on T4: ") for note in notes if note.startswith("bert-base at 64 on T4: ")
    ]
    assert about == [
        "trains with --loss chunked: micro-batch x accumulation 2 x 8 x 16 devices = 256",
        "GPUs with the memory that it takes as asked for: A10, A30",
        "batchfinder plan --model bert-base --gpu T4 --seq-len 64 --target-batch-size 256 --precision bf16-true "
        "--strategy fsdp2 --gpus 16 shows what else would do",
    ]
    assert replace(nothing, what_fits=found).to_json()["what_fits"]["fits"][0]["loss"] == "chunked"
    on_host = replace(found, fits=(replace(fit, host_bytes=3 * GIB),))
    notes = sweep_table([replace(nothing, cell=cell, what_fits=on_host)]).notes
    assert any("= 256; the optimizer takes 3.00 GiB or more of the host's memory" in each for each in notes)
    assert "what_fits" not in nothing.to_json()


@pytest.mark.parametrize(
    ("gpu", "budget", "context"),
    [
        ("a100 40gb", None, None),
        ("a100 40gb", "60MiB", None),
        ("t4", "60GiB", "1.30GiB"),
        ("t4", None, "1.30GiB"),
        (None, "12GiB", None),
    ],
)
def test_the_command_for_a_plan_is_of_the_same_card(gpu: str | None, budget: str | None, context: str | None) -> None:
    """With its budget and its CUDA context, as the command line reads them."""
    asked = card(gpu, budget, context=context)
    options = StepOptions(precision="bf16-true", packed=True, compile="layers")
    words = ["plan", *shlex.split(replace(CELL, card=asked, model="a path/config.json", options=options).plan_command)]
    arguments = build_parser().parse_args(words)
    assert asked_card(arguments)[0].device.usable_bytes == asked.device.usable_bytes
    assert step_options(arguments) == options
    assert (arguments.model, arguments.seq_len, arguments.target_batch_size) == ("a path/config.json", "64", "8")
