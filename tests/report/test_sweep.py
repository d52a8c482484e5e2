"""What a sweep found, in words and figures."""

from __future__ import annotations

from dataclasses import replace

from batchfinder.accumulation import plan_accumulation
from batchfinder.report.sweep import SweepRow, comma_separated, sweep_sheet

GIB = 1 << 30
ROW = SweepRow(
    model="bert-base",
    seq_len=64,
    gpu="T4",
    budget_bytes=14 * GIB,
    mode="train",
    precision="fp32",
    optimizer="adamw",
    attention="default",
    gradient_checkpointing=False,
    max_batch_size=100,
    peak_allocated_bytes=12 * GIB,
    peak_reserved_bytes=13 * GIB,
    source="simulated",
    trials=7,
    seconds=0.25,
    unmodelled=("workspaces",),
)


def test_one_gpu_stands_in_the_title() -> None:
    """What is the same in all rows is said once."""
    sheet = sweep_sheet([ROW, replace(ROW, seq_len=128)])
    assert sheet.title == "Largest training batch on T4, simulated"
    assert sheet.details == ("fp32, adamw", "14.00 GiB usable")
    assert list(sheet.columns) == ["model", "seq len", "max batch", "peak reserved", "source"]
    assert sheet.notes == ("left out: workspaces",)


def test_several_gpus_are_a_column() -> None:
    """With several GPUs each row says which, and what is usable of each is said once."""
    sheet = sweep_sheet([ROW, replace(ROW, gpu="V100", budget_bytes=15 * GIB)])
    assert sheet.title == "Largest training batch, simulated"
    assert sheet.details[1] == "usable: 14.00 GiB of T4, 15.00 GiB of V100"
    assert sheet.columns["GPU"] == ["T4", "V100"]


def test_every_option_is_said() -> None:
    """Mode, attention, checkpointing and the conditions stand above the table; inference has no optimizer."""
    row = replace(ROW, mode="inference", precision="bf16-true", attention="flash", gradient_checkpointing=True)
    sheet = sweep_sheet([row], ["headroom 10%"])
    assert sheet.title == "Largest inference batch on T4, simulated"
    assert sheet.details[0] == "bf16-true, flash attention, gradient checkpointing, headroom 10%"


def test_columns_with_nothing_to_say_are_left_out() -> None:
    """Samples of one fixed shape need no length; a mixed table has a dash for it."""
    shapeless = replace(ROW, seq_len=None)
    assert "seq len" not in sweep_sheet([shapeless]).columns
    assert sweep_sheet([shapeless, ROW]).columns["seq len"] == ["-", "64"]


def test_nothing_fits() -> None:
    """Where nothing fits there is no plan, and what one sample needs stands in the place of the peak."""
    row = replace(ROW, max_batch_size=0, peak_reserved_bytes=None, needed_bytes=20 * GIB, target_batch_size=256)
    columns = sweep_sheet([row]).columns
    assert columns["peak reserved"] == ["1 needs 20.00 GiB"]
    assert columns["micro-batch x accumulation"] == ["-"]
    assert row.to_json()["micro_batch_size"] is None


def test_plans() -> None:
    """A plan is the product it is; a third factor is explained."""
    one = replace(ROW, target_batch_size=256, plan=plan_accumulation(256, 100))
    eight = replace(ROW, target_batch_size=256, plan=plan_accumulation(256, 10, 8))
    sheet = sweep_sheet([one, eight])
    assert sheet.columns["micro-batch x accumulation"] == ["64 x 4 = 256", "8 x 4 x 8 = 256"]
    assert sheet.notes[0] == "where a plan has three factors, the last is the number of GPUs"
    assert sweep_sheet([one]).notes == ("left out: workspaces",)


def test_published_figures_have_their_source() -> None:
    """The published column is there where a row has a figure, 0 included, and says whose it is."""
    sheet = sweep_sheet([replace(ROW, published=0), ROW])
    assert sheet.columns["published"] == ["0", ""]
    assert sheet.notes[0].startswith("published: by google-research/bert ")


