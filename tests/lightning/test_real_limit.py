"""Real fits in processes of their own, under a real RLIMIT_AS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks, forks

# tests/lightning/test_gpu.py has the like of it, on a card's memory.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

# Options and the limit in MiB. The limits are many times what no search can give away: 2 MiB that it keeps free, and
# as much as one try left behind (kernels that oneDNN compiled for a new size of the convolutional net, 1 to 4 MiB).
# Epochs end with a smaller batch, of a size that no try has seen.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "ConvNet": ({"rows": 160, "side": 80, "width": 8}, 224),
}


@pytest.fixture(scope="module")
def fits() -> Iterator[Forks]:
    """Fits in forks of one process."""
    with forks("tests.lightning.limited_fits") as started:
        yield started


@pytest.mark.parametrize("net", CASES)
def test_the_answer_runs_and_a_fifth_more_does_not(net: str, fits: Forks, tmp_path: Path) -> None:
    """50 steps run at the answer, and in the same process, after them, a fifth more fails.

    A second start looks the answer up, certifies it with one try and trains. Where a larger size had run as well, so
    that nothing was cached, or where the try fails, as the process holds more by then, it searches anew and finds one
    within a fifth. In a process that has not searched a third more fails: what a search leaves in the process is a part
    of the limit, and no large one. Each try of another size leaves kernels of oneDNN's behind, 2 MiB of these 224.
    """
    options, limit_mib = CASES[net]
    request: dict[str, Any] = {"net": net, "options": options, "limit_mib": limit_mib}
    first = fits.run(**request, finder={"cache": str(tmp_path)}, more=0.2)
    assert (first["error"], first["steps"], first["sources"]) == (None, 50, ["measured"]), f"{first}"
    assert (first["beyond"]["verdict"], first["beyond"]["steps"]) == ("OUT_OF_MEMORY", 0), f"{first}"
    third = first["batch_size"] * 4 // 3 + 1
    assert third < options["rows"], "the data have batches of all these sizes"
    assert first["limit_unchanged"]

    second = fits.run(**request, finder={"cache": str(tmp_path)}, steps=5)
    assert (second["error"], second["steps"]) == (None, 5), f"{first} {second}"
    ran_larger = any(fits and size > first["batch_size"] for size, fits, _ in first["trials"])
    tried = [(size, fits) for size, fits, _ in second["trials"]]
    if second["sources"] == ["cache"]:
        assert not ran_larger, f"{first} {second}"
        assert tried == [(first["batch_size"], True)], f"{first} {second}"
    else:
        assert ran_larger or tried[0] == (first["batch_size"], False), f"{first} {second}"
        assert abs(second["batch_size"] - first["batch_size"]) <= 0.2 * first["batch_size"], f"{first} {second}"

    without = fits.run(**request, batch_size=third, steps=2)
    assert (without["verdict"], without["steps"]) == ("OUT_OF_MEMORY", 0), f"{first} {without}"
