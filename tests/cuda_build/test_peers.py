"""The comparison of benchmarks/peers.py on its small case: what counts as training, and what of the state is seen."""

from __future__ import annotations

from typing import Any

import pytest

from batchfinder.testing import CudaStubFixture
from benchmarks.peer.comparison import states, trains
from benchmarks.peer.finders import PEERS
from benchmarks.peer.work import STATE

pytestmark = pytest.mark.cuda_build

NAMES = [peer.name for peer in PEERS if peer.name in ("toma, from 512", "batchfinder loop") and peer.version]
SIZES = (64, 2048)


def small_case() -> tuple[dict[str, Any], list[bool]]:
    """What finders change, and which sizes train, in processes of their own."""
    return states([*NAMES, "Lightning power"]), [trains(STATE, "loop", size)["trains"] for size in SIZES]


def test_the_small_case_on_the_stub(cuda_stub: CudaStubFixture) -> None:
    """The state tells a finder that changes it from one that does not, and a size that is too large does not train."""
    changed, trained = cuda_stub(gpu=STATE.card, memory=STATE.memory_bytes).run(small_case).result
    assert changed["batchfinder loop"] == []
    assert changed["Lightning power"] == ["random numbers"]
    if "toma, from 512" in changed:
        assert changed["toma, from 512"] == ["parameters", "optimizer", "random numbers"]
    assert trained == [True, False]
