"""Writes leaderboard.md from the predictions beside the results: `PYTHONPATH=. python docs/make_leaderboard.py`.

A test keeps the page up to date.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measured.score import OURS, PREDICTIONS, Answers, benchmark, our_answers, read_predictions, scored
from benchmarks.measured.scores import of_all, of_rows

PAGE = Path(__file__).with_name("leaderboard.md")

HEAD = """\
# Leaderboard

Whose predictions come how near to what others have measured: {figures} published peaks and {verdicts} runs of which
it is known whether they fitted, from {sources} sources ([Accuracy](accuracy.md) says what they are). Whoever has an
estimator can enter it.

An estimator is scored on the rows that it answers; beside it stand batchfinder's figures of the same rows. `median`
and `p90` are of the absolute relative error, `bias` is the mean error, each source weighing the same. `fits?` is how
often it was said rightly whether the run fits its card; one that gives a number of bytes says that it does.

| estimator | rows | sources | median, % | p90, % | bias, % | fits? | batchfinder, same rows: median, p90, fits? |
|---|---:|---:|---:|---:|---:|---:|---:|
"""

SOURCES = """
## By source

The median error in percent, and of how many figures.

| source | batchfinder | others |
|---|---:|---|
"""

AFTER = """
## Enter an estimator

```sh
python -m benchmarks.measured.score --rows rows.csv  # how each run was trained, and what it took
python -m benchmarks.measured.score mine.csv         # your scores, by source
```

`mine.csv` has the columns `source`, `row` and `predicted_bytes`: bytes of the row's statistic (peak allocated or
reserved), or `oom`. Leave out what your estimator does not take. A pull request puts the file into
`benchmarks/results/measured/predictions`, named after the estimator, and says in its text which version made it, with
which command, and on which hardware; `PYTHONPATH=. python docs/make_leaderboard.py` writes this page. An estimator
that has a commit of this repository as a library, or that was fitted to rows, says so.

Of those above, xMem's, DNNMem's, SchedTune's and LLMem's answers are those that xMem's authors published with their
runs. MemTracker was run on the same workloads (`python -m benchmarks.memtracker`). The others are formulas, written
after their source where the benchmark's source names one (`others` in its `cases.py`).

## Rows

Rows are added by source, not one by one: a folder of all that a source has of one kind, those that look wrong too,
with a licence, a commit, hardware and versions ([how](accuracy.md#add-a-source)). Nobody can fit an estimator to
figures that are not here yet: what is asked for as held-out data is a new source, whose predictions are made before
its rows are read. Its first scores stay in the pull request that adds it.
"""


def percent(score: Mapping[str, Any], name: str) -> str:
    """A figure of a score, in percent; nothing where it has none."""
    return f"{100 * score[name]:.2f}" if name in score else ""


def verdicts(score: Mapping[str, Any]) -> str:
    """How many are right."""
    return f"{score['verdicts']}/{score['asked']}"


def page() -> str:
    """The page's text, from the files that are there."""
    rows, ours = benchmark(), our_answers()
    entries: dict[str, Answers] = {OURS: ours}
    entries |= {path.stem: read_predictions(path, rows) for path in sorted(PREDICTIONS.glob("*.csv"))}
    found = {name: scored(answers, rows) for name, answers in entries.items()}
    scores = {name: of_all(by_source) for name, by_source in found.items()}
    sources = dict.fromkeys(source for source, _ in rows)
    text = HEAD.format(
        figures=sum(case.published_bytes is not None for case in rows.values()),
        verdicts=len(rows),
        sources=len(sources),
    )
    ranked = sorted(found, key=lambda name: scores[name]["median"])
    for name in ranked:
        score, answers = scores[name], entries[name]
        cells = [name, str(len(answers)), str(len(found[name]))]
        cells += [*(percent(score, each) for each in ("median", "p90", "bias")), verdicts(score)]
        if name == OURS:
            cells.append("")
        else:
            same = of_all(scored({key: answer for key, answer in ours.items() if key in answers}, rows))
            cells.append(f"{percent(same, 'median')}, {percent(same, 'p90')}, {verdicts(same)}")
        text += f"| {' | '.join(cells)} |\n"
    text += SOURCES
    for source in sources:
        of_source = {name: of_rows(found[name][source]) for name in ranked if source in found[name]}
        cells = {
            name: f"{percent(score, 'median')} of {score['rows']}" for name, score in of_source.items() if score["rows"]
        }
        others = ", ".join(f"{name} {cell}" for name, cell in cells.items() if name != OURS)
        if cells:
            text += f"| {source} | {cells.get(OURS, '')} | {others} |\n"
    return text + AFTER


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
