"""A sweep as a picture: the largest batch over the sequence length, and the memory over the batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from batchfinder.report.drawing import COLOURS, GREY, MARKERS, drawn
from batchfinder.report.rows import SweepRow
from batchfinder.units import GIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = tuple[str, str]
"""A model's name and a GPU's."""

_NAME_WIDTH = 0.025
"""Of the picture's width: what a sequence length takes beside a curve."""


def draw_sweep(rows: Sequence[SweepRow], title: str, path: str) -> None:
    """Draw both, side by side; a series is one model on one GPU.

    Args:
        rows: of the sweep, at least one.
        title: stands above the picture.
        path: ends in .png or .svg.
    """
    series: dict[Series, list[SweepRow]] = {}
    for row in rows:
        series.setdefault((row.model, row.gpu), []).append(row)
    looks = dict(zip(series, zip(cycle(COLOURS[:6]), cycle(MARKERS)), strict=False))
    several = len({gpu for _, gpu in series}) > 1
    with drawn("--plot", path, columns=2, width=12.0, height=5.2) as (sizes, memory):
        for name, (colour, marker) in looks.items():
            label = f"{name[0]}, {name[1]}" if several else name[0]
            _sizes(sizes, series[name], colour, marker, label)
            _memory(memory, series[name], colour, marker)
        _limits(memory, rows)
        _name_lengths(memory, rows)
        lengths = sorted({row.seq_len for row in rows if row.seq_len is not None})
        _frame_sizes(sizes, lengths)
        memory.set_xscale("log", base=2)
        memory.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
        memory.set_ylim(0, 1.13 * memory.get_ylim()[1])
        memory.set_xlabel("batch size")
        memory.set_ylabel("peak reserved, GiB")
        several_lengths = len({row.seq_len for row in rows}) > 1
        memory.set_title("memory over batch size" + (", by sequence length" if several_lengths else ""), loc="left")
        if memory.figure is not None:
            memory.figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        sizes.legend(loc="best")


def _sizes(axes: Axes, rows: list[SweepRow], colour: str, marker: str, label: str) -> None:
    fits = [row for row in rows if row.max_batch_size]
    places = [row.seq_len or 1 for row in fits]
    axes.plot(places, [row.max_batch_size for row in fits], color=colour, marker=marker, label=label)
    published = {row.seq_len or 1: row.published for row in fits if row.published}
    if published:
        axes.plot(
            list(published),
            list(published.values()),
            color=colour,
            marker=marker,
            linestyle=":",
            markerfacecolor="white",
            label=f"{label}, published",
        )


def _memory(axes: Axes, rows: list[SweepRow], colour: str, marker: str) -> None:
    for row in rows:
        if row.curve:
            sizes, peaks = zip(*row.curve, strict=True)
            axes.plot(sizes, [peak / GIB for peak in peaks], color=colour, linewidth=1.2)
        if row.max_batch_size and row.peak_reserved_bytes is not None:
            peak = row.peak_reserved_bytes / GIB
            axes.plot([row.max_batch_size], [peak], color=colour, marker=marker, linestyle="none")


def _name_lengths(axes: Axes, rows: Sequence[SweepRow]) -> None:
    """Write each curve's sequence length at its upper end, where there is room between its neighbours' names."""
    # On the GPU with the most memory: the others' curves end earlier, on nearly the same lines.
    named = max(rows, key=lambda row: row.budget_bytes).gpu
    ends = sorted((row.curve[-1], row.seq_len) for row in rows if row.curve and row.seq_len and row.gpu == named)
    sizes = [size for row in rows for size, _ in row.curve]
    least = _NAME_WIDTH * math.log2(max(sizes, default=1) / min(sizes, default=1) or 1)
    last = -math.inf
    for (size, peak), seq_len in ends:
        if math.log2(size) - last < least:
            continue
        last = math.log2(size)
        where = (size, peak / GIB)
        words: dict[str, Any] = {"fontsize": 8, "rotation": 90, "ha": "center", "va": "bottom"}
        axes.annotate(str(seq_len), where, (0, 3), textcoords="offset points", **words)


def _limits(axes: Axes, rows: Sequence[SweepRow]) -> None:
    """What each GPU has, once."""
    limits = {row.gpu: row.budget_bytes - row.headroom_bytes for row in rows}
    for gpu, limit in limits.items():
        axes.axhline(limit / GIB, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f"{gpu}: {format_bytes(limit)}",
            (0.01, limit / GIB),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=9,
        )


def _frame_sizes(axes: Axes, lengths: list[int]) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    if lengths:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("sequence length")
    else:
        axes.set_xticks([])
    axes.set_ylabel("largest batch")
    axes.set_title("largest batch over sequence length" if lengths else "largest batch", loc="left")
