"""Scores anybody's predictions against the published figures: `python -m benchmarks.measured.score FILE.csv ...`.

`--rows FILE.csv` writes the benchmark: a row for each published figure, or run of which is known whether it fitted,
with how it was trained. A builder is a function of this repository that makes the model and its batches, and its
arguments are JSON; so is what of the step is not the default of `StepConfig`.

Predictions are a CSV file with the columns `source` and `row`, as the benchmark has them, and `predicted_bytes`: a
number of bytes of the row's statistic, or `oom` for a run that is said to be out of memory. Rows that are left out were
not answered. The file's name is the estimator's. `--rivals FOLDER` writes such files for the estimators whose answers
the sources have.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchfinder.devices import find_gpu
from batchfinder.training.spec import StepConfig
from benchmarks.measured.__main__ import RESULTS, SOURCES, other_estimators
from benchmarks.measured.case import Case
from benchmarks.measured.scores import of_all, of_rows, table

PREDICTIONS = RESULTS / "predictions"
"""A file for each estimator: what the leaderboard is made of, beside batchfinder's own results."""
OURS = "batchfinder"
_OUT_OF_MEMORY = "oom"
_COLUMNS = ("source", "row", "predicted_bytes")

Answers = Mapping[tuple[str, str], int | None]
"""By source and row: bytes, or None for out of memory."""


class Unusable(Exception):
    """A file of predictions that cannot be scored: which, the line, and what was expected."""


def benchmark() -> dict[tuple[str, str], Case]:
    """The published rows, by source and name."""
    return {
        (source, case.name): case
        for source in SOURCES
        for case in importlib.import_module(f"benchmarks.measured.{source}.cases").cases()
    }


def columns_of(source: str, case: Case) -> dict[str, Any]:
    """A row of the benchmark, as it is written for others."""
    usual = asdict(StepConfig())
    step = {name: value for name, value in asdict(case.step).items() if value != usual[name]}
    ran = case.ran or case.published_bytes is not None
    return {
        "source": source,
        "row": case.name,
        "technique": case.technique,
        "gpu": case.gpu,
        "gpu_bytes": case.total_bytes or find_gpu(case.gpu).memory_bytes,
        "statistic": case.statistic,
        "published_bytes": "" if case.published_bytes is None else case.published_bytes,
        "fits": "yes" if ran else "no",
        "batch_size": case.batch_size,
        "seq_len": "" if case.seq_len is None else case.seq_len,
        "builder": case.workload.builder,
        "arguments": json.dumps(case.workload.arguments),
        "step": json.dumps(step),
        "bracket": case.bracket,
    }


def read_predictions(path: Path, rows: Iterable[tuple[str, str]]) -> Answers:
    """What a file says.

    Raises:
        Unusable: it is no such file, or it has a row that the benchmark does not have, or has one twice.
    """
    known = set(rows)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Unusable(f"{path}: {error}") from error
    if not lines or any(column not in lines[0] for column in _COLUMNS):
        raise Unusable(f"{path}: expected the columns {', '.join(_COLUMNS)}, and a line for each row that is answered")
    answers: dict[tuple[str, str], int | None] = {}
    for number, line in enumerate(lines, start=2):
        key, said = (line["source"], line["row"]), (line["predicted_bytes"] or "").strip()
        if key not in known:
            raise Unusable(f"{path}, line {number}: the benchmark has no row {key[1]!r} of {key[0]!r}; see --rows")
        if key in answers:
            raise Unusable(f"{path}, line {number}: row {key[1]!r} of {key[0]!r} is there twice")
        if said != _OUT_OF_MEMORY and not re.fullmatch(r"[1-9]\d*", said):
            raise Unusable(f"{path}, line {number}: expected a number of bytes or {_OUT_OF_MEMORY}, not {said!r}")
        answers[key] = None if said == _OUT_OF_MEMORY else int(said)
    return answers


def write_predictions(path: Path, answers: Answers) -> None:
    """Write a file that `read_predictions` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for (source, row), predicted in answers.items():
            writer.writerow([source, row, _OUT_OF_MEMORY if predicted is None else predicted])


def _results(source: str) -> list[dict[str, Any]]:
    """The rows of a source's committed result; empty where it has no result."""
    path = RESULTS / f"{source}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


def our_answers() -> dict[tuple[str, str], int | None]:
    """What batchfinder's committed results say."""
    found: dict[tuple[str, str], int | None] = {}
    for source in SOURCES:
        found |= {(source, row["name"]): row["predicted_bytes"] for row in _results(source) if "predicted_bytes" in row}
    return found


def scored(answers: Answers, rows: Mapping[tuple[str, str], Case]) -> dict[str, list[dict[str, Any]]]:
    """The answered rows of each source, as `scores.of_rows` and `of_all` take them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for (source, name), case in rows.items():
        if (source, name) not in answers:
            continue
        predicted, published = answers[source, name], case.published_bytes
        row: dict[str, Any] = {"name": name, "published_bytes": published, "predicted_bytes": predicted}
        if case.ran:
            row["ran"] = True
        if case.bracket:
            row["bracket"] = case.bracket
        if predicted is not None and published is not None:
            row["error"] = predicted / published - 1
        found.setdefault(source, []).append(row)
    return found


def rivals() -> dict[str, dict[tuple[str, str], int | None]]:
    """What other estimators say of the rows, by their names, where the sources have it."""
    found: dict[str, dict[tuple[str, str], int | None]] = {}
    for source in SOURCES:
        for name, answers in other_estimators(source, _results(source)).items():
            theirs = found.setdefault(name, {})
            theirs |= {(source, answer["name"]): answer["predicted_bytes"] for answer in answers}
    return found


def main() -> int:
    """Write what was asked for, or print the scores of each file by source, with batchfinder's of the same rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="*", type=Path, help="predictions, as CSV")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write the benchmark's rows")
    parser.add_argument("--rivals", type=Path, metavar="FOLDER", help="write the answers that the sources have")
    arguments = parser.parse_args()
    if not (arguments.file or arguments.rows or arguments.rivals):
        parser.error("a file of predictions, --rows or --rivals is wanted")
    rows = benchmark()
    if arguments.rows:
        lines = [columns_of(source, case) for (source, _), case in rows.items()]
        with arguments.rows.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, lines[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    if arguments.rivals:
        arguments.rivals.mkdir(parents=True, exist_ok=True)
        for name, answers in rivals().items():
            write_predictions(arguments.rivals / f"{name}.csv", answers)
    ours = our_answers()
    for path in arguments.file:
        try:
            answers = read_predictions(path, rows)
        except Unusable as error:
            print(error, file=sys.stderr)
            return 1
        by_source = scored(answers, rows)
        same = scored({key: answer for key, answer in ours.items() if key in answers}, rows)
        print(f"{path.stem}: {len(answers)} of {len(rows)} rows, of {len(by_source)} of {len(SOURCES)} sources\n")
        scores = {source: of_rows(found) for source, found in by_source.items()}
        print(table({**scores, "all sources alike": of_all(by_source), f"{OURS} on these": of_all(same)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
