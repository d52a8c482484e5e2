"""What all pictures share: matplotlib, loaded when one is asked for, colours, and files.

Nothing is set for the process: figures are made without pyplot, so a caller's own plots keep their style.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfinder.errors import InvalidValue, MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
"""Eight colours that colour-blind readers can tell apart: Okabe and Ito, https://jfly.uni-koeln.de/color/."""

GREY = "#8c8c8c"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""With the colours, so that lines can be told apart without them."""

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


def check_picture(option: str, path: str | None) -> None:
    """Find out before the work whether a picture could be drawn and written.

    Args:
        option: what the path was given for.
        path: as it was given; None for no picture.

    Raises:
        InvalidValue: it is no file that ends in .png or .svg, in a folder that exists.
        MissingExtra: there is no matplotlib.
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in _ENDINGS or Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
        raise InvalidValue(option, path, "a file that ends in .png or .svg, in a folder that exists")
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "drawing")


@contextmanager
def drawn(option: str, path: str, columns: int = 1, width: float = 9.0, height: float = 5.0) -> Iterator[list[Axes]]:
    """Axes side by side to draw on; they are written to a file at the end.

    Args:
        option: what the path was given for.
        path: ends in .png or .svg.
        columns: how many.
        width: of all, in inches.
        height: in inches.

    Raises:
        InvalidValue: it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        _save(figure, option, path)


def _save(figure: Figure, option: str, path: str) -> None:
    # No date in an SVG: the same figures make the same file.
    metadata = {"Date": None} if path.lower().endswith(".svg") else None
    try:
        figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise InvalidValue(option, path, f"a file that can be written ({error.strerror})") from error
