"""Writes accuracy.md and accuracy.png from benchmarks/results/measured: `PYTHONPATH=. python docs/make_accuracy.py`.

A test keeps the page up to date.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchfinder.report.plots import COLOURS, GREY, drawn
from batchfinder.units import format_bytes
from benchmarks.measured.__main__ import RESULTS, other_estimators
from benchmarks.measured.scores import of_all, of_rows

PAGE = Path(__file__).with_name("accuracy.md")
PICTURE = Path(__file__).with_name("accuracy.png")

HEAD = """\
# Accuracy

How near batchfinder comes to memory that others have measured. Each source is a folder of `benchmarks/measured` with
its figures as published, their URL, licence, hardware and versions, and the settings of each run with where they were
read. A predicted figure is what the tool says for those settings on a machine without a GPU; no constant was fitted
to a figure. {rows} figures and {verdicts} verdicts from {sources} sources:

```{{image}} accuracy.png
:alt: For each source, the errors of its figures in percent, their median, and the 5th to the 95th percentile
```

`median` and `p90` are of the absolute relative error, `bias` is its mean. `fits?` is how often it was said rightly
whether the run fits. Of `brackets`, a size that ran and the next larger one which did not, a hit has both right.
`failures` is xMem's measure: a wrong verdict, or a run that is out of memory with the estimate as its limit. Where the
source repeated the run with limits it is known. Elsewhere an estimate below the measured figure counts as a failure
unless the recorded step runs with a limit that is lower still by the same: as if all that it is short of had been in
use. Of two numbers there, the first is with the figure itself as the limit. Figures that hang on what cannot be known
have an interval beside them, and the second number is with its upper end as the limit, which is what a user would set:
from the 5th to the 95th percentile of draws where steps have random lengths, and with segments where cudaMalloc puts
them and at rising addresses, which decide between free blocks of one size. Over all, every source weighs the same.

"""
AFTER = """
## Where the limits are

- Peak allocated is exact where all tensors are known. Peak reserved depends on how blocks of the caching allocator were
  split before, and scatters between two runs of one job: by 19 % where batches are of different lengths.
- cuDNN picks algorithms on the card. Their workspaces are not modelled (`cuDNN workspaces` with `--explain`): models
  with convolutions can take more than the answer, 0.35 to 1.25 GiB where it was seen. Of xMem's randomly drawn jobs
  those of texts have a median error of 0.2 %, those of images of 3.2 %.
- Old figures contain an old CUDA context: `--context`.
- Most figures of sharded training are of FSDP version 1 (`--strategy fsdp`) or Megatron-LM. FSDP2 itself has nine.

[simulator.md](simulator.md) says what is left out and in which direction it errs;
[reproductions.md](reproductions.md) has the published tables that have a model of their own in this project.

## Add a source

A folder `benchmarks/measured/NAME` with `rows.csv` (the figures as published, nothing computed), README.md (URL with
commit, licence, hardware, versions, and which setting of the run was read where), `__init__.py`, and `cases.py`,
whose `cases()` makes a `Case` of each row. A builder makes the model with the source's own code, or with its equal:
say which. Then:

```sh
python -m benchmarks.measured NAME --resume   # records, and writes benchmarks/results/measured/NAME.json
PYTHONPATH=. python docs/make_accuracy.py       # this page
```

Figures that look wrong stay in. What explains a row goes into its `note`; nothing in the package may know a row.

