"""Pictures: their words do not lie on each other, and say what they should."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from batchfinder.cli.main import main
from batchfinder.devices import Card, Device
from batchfinder.memory_use.breakdown import bytes_over_time, estimate
from batchfinder.memory_use.sharding import buckets_of
from batchfinder.report.estimate import EstimateFindings, EstimateRequest
from batchfinder.report.plots import COLOUR_OF, draw_estimate, draw_profile, draw_sweep
from batchfinder.report.sweep import SweepRow
from batchfinder.results import Rate, Throughput
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure, add_blocks
from batchfinder.training.spec import StepOptions
from batchfinder.units import GIB
from tests.report.test_sweep import T4, V100, row

TITLE = "bert at batch size 8 on Titan X Pascal, simulated"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved, as it is saved."""
    saved: list[Any] = []
    save = Figure.savefig

    def note(figure: Any, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", note)
    return saved


def _trace() -> Trace:
    """A model of 4 GiB, activations of 2 GiB in two steps, gradients, and a temporary tensor at the peak."""
    kinds = ("parameter", "activation", "temporary", "gradient", "optimizer", "activation", "temporary")
    sizes = (4 * GIB, 2 * GIB, GIB, 4 * GIB, 8 * GIB, 2 * GIB, GIB)
    order = (0, 1, 2, ~2, 3, ~1, 4, 5, 6, ~6, ~5)
    marks = [(0, -1, "model"), (1, 0, "forward"), (2, 0, "backward"), (6, 0, "optimizer"), (7, 1, "forward")]
    names = tuple("abcdefg")
    structure = TraceStructure(
        order, tuple(StageMark(*mark) for mark in [*marks, (8, 1, "backward")]), names, names, kinds
    )
    return Trace(8, 128, structure, sizes)


def _rows() -> list[SweepRow]:
    rows = []
    for model, card, base in itertools.product(("gpt2", "gpt2-medium"), (V100, T4), (1,)):
        for seq_len in (64, 128, 256, 320, 384, 512):
            size = 8192 // seq_len // (1 + 2 * (model != "gpt2"))
            curve = tuple((each, base * GIB + each * seq_len * 1_700_000) for each in (2, size // 2, size, size + 3))
            rows.append(replace(row(size, model=model, seq_len=seq_len, card=card), curve=curve))
    rows[0] = replace(rows[0], cell=replace(rows[0].cell, published=64))
    rows[-1] = replace(rows[-1], result=replace(rows[-1].result, max_batch_size=0))
    return rows


def _words(figure: Any) -> list[tuple[str, Any]]:
    """The words that are drawn, each with its place; an axis also has words beyond its ends, which are not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg

    drawn: list[Any] = []
    draw_text = RendererAgg.draw_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RendererAgg,
            "draw_text",
            lambda *args, **more: (drawn.append(more.get("mtext")), draw_text(*args, **more))[1],
        )
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in drawn]


def _assert_legible(figure: Any) -> set[str]:
    """No two words on each other, none outside the picture; returns the words."""
    words = _words(figure)
    width, height = figure.canvas.get_width_height()
    for text, box in words:
        assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= width, box.y1 <= height) == (True,) * 4, text
    for (one, first), (two, second) in itertools.combinations(words, 2):
        assert not first.overlaps(second), f"{one!r} lies on {two!r}"
    return {text for text, _ in words}


def test_a_profile(figures: list[Any], tmp_path: Path) -> None:
    """It names steps, stages, kinds, the peak and the limit; its areas sum to what is alive."""
    memory = bytes_over_time(_trace())
    assert {kind: sizes[8] // GIB for kind, sizes in memory.by_kind.items()} == {
        "parameters": 4, "gradients": 4, "optimizer": 8, "activations": 2, "temporary": 1,
    }  # fmt: skip
    assert (memory.peak, memory.peak_bytes) == (8, 19 * GIB)
    draw_profile(memory, 20 * GIB, TITLE, str(tmp_path / "profile.png"))
    words = _assert_legible(figures[0])
    assert {TITLE, "peak 19.00 GiB", "usable 20.00 GiB", "step 0", "step 1", "optimizer state", "gradients"} <= words
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_an_estimate(figures: list[Any], tmp_path: Path) -> None:
    """It has a bar for each strategy, with all kinds in it, as long as the peak."""
    memory = DeviceMemory(20 * GIB, 20 * GIB)
    alone = estimate(_trace(), memory, GIB)
    spread = {"DDP": add_blocks(_trace(), buckets_of(_trace())), "ZeRO-1": _trace(), "ZeRO-2": _trace()}
    strategies = {name: estimate(trace, memory, GIB) for name, trace in spread.items()}
    card = Card(Device("V100 16GB", 21 * GIB, 20 * GIB, (7, 0)), "p3.8xlarge: 4 x V100 16GB", 4)
    request = EstimateRequest("bert", 8, 128, card, StepOptions(), 1, AllocatorSettings())
    found = EstimateFindings(request, alone, strategies)
    draw_estimate(found, str(tmp_path / "estimate.svg"))
    words = _assert_legible(figures[0])
    assert {"one GPU", "DDP", "ZeRO-2", "20.00 GiB", "p3.8xlarge: 4 x V100 16GB, 21.00 GiB each"} <= words
    (axes,) = figures[0].axes
    longest = max(patch.get_x() + patch.get_width() for patch in axes.patches)
    assert longest == pytest.approx(max(one.peak_bytes for one in (alone, *strategies.values())) / GIB)
    assert "ZeRO-1" in (tmp_path / "estimate.svg").read_text()


def test_a_sweep(figures: list[Any], tmp_path: Path) -> None:
    """Both axes of the first picture are logarithmic, lines join the answers, and limits are drawn in the second."""
    draw_sweep(_rows(), "Largest training batch, simulated", str(tmp_path / "sweep.png"))
    words = _assert_legible(figures[0])
    assert {"gpt2, V100", "gpt2-medium, T4", "V100: 15.00 GiB", "T4: 14.00 GiB", "512"} <= words
    sizes, memory = figures[0].axes
    assert (sizes.get_xscale(), sizes.get_yscale(), memory.get_xscale()) == ("log", "log", "log")
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in sizes.get_lines()}
    assert lines["gpt2, V100"] == [(64, 128), (128, 64), (256, 32), (320, 25), (384, 21), (512, 16)]
    assert lines["gpt2, V100, published"] == [(64, 64)]
    assert len(lines["gpt2-medium, T4"]) == 5  # the last one fits nothing


def test_speeds_have_a_picture_of_their_own(figures: list[Any], tmp_path: Path) -> None:
    """Where sizes were timed: a curve with its spread, the size at full speed named, or that it cannot be told."""
    rates = (Rate(8, 100.0, 0.02), Rate(16, 198.0, 0.01), Rate(32, 200.0, 0.01))
    speeds = Throughput(16, 32, rates, True, 5, 0.005), Throughput(32, 32, rates, False, 15, 0.05)
    rows = [replace(found, throughput=speed) for found, speed in zip(_rows(), speeds, strict=False)]
    draw_sweep([*rows, *_rows()[2:]], "Largest training batch, measured", str(tmp_path / "sweep.png"))
    assert {"gpt2 at 64", "gpt2 at 128, cannot tell", "16", "samples per second"} <= _assert_legible(figures[0])
    speed = figures[0].axes[2]
    assert [container.has_yerr for container in speed.containers] == [True, True]
    assert list(speed.containers[0].lines[0].get_ydata()) == [100.0, 198.0, 200.0]


def test_models_of_one_shape(figures: list[Any], tmp_path: Path) -> None:
    """Without a sequence length there is a point for each model."""
    cells = [replace(found.cell, seq_len=None, model=f"model {number}") for number, found in enumerate(_rows()[:3])]
    rows = [replace(found, cell=cell) for found, cell in zip(_rows(), cells, strict=False)]
    draw_sweep(rows, "Largest training batch, simulated", str(tmp_path / "sweep.svg"))
    assert {"model 0", "model 1", "model 2", "largest batch"} <= _assert_legible(figures[0])


def test_the_same_figures_make_the_same_file(tmp_path: Path) -> None:
    """Also on another day: an SVG has no date in it."""
    for name in ("one.svg", "two.svg"):
        draw_profile(bytes_over_time(_trace()), 20 * GIB, TITLE, str(tmp_path / name))
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_colours_can_be_told_apart() -> None:
    """Every kind has one of its own."""
    assert len(set(COLOUR_OF.values())) == len(COLOUR_OF)


@pytest.mark.parametrize("verb", ["sweep", "profile", "estimate"])
def test_mistakes_are_told_before_anything_is_built(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is no picture, a folder that is not there, and matplotlib missing."""
    picture = "expected a file that ends in .png or .svg, in a folder that exists."
    missing = "expected a file in a folder that exists."
    mistakes = {"step.jpeg": picture, str(tmp_path): picture, "no/such/step.png": missing}
    for path, expected in mistakes.items():
        assert main([verb, "--plot", path]) == 1
        assert capsys.readouterr().err == f"batchfinder: --plot: invalid value {path!r}; {expected}\n"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([verb, "--plot", str(tmp_path / "step.png")]) == 1
    assert capsys.readouterr().err == (
        "batchfinder: drawing needs matplotlib, which is not installed. "
        "Install it with: pip install matplotlib (or batchfinder with its extra: torch-batchfinder[plot])\n"
    )


def test_a_matplotlib_that_does_not_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before the work, in its own words."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "matplotlib.py").write_text("raise ImportError('numpy.core.multiarray failed to import')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["sweep", "--plot", str(tmp_path / "sweep.png")]) == 1
    assert capsys.readouterr() == (
        "",
        "batchfinder: drawing needs matplotlib, which cannot be imported: numpy.core.multiarray failed to import. "
        "Install it with: pip install matplotlib (or batchfinder with its extra: torch-batchfinder[plot])\n",
    )
