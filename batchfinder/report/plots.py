"""Every picture. matplotlib is loaded for the first one, and used without pyplot, so that nothing global changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.memory_use.breakdown import NAMES, OverTime
from batchfinder.report.estimate import EstimateFindings
from batchfinder.report.sweep import SweepRow
from batchfinder.units import GIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
"""Eight colours that colour-blind readers can tell apart: Okabe and Ito, https://jfly.uni-koeln.de/color/."""

GREY = "#8c8c8c"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Cycled with the colours, so that lines can be told apart in black and white."""

_ENDINGS = (".png", ".svg")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.hashsalt": "batchfinder",
    "svg.fonttype": "none",
}


def check_picture(option: str, path: str) -> None:
    """Check before the work that a picture can be drawn.

    Raises:
        InvalidValue: it is not a file that ends in .png or .svg.
        MissingExtra: matplotlib is not installed, or cannot be imported.
    """
    if Path(path).suffix.lower() not in _ENDINGS:
        raise InvalidValue(option, path, "a file that ends in .png or .svg, in a folder that exists")
    try:
        import matplotlib.figure  # noqa: F401
    except Exception as error:  # a package that is half there, or built for another NumPy, fails in many ways
        reason = "" if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib" else str(error)
        raise MissingExtra("matplotlib", "plot", "drawing", reason) from error


@contextmanager
def drawn(option: str, path: str, columns: int = 1, width: float = 9.0, height: float = 5.0) -> Iterator[list[Axes]]:
    """Axes side by side to draw on, in all so many inches wide and high; they are written to a file at the end.

    Raises:
        InvalidValue: it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        # No date in an SVG: the same figures make the same file.
        metadata = {"Date": None} if path.lower().endswith(".svg") else None
        try:
            figure.savefig(path, dpi=150, metadata=metadata)
        except OSError as error:
            raise InvalidValue(option, path, f"a file that can be written ({error.strerror})") from error


COLOUR_OF = dict(zip(NAMES, (*COLOURS, GREY, "#bfbfbf"), strict=True))
_LIGHT = ("gradients", "temporary", "workspace", "fragmentation", "context")
_LEAST_SHARE = 0.06
"""Of the longest bar: a part that is shorter has no room for its figure."""


def draw_estimate(found: EstimateFindings, path: str) -> None:
    """Draw a bar for one GPU alone, and one for each way that several can share the work."""
    bars = {"one GPU": found.estimate, **found.strategies}
    capacity = found.estimate.capacity_bytes
    longest = max(capacity, *(bar.peak_bytes for bar in bars.values()))
    with drawn("--plot", path, width=10.0, height=2.6 + 0.5 * len(bars)) as (axes,):
        for place, bar in enumerate(bars.values()):
            start = 0
            for kind, size in bar.kinds.shown().items():
                axes.barh(place, size / GIB, left=start / GIB, color=COLOUR_OF[kind], height=0.6)
                if size > _LEAST_SHARE * longest:
                    middle = (start + size / 2) / GIB
                    ink = "black" if kind in _LIGHT else "white"
                    # Opaque, so that the card's line passes behind it.
                    box = {"facecolor": COLOUR_OF[kind], "edgecolor": "none", "pad": 1}
                    figure = f"{size / GIB:.2f}"
                    axes.text(middle, place, figure, ha="center", va="center", color=ink, fontsize=9, bbox=box)
                start += size
            axes.text((start + 0.01 * longest) / GIB, place, format_bytes(start), va="center", weight="bold")
        axes.axvline(capacity / GIB, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"{found.request.card.name}, {format_bytes(capacity)}" + (" each" if found.request.card.count > 1 else ""),
            (capacity / GIB, 1.0),
            (0, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if capacity > 0.5 * longest else "left",
            va="bottom",
        )
        axes.set_yticks(range(len(bars)), list(bars))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.14 * longest / GIB)
        axes.set_xlabel("GiB on each GPU at the peak")
        trace, asked = found.estimate.trace, found.request
        length = "" if trace.seq_len is None else f", sequence length {trace.seq_len}"
        title = f"{asked.model} at batch size {trace.batch_size}{length}, {asked.options.precision}, simulated"
        axes.set_title(title, loc="left", pad=18)
        shown = [kind for kind in NAMES if any(bar.kinds.shown().get(kind) for bar in bars.values())]
        handles = [axes.barh(0, 0, color=COLOUR_OF[kind], label=NAMES[kind]) for kind in shown]
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=5)