Tables that were computed stay out. Unsloth's README had the longest context of QLoRA by size of card
([of March 2026](https://github.com/unslothai/unsloth/blob/0acd1c7eec2a6c6adb43367a333dd0e30332b1b0/README.md)). Its
figures lie on straight lines to the token: 404.75 tokens for each GB from 12 to 80, with transformers and
FlashAttention 2. At those six lengths batchfinder says that 11.6, 15.8, 24.0, 40.7, 49.0 and 81.3 GiB are reserved
(nf4, LoRA of rank 32 on all linear layers, checkpointing, 8-bit AdamW).

## Submit a measurement of your own

On a machine with a CUDA card:

```sh
python -m batchfinder check --model gpt2 --seq-len 512 --batch-size 16 --precision bf16-mixed --out check.json
```

It takes training steps of the model, any that `sweep` takes, prints their peaks beside the simulated ones, and writes
both to a file, with the card, the driver and the versions. Send it with an issue or a pull request. It has not run on a
card yet. `python benchmarks/real_card.py` in a clone goes further: it takes some hundred training steps in three
minutes, for a comparison with the CUDA stub's, allocation by allocation.
"""

OTHERS = """\
Their answers as published with the runs, formulas where their source says so, and
[PyTorch's MemTracker](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/_tools/mem_tracker.py) on fake
tensors of the CPU, of the same workloads (`python -m benchmarks.memtracker`). The [leaderboard](leaderboard.md) has
them beside batchfinder on the same rows, and says how to enter another. MemTracker counts tensors: no blocks,
workspaces or segments, and operators as the CPU has them. It cannot follow frozen parameters, so no LoRA.

"""

GROUPS = {
    "one operation": ("PyTorch", "Liger"),
    "LoRA, QLoRA, adapters": ("LoRA", "QLoRA", "FLUX.2-klein"),
    "checkpointing": ("checkpointing",),
    "compile": ("compile",),
    "several GPUs": ("FSDP", "ZeRO", "DDP", "tensor", "pipeline"),
    "eager": ("eager",),
}


def group_of(technique: str, source: str) -> str:
    """What a row's technique counts as here."""
    if source == "peft":
        return "LoRA, QLoRA, adapters"
    last = technique.rpartition(", ")[2]
    return next((name for name, parts in GROUPS.items() if last.startswith(parts)), "other")


def line(name: str, score: Mapping[str, Any]) -> str:
    """A row of the table."""
    errors = [f"{100 * score[each]:.2f} %" if each in score else "" for each in ("median", "p90", "bias")]
    counts = [f"{score['verdicts']} / {score['asked']}" if score["asked"] else ""]
    failures = [str(score[each]) for each in ("failures", "failures_at_upper") if each in score]
    counts.append(f"{', '.join(failures)} / {score['capped']}" if "capped" in score else "")
    if "brackets" in score:
        counts.append(f"{score['hit']} / {score['brackets']} ({score['below']} below)")
    else:
        counts.append("")
    return f"| {' | '.join([name, str(score['rows']), *errors, *counts])} |\n"


def worst(rows: Mapping[str, Sequence[Mapping[str, Any]]], most: int = 10, each: int = 2) -> str:
    """The rows that are off most, at most so many of a source."""
    found: list[tuple[float, str, Mapping[str, Any]]] = []
    for source, its in rows.items():
        off = sorted((row for row in its if "error" in row), key=lambda row: -abs(row["error"]))
        found += [(abs(row["error"]), source, row) for row in off[:each]]
    lines = ["| source | row | measured | predicted | off by | why |\n|---|---|---:|---:|---:|---|\n"]
    for _, source, row in sorted(found, key=lambda item: item[:2], reverse=True)[:most]:
        cases = importlib.import_module(f"benchmarks.measured.{source}.cases").cases()
        note = next((case.note for case in cases if case.name == row["name"]), "")
        why = note or f"not known, or in `benchmarks/measured/{source}/README.md`"
        figures = [format_bytes(row["published_bytes"]), format_bytes(row["predicted_bytes"])]
        name = row["name"].replace("|", "/")
        lines.append(f"| {source} | {name} | {' | '.join(figures)} | {100 * row['error']:+.1f} % | {why} |\n")
    return "".join(lines)


def draw(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """The errors of each source, in percent: a dot for each figure, a line from the 5th to the 95th percentile."""
    errors = {source: sorted(100 * row["error"] for row in its if "error" in row) for source, its in rows.items()}
    shown = {source: its for source, its in sorted(errors.items(), reverse=True) if its}
    with drawn("accuracy", str(PICTURE), width=8.0, height=1.2 + 0.42 * len(shown)) as (axes,):
        axes.axvline(0, color=GREY, linewidth=1, zorder=1)
        for place, its in enumerate(shown.values()):
            beside = [place + 0.3 * ((5 * number % 11) / 5 - 1) for number in range(len(its))]
            axes.scatter(its, beside, s=9, color=COLOURS[0], alpha=0.4, linewidths=0, zorder=2)
            ends = [its[round(share * (len(its) - 1))] for share in (0.05, 0.5, 0.95)]
            axes.plot([ends[0], ends[-1]], [place, place], color=COLOURS[1], linewidth=2.5, zorder=3)
            axes.scatter([ends[1]], [place], s=40, color=COLOURS[1], zorder=4)
        axes.set_yticks(range(len(shown)), [f"{source} ({len(its)})" for source, its in shown.items()])
        axes.set_xscale("symlog", linthresh=1.0)
        ticks = [-100, -10, -1, 0, 1, 10, 100]
        axes.set_xticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
        axes.set(xlim=(-100, 120), xlabel="predicted too low or too high, linear between -1 and +1 %")
        axes.set_title("Error of the predicted memory, by source (number of figures)")


def page() -> str:
    """The page's text, from the results that are there."""
    rows = {path.stem: json.loads(path.read_text(encoding="utf-8"))["rows"] for path in sorted(RESULTS.glob("*.json"))}
    total = of_all(rows)
    text = HEAD.format(rows=total["rows"], verdicts=total["asked"], sources=len(rows))
    heads = ("", "figures", "median", "p90", "bias", "fits?", "failures", "brackets")
    titles = f"| {' | '.join(heads)} |\n|---|{(len(heads) - 1) * '---:|'}\n"
    text += titles + "".join(line(name, of_rows(its)) for name, its in rows.items()) + line("**all alike**", total)
    groups: dict[str, list[Any]] = {}
    for source, its in rows.items():
        for row in its:
            groups.setdefault(group_of(row["technique"], source), []).append(row)
    text += "\n## By technique\n\n" + titles + "".join(line(name, of_rows(its)) for name, its in sorted(groups.items()))
    text += "\n## Other estimators on the same runs\n\n" + OTHERS + titles
    for source, its in rows.items():
        others = other_estimators(source, its)
        if others:
            text += line(f"{source}: batchfinder", of_rows(its))
            text += "".join(line(f"{source}: {name}", of_rows(answers)) for name, answers in others.items())
    repeated = of_rows(rows["xmem"])
    text += "\nxMem's authors repeated runs with such estimates as the allocator's limit. "
    text += f"Of {repeated['limits']} runs, {repeated['limits_right']} went as the recorded step does with that limit, "
    text += "through or out of memory. By how often they failed with limits as near to what the run had reserved, "
    figure, upper = repeated["expected_failures"]
    text += f"{figure:g} failures would be expected with batchfinder's figures as limits, and {upper:g} with the upper "
    text += f"ends of their intervals, of {repeated['capped']}.\n"
    text += "\n## The rows that are off most\n\nAt most two of a source.\n\n" + worst(rows)
    return text + AFTER


if __name__ == "__main__":
    results = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))["rows"] for path in sorted(RESULTS.glob("*.json"))
    }
    draw(results)
    PAGE.write_text(page(), encoding="utf-8")
