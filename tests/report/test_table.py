"""A sheet on terminals of any width, in a pipe and as Markdown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from batchfinder.report.made_by import made_by_words
from batchfinder.report.table import Table

SHEET = Table(
    title="Largest batch",
    details=("fp32",),
    columns={
        "model": ["bert-base", "my_package.my_module:a_factory_with_a_long_name"],
        "GPU": ["Titan X Pascal", "p3.16xlarge: 8 x V100 16GB"],
        "seq len": ["64", "512"],
        "max batch": ["269", "0"],
        "peak reserved": ["11.62 GiB", "1 needs 20.11 GiB"],
        "micro-batch x accumulation": ["128 x 2 = 256", "-"],
        "source": ["simulated", "simulated"],
    },
    notes=("left out: " + "words " * 30,),
)
ESCAPE = "\x1b"


def printed(width: int, **options: object) -> str:
    """What a terminal of this width shows."""
    file = io.StringIO()
    Console(file=file, width=width, **options).print(SHEET)  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_figure_is_whole_on_a_terminal(width: int) -> None:
    """From 80 columns on, no line is wider than the terminal and no figure is cut or broken."""
    lines = printed(width).splitlines()
    assert max(map(len, lines)) <= width
    for heading, cells in SHEET.columns.items():
        for cell in cells:
            folded = heading in ("model", "GPU")
            assert folded or any(cell in line for line in lines), cell
    assert "…" not in "".join(lines)


def test_long_names_are_folded_and_whole() -> None:
    """A name that is too long goes on in the next line, with every letter."""
    lines = [line[:20] for line in printed(80).splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("my_pack"))
    name = "".join(line.split("  ")[0].strip() for line in lines[start:])
    assert name.startswith("my_package.my_module:a_factory_with_a_long_name")


def test_notes_hang() -> None:
    """A note that is too long goes on further in."""
    lines = printed(80).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("left out: "))
    assert len(lines) > start + 1
    assert all(line.startswith("  words") for line in lines[start + 1 :])


def test_colours_are_left_out_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NO_COLOR nothing is coloured."""
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = [f"{ESCAPE}[{code}" for code in range(30, 50)]
    assert not any(code in printed(100, force_terminal=True) for code in coloured)


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stdout is no terminal every row is one line, as wide as it needs to be, whatever the environment says."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    SHEET.show()
    out = capsys.readouterr().out
    assert ESCAPE not in out
    lines = out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[:3] == ["Largest batch", "fp32", ""]
    assert len(lines) == 9
    assert " ".join(lines[6].split()) == (
        "my_package.my_module:a_factory_with_a_long_name p3.16xlarge: 8 x V100 16GB 512 0 1 needs 20.11 GiB - simulated"
    )


def test_cells_that_come_with_spaces_stay_in_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of which some have more behind them stand below each other."""
    cells = ["  4             ", "133 (131 to 133)", " 16             "]
    Table("Title", (), {"model": ["a", "b", "c"], "max batch": cells, "published": ["1", "2", "3"]}).show()
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line[7:-1].rstrip() for line in lines] == [cell.rstrip() for cell in cells]


def test_markdown() -> None:
    """Markdown has the same title, details, cells and notes, and what made it; a bar in a cell does not end it."""
    sheet = Table("Title", ("details",), {"model": ["a|b"], "max batch": ["7"]}, ("a note", "another"))
    assert sheet.to_markdown() == (
        "**Title**\n\ndetails\n\n| model | max batch |\n| --- | ---: |\n| a\\|b | 7 |\n\n- a note\n- another\n"
        f"- {made_by_words()}\n"
    )
    assert made_by_words() not in sheet.to_markdown(is_last=False)


def test_html() -> None:
    """The same for a notebook, aligned as on a terminal; what looks like a tag is text."""
    sheet = Table("A <b>", ("x & y",), {"model": ["<i>"], "max batch": ["7"]}, ("a <note>",))
    left, right = 'style="text-align: left"', 'style="text-align: right"'
    assert sheet.to_html() == (
        f"<p><b>A &lt;b&gt;</b><br>x &amp; y</p><table><thead><tr><th {left}>model</th><th {right}>max batch</th></tr>"
        f"</thead><tbody><tr><td {left}>&lt;i&gt;</td><td {right}>7</td></tr></tbody></table><p>a &lt;note&gt;</p>"
    )


def test_words_are_not_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets, as in a path, are printed as they are."""
    Table("[bold]title", (), {"model": ["[red]model"]}, ("[/] note",)).show()
    assert capsys.readouterr().out.splitlines() == [
        "[bold]title",
        "",
        "model",
        "──────────",
        "[red]model",
        "",
        "[/] note",
    ]
