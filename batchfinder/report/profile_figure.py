"""The memory of a step over its events, as a stacked area by kind."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from batchfinder.estimate.kinds import NAMES
from batchfinder.estimate.over_time import OverTime
from batchfinder.report.drawing import drawn
from batchfinder.report.estimate_figure import COLOUR_OF
from batchfinder.simulator.trace import Mark
from batchfinder.units import GIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_LETTER = 0.0095
"""The width of a letter in the picture's: a stage with no room for its name gets none."""


def draw_profile(memory: OverTime, usable_bytes: int, title: str, path: str) -> None:
    """Draw what tensors hold after each event, with stages marked and the peak labelled.

    Args:
        memory: by kind.
        usable_bytes: what the card has for them; drawn where it is near.
        title: stands above the picture.
        path: ends in .png or .svg.
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
        _mark_stages(axes, memory.marks, count)
        axes.set_ylabel("GiB in tensors")
        axes.set_title(title, loc="left", pad=34)
        axes.legend(*_reversed(axes), loc="center left", bbox_to_anchor=(1.0, 0.5))


def _mark_stages(axes: Axes, marks: tuple[Mark, ...], count: int) -> None:
    ends = [*(mark.position for mark in marks[1:]), count]
    for mark, end in zip(marks, ends, strict=True):
        axes.axvline(mark.position, color="white", linewidth=0.6)
        if end - mark.position >= _LETTER * len(mark.stage) * count:
            axes.annotate(
                mark.stage,
                ((mark.position + end) / 2, 1.0),
                (0, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    starts = {mark.step: mark.position for mark in reversed(marks) if mark.step >= 0}
    for (step, start), (_, end) in pairwise([*sorted(starts.items()), (-1, count)]):
        axes.annotate(
            f"step {step}",
            ((start + end) / 2, 1.0),
            (0, 18),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            weight="bold",
        )
    axes.set_xticks([])
    axes.set_xlabel("allocations and releases, in order")


def _reversed(axes: Axes) -> tuple[list[Artist], list[str]]:
    """The legend's entries in the order in which the areas lie on each other."""
    handles, labels = axes.get_legend_handles_labels()
    return handles[::-1], labels[::-1]
