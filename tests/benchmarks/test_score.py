"""Scores of anybody's predictions of the published figures."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks.measured.score import (
    PREDICTIONS,
    Unusable,
    benchmark,
    main,
    our_answers,
    read_predictions,
    rivals,
    scored,
    write_predictions,
)
from benchmarks.measured.scores import of_all, of_rows

ROWS = benchmark()
FIGURE = next(key for key, case in ROWS.items() if case.published_bytes is not None)
FAILED = next(key for key, case in ROWS.items() if case.published_bytes is None and not case.ran)


def test_the_published_figures_score_nothing_off(tmp_path: Path) -> None:
    """And each wrong one what it is off by; a number of bytes for a run that was out of memory is a wrong verdict."""
    published = {
        key: case.published_bytes for key, case in ROWS.items() if case.published_bytes is not None or not case.ran
    }
    path = tmp_path / "oracle.csv"
    write_predictions(path, published)
    perfect = of_all(scored(read_predictions(path, ROWS), ROWS))
    assert (perfect["median"], perfect["worst"], perfect["bias"]) == (0, 0, 0)
    assert perfect["verdicts"] == perfect["asked"] == len(published)
    figure = published[FIGURE]
    assert figure is not None
    (off,) = scored({FIGURE: 2 * figure}, ROWS).values()
    assert (of_rows(off)["median"], of_rows(off)["verdicts"]) == (1, 1)
    (wrong,) = scored({FAILED: 1 << 30}, ROWS).values()
    assert (of_rows(wrong)["rows"], of_rows(wrong)["verdicts"], of_rows(wrong)["asked"]) == (0, 0, 1)
    (right,) = scored({FAILED: None}, ROWS).values()
    assert of_rows(right)["verdicts"] == 1


def test_our_own_scores_are_those_of_the_results() -> None:
    """A row that was not answered counts for nothing."""
    ours = of_all(scored(our_answers(), ROWS))
    whole = {path.stem: json.loads(path.read_text())["rows"] for path in PREDICTIONS.parent.glob("*.json")}
    for name in ("rows", "median", "p90", "bias", "verdicts", "asked", "hit", "brackets"):
        assert ours[name] == pytest.approx(of_all(whole)[name]), name


def test_the_files_of_the_leaderboard_are_what_the_sources_have() -> None:
    """Each is what `--rivals` writes."""
    assert {path.stem: read_predictions(path, ROWS) for path in PREDICTIONS.glob("*.csv")} == rivals()
    assert len(rivals()) >= 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected the columns source, row, predicted_bytes, and a line for each row"),
        ("source,row,bytes\nx,y,1\n", "expected the columns source, row, predicted_bytes"),
        ("source,row,predicted_bytes\nfms,no such row,1\n", "line 2: the benchmark has no row 'no such row' of 'fms'"),
        ("source,row,predicted_bytes\n{key},1\n{key},2\n", "line 3: .* is there twice"),
        ("source,row,predicted_bytes\n{key},1.5e9\n", "line 2: expected a number of bytes or oom, not '1.5e9'"),
        ("source,row,predicted_bytes\n{key},\n", "line 2: expected a number of bytes or oom, not ''"),
    ],
)
def test_a_file_that_cannot_be_scored(tmp_path: Path, text: str, said: str) -> None:
    """It is said which, the line, and what was expected."""
    path = tmp_path / "mine.csv"
    path.write_text(text.replace("{key}", f'{FIGURE[0]},"{FIGURE[1]}"'))
    with pytest.raises(Unusable, match=f"mine.csv.*{said}"):
        read_predictions(path, ROWS)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows are written with all that a run is known by, and predictions made of them are scored; errors end it."""

    def run(*words: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["score", *map(str, words)])
        return main()

    assert run("--rows", tmp_path / "rows.csv") == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ROWS)
    assert {row["fits"] for row in rows} == {"yes", "no"}
    assert all(json.loads(row["arguments"]) is not None and row["builder"].count(":") == 1 for row in rows)
    mine = {(row["source"], row["row"]): int(row["published_bytes"]) for row in rows if row["published_bytes"]}
    write_predictions(tmp_path / "mine.csv", mine)
    assert run(tmp_path / "mine.csv") == 0
    out = capsys.readouterr().out
    assert f"mine: {len(mine)} of {len(rows)} rows" in out
    assert "batchfinder on these" in out
    (tmp_path / "mine.csv").write_text("nothing")
    assert run(tmp_path / "mine.csv") == 1
    failed = capsys.readouterr()
    assert (failed.out, failed.err.count("\n")) == ("", 1)
