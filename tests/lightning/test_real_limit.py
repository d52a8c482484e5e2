"""Real fits in processes of their own, under a real RLIMIT_AS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fits
import pytest

# Options and the limit in MiB. A search leaves a thread's stack of 8 MiB behind, and
# 2 MiB of compiled kernels for each size of the convolutional net: the limits are well above ten times that.
CASES = {
    "Transformer": ({"rows": 200, "seq_len": 64, "width": 128}, 200),
    "ConvNet": ({"rows": 160, "side": 80, "width": 16}, 400),
}


@pytest.mark.slow
@pytest.mark.parametrize("net", CASES)
def test_the_answer_runs_and_a_tenth_more_does_not(net: str, tmp_path: Path) -> None:
    """50 steps run at the answer in the process that searched, and 10 in one that did not; a tenth more fails.

    The second start tries nothing and takes less than 100 ms of the callback's time.
    """
    options, limit_mib = CASES[net]
    request: dict[str, Any] = {"net": net, "options": options, "finder": {"cache": str(tmp_path)}}
    first = fits.run_fit(**request, limit_mib=limit_mib)
    assert (first["error"], first["steps"], first["sources"]) == (None, 50, ["measured"]), first
    assert first["limit_unchanged"]
    limit = {"limit_mib": limit_mib, "limit_bytes": first["limit_bytes"]}

    second = fits.run_fit(**request, **limit, steps=10)
    assert (second["error"], second["steps"], second["batch_size"]) == (None, 10, first["batch_size"]), second
    assert (second["sources"], second["trials"]) == (["cache"], []), (first, second)
    # The time that a core worked for the callback: how long it waited for one says nothing.
    assert second["core_seconds"] < 0.1, second

    more = int(1.1 * first["batch_size"]) + 1
    tenth = fits.run_fit(net=net, options=options, batch_size=more, **limit)
    assert (tenth["verdict"], tenth["steps"] < 50) == ("OUT_OF_MEMORY", True), (first, tenth)
