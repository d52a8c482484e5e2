"""An estimate as bars: what the memory at the peak is for, and what the card has."""

from __future__ import annotations

from batchfinder.estimate.estimate import Estimate
from batchfinder.estimate.kinds import NAMES
from batchfinder.report.drawing import COLOURS, GREY, drawn
from batchfinder.report.estimate_findings import EstimateFindings
from batchfinder.units import GIB, format_bytes

COLOUR_OF = dict(zip(NAMES, (*COLOURS, GREY, "#bfbfbf"), strict=True))
_LIGHT = ("gradients", "temporary", "workspace", "fragmentation", "context")
_LEAST_SHARE = 0.06
"""Of the longest bar: a part that is shorter has no room for its figure."""


def draw_estimate(found: EstimateFindings, path: str) -> None:
    """Draw a bar for one GPU alone, and one for each way that several can share the work.

    Args:
        found: what was found.
        path: ends in .png or .svg.
    """
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
            f"{found.gpu}, {format_bytes(capacity)}" + (" each" if found.num_gpus > 1 else ""),
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
        axes.set_title(_title(found), loc="left", pad=18)
        shown = [kind for kind in NAMES if any(kind in _held(bar) for bar in bars.values())]
        handles = [axes.barh(0, 0, color=COLOUR_OF[kind], label=NAMES[kind]) for kind in shown]
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=5)


def _held(bar: Estimate) -> set[str]:
    return {kind for kind, size in bar.kinds.shown().items() if size}


def _title(found: EstimateFindings) -> str:
    trace = found.estimate.trace
    length = "" if trace.seq_len is None else f", sequence length {trace.seq_len}"
    return f"{found.model} at batch size {trace.batch_size}{length}, {found.precision}, simulated"