def test_counts_below_the_table() -> None:
    """Sizes that were not scaled, and rows from the cache, are counted; a cached figure is still a simulated one."""
    sheet = sweep_sheet([replace(ROW, source="cache"), replace(ROW, unscaled=2), replace(ROW, unscaled=1)])
    assert sheet.columns["source"] == ["simulated"] * 3
    assert sheet.notes[1:] == (
        "recorded at the size itself rather than scaled: 3 of the sizes tried",
        "from the cache: 1 of 3 rows",
    )


def test_a_cap_is_no_maximum() -> None:
    """Where the search ended at its cap, a note says that nothing larger was tried."""
    notes = sweep_sheet([replace(ROW, stop="cap"), ROW]).notes
    assert f"no larger batch was tried than {ROW.max_batch_size}: it is the search's cap" in notes
    assert not any("cap" in note for note in sweep_sheet([ROW]).notes)


MEASURED = replace(ROW, source="measured", found_by="measured", trials=4, failed_trials=1, stopped_by="out_of_memory")


def test_measured_figures() -> None:
    """The title says what they were measured on; a cached figure is still a measured one."""
    sheet = sweep_sheet([MEASURED, replace(MEASURED, source="cache", trials=0)])
    assert sheet.title == "Largest training batch, measured on T4"
    assert sheet.details == ("fp32, adamw", "14.00 GiB usable")
    assert sheet.columns["source"] == ["measured", "measured"]
    assert sheet.notes == ("left out: workspaces", "from the cache: 1 of 2 rows")


def test_a_tolerance_is_said() -> None:
    """Rows that a search left within its tolerance are counted."""
    notes = sweep_sheet([replace(MEASURED, stop="tolerance"), MEASURED]).notes
    assert "to within the tolerance rather than exact: 1 of 2 rows" in notes


def test_other_ends_than_a_full_memory_are_named() -> None:
    """Thrashing and kernels that cannot index as much are named, with the cell; a full memory is not."""
    rows = [MEASURED, replace(MEASURED, stopped_by="thrashing"), replace(MEASURED, seq_len=None)]
    rows += [replace(MEASURED, seq_len=None, stopped_by="size_ceiling"), replace(MEASURED, stopped_by=None)]
    assert sweep_sheet(rows).notes[1:] == (
        "what stopped bert-base at 64 was no full memory: it runs only by releasing and re-taking memory all the time",
        "what stopped bert-base was no full memory: a kernel cannot index a tensor this large",
    )


def test_nothing_fits_and_what_it_needs_is_not_known() -> None:
    """Then the device's own words stand below the table, on one line."""
    row = replace(MEASURED, max_batch_size=0, peak_reserved_bytes=None, message="CUDA out of memory.\nTried to")
    sheet = sweep_sheet([row])
    assert sheet.columns["peak reserved"] == ["-"]
    assert sheet.notes[-1] == "what became of one sample of bert-base at 64: CUDA out of memory. Tried to"
    assert not any("what became" in note for note in sweep_sheet([replace(row, needed_bytes=20 * GIB)]).notes)


def test_csv() -> None:
    """CSV has a heading with every key of any row, lists joined, and nothing where a row has no value."""
    rows = [replace(ROW, unmodelled=("one", "two")), replace(ROW, target_batch_size=8, plan=plan_accumulation(8, 4))]
    heading, first, second = comma_separated(rows).splitlines()
    assert heading.endswith(
        "published,target_batch_size,micro_batch_size,accumulation,num_devices,effective_batch_size"
    )
    assert first.startswith("bert-base,64,T4,")
    assert first.endswith("one; two,0,exact,,0,0,,simulated,,,,,,,")
    assert second.endswith("workspaces,0,exact,,0,0,,simulated,,,8,4,2,1,8")