_LETTER = 0.0095
"""The width of a letter in the picture's: a stage with no room for its name gets none."""


def draw_profile(memory: OverTime, usable_bytes: int, title: str, path: str) -> None:
    """Draw what tensors hold after each event, with stages marked and the peak labelled.

    Args:
        usable_bytes: what the card has for them; drawn where it is near.
    """
    with drawn("--plot", path, width=11.0, height=5.5) as (axes,):
        count = max(map(len, memory.by_kind.values()), default=0)
        axes.stackplot(
            range(count),
            [[size / GIB for size in sizes] for sizes in memory.by_kind.values()],
            labels=[NAMES[kind] for kind in memory.by_kind],
            colors=[COLOUR_OF[kind] for kind in memory.by_kind],
            step="post",
        )
        top = memory.peak_bytes / GIB
        limit = usable_bytes / GIB
        if limit < 1.6 * top:
            axes.axhline(limit, color="black", linestyle="--", linewidth=1)
            words = f"usable {format_bytes(usable_bytes)}"
            axes.annotate(words, (count, limit), (0, 3), textcoords="offset points", ha="right")
        axes.plot([memory.peak], [top], marker="v", color="black", markersize=7, clip_on=False)
        side = "left" if memory.peak < 0.5 * count else "right"
        axes.annotate(
            f"peak {format_bytes(memory.peak_bytes)}",
            (memory.peak, top),
            (8 if side == "left" else -8, 4),
            textcoords="offset points",
            ha=side,
            weight="bold",
        )
        axes.set_xlim(0, count)
        axes.set_ylim(0, 1.12 * max(top, limit if limit < 1.6 * top else 0))
        # Above the axes: the stages that have room for their name, and over them the steps.
        above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 9}
        ends = [*(mark.position for mark in memory.marks[1:]), count]
        for mark, end in zip(memory.marks, ends, strict=True):
            axes.axvline(mark.position, color="white", linewidth=0.6)
            if end - mark.position >= _LETTER * len(mark.stage) * count:
                axes.annotate(mark.stage, ((mark.position + end) / 2, 1.0), (0, 4), ha="center", **above)
        starts = {mark.step: mark.position for mark in reversed(memory.marks) if mark.step >= 0}
        for (step, start), (_, end) in pairwise([*sorted(starts.items()), (-1, count)]):
            axes.annotate(f"step {step}", ((start + end) / 2, 1.0), (0, 18), ha="center", weight="bold", **above)
        axes.set_xticks([])
        axes.set_xlabel("allocations and releases, in order")
        axes.set_ylabel("GiB in tensors")
        axes.set_title(title, loc="left", pad=34)
        # In the order in which the areas lie on each other.
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))


_NAME_WIDTH = 0.025
"""Of the picture's width: what a sequence length takes beside a curve."""


def draw_sweep(rows: Sequence[SweepRow], title: str, path: str) -> None:
    """Draw the largest batch over the length, and memory over the batch size; a series is one model on one GPU.

    Where sizes were timed, samples per second over the batch size as well, each with its spread.
    """
    series: dict[tuple[str, str], list[SweepRow]] = {}
    for row in rows:
        series.setdefault((row.cell.model, row.cell.card.name), []).append(row)
    several = len({gpu for _, gpu in series}) > 1
    timed = any(row.throughput is not None for row in rows)
    with drawn("--plot", path, columns=2 + timed, width=12.0 + 6.0 * timed, height=5.2) as (sizes, memory, *speeds):
        for axes in speeds:
            _draw_speed(axes, rows)
        for ((model, gpu), found), colour, marker in zip(series.items(), cycle(COLOURS[:6]), cycle(MARKERS)):
            # The series' largest batches, and the published ones beside them.
            label = f"{model}, {gpu}" if several else model
            look: dict[str, Any] = {"color": colour, "marker": marker}
            fits = [row for row in found if row.result.max_batch_size]
            places = [row.cell.seq_len or 1 for row in fits]
            sizes.plot(places, [row.result.max_batch_size for row in fits], **look, label=label)
            if published := {row.cell.seq_len or 1: row.cell.published for row in fits if row.cell.published}:
                dotted = {**look, "linestyle": ":", "markerfacecolor": "white"}
                sizes.plot(list(published), list(published.values()), **dotted, label=f"{label}, published")
            for row in found:
                if points := _points(row):
                    tried, peaks = zip(*points, strict=True)
                    memory.plot(tried, [peak / GIB for peak in peaks], color=colour, linewidth=1.2)
                if row.at_max is not None and row.at_max.peak_reserved_bytes is not None:
                    peak = row.at_max.peak_reserved_bytes / GIB
                    memory.plot([row.result.max_batch_size], [peak], color=colour, marker=marker, linestyle="none")
        limits = {row.cell.card.name: row.cell.card.device.usable_bytes - row.cell.headroom_bytes for row in rows}
        for gpu, limit in limits.items():
            memory.axhline(limit / GIB, color=GREY, linestyle="--", linewidth=1)
            words, place = f"{gpu}: {format_bytes(limit)}", ("axes fraction", "data")
            memory.annotate(words, (0.01, limit / GIB), (0, 3), xycoords=place, textcoords="offset points", fontsize=9)
        # Each curve's sequence length at its upper end, where there is room between its neighbours' names. On the GPU
        # with the most memory: the others' curves end earlier, on nearly the same lines.
        named = max(rows, key=lambda row: row.cell.card.device.usable_bytes).cell.card.name
        upper_ends = sorted(
            (points[-1], row.cell.seq_len)
            for row in rows
            if (points := _points(row)) and row.cell.seq_len and row.cell.card.name == named
        )
        drawn_sizes = [size for row in rows for size, _ in _points(row)]
        least = _NAME_WIDTH * math.log2(max(drawn_sizes, default=1) / min(drawn_sizes, default=1) or 1)
        last = -math.inf
        for (size, peak), seq_len in upper_ends:
            if math.log2(size) - last < least:
                continue
            last = math.log2(size)
            style: dict[str, Any] = {"fontsize": 8, "rotation": 90, "ha": "center", "va": "bottom"}
            memory.annotate(str(seq_len), (size, peak / GIB), (0, 3), textcoords="offset points", **style)
        sizes.set_yscale("log", base=2)
        sizes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
        if lengths := sorted({row.cell.seq_len for row in rows if row.cell.seq_len is not None}):
            sizes.set_xscale("log", base=2)
            sizes.set_xticks(lengths, [str(length) for length in lengths])
            sizes.minorticks_off()
            sizes.set_xlabel("sequence length")
        else:
            sizes.set_xticks([])
        sizes.set_ylabel("largest batch")
        sizes.set_title("largest batch over sequence length" if lengths else "largest batch", loc="left")
        memory.set_xscale("log", base=2)
        memory.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
        memory.set_ylim(0, 1.13 * memory.get_ylim()[1])
        memory.set_xlabel("batch size")
        memory.set_ylabel("peak reserved, GiB")
        by_length = ", by sequence length" if len({row.cell.seq_len for row in rows}) > 1 else ""
        memory.set_title(f"memory over batch size{by_length}", loc="left")
        if memory.figure is not None:
            memory.figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        sizes.legend(loc="best")


def _draw_speed(axes: Axes, rows: Sequence[SweepRow]) -> None:
    """Samples per second over the batch size, with the smallest size at full speed marked where it can be told."""
    for row, colour, marker in zip(rows, cycle(COLOURS[:6]), cycle(MARKERS)):
        found = row.throughput
        if found is None:
            continue
        sizes = [rate.batch_size for rate in found.rates]
        speed = [rate.samples_per_second for rate in found.rates]
        errors = [rate.samples_per_second * rate.spread for rate in found.rates]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "capsize": 2, "linewidth": 1.2}
        label = row.cell.where if found.certain else f"{row.cell.where}, cannot tell"
        axes.errorbar(sizes, speed, errors, **look, label=label)
        if found.certain:
            at = found.batch_size, found.rate(found.batch_size).samples_per_second
            axes.plot(*at, marker="o", markersize=11, markerfacecolor="none", color=colour)
            axes.annotate(str(at[0]), at, (0, 10), textcoords="offset points", ha="center", weight="bold")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlabel("batch size")
    axes.set_ylabel("samples per second")
    axes.set_title("speed over batch size, full speed circled", loc="left")
    axes.legend(loc="best")


def _points(row: SweepRow) -> list[tuple[int, int]]:
    """(batch size, peak reserved bytes): the curve, or without one the sizes that ran."""
    tried = {trial.batch_size: trial.measurement.peak_reserved_bytes for trial in row.result.trials if trial.fits}
    return list(row.curve) or [(size, peak) for size, peak in sorted(tried.items()) if peak is not None]
