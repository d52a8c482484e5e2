"""Traces and histories small enough to be checked by hand, and their alignment against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.replay import replay
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import MIB
from benchmarks.cuda.traces import (
    MARKER_BYTES,
    align,
    compare,
    peaks,
    predicted_and_measured,
    read_history,
    replay_stages,
    simulated_history,
)

SIZES = st.lists(st.integers(0, 3), max_size=12)

# Weights; an activation and a gradient of it; nothing at all, which is no request.
TRACE = Trace(
    batch_size=1,
    seq_len=None,
    structure=TraceStructure(
        order=(0, 1, 3, 2, ~1, ~2),
        marks=(
            StageMark(0, -1, "model"),
            StageMark(1, 0, "forward"),
            StageMark(3, 0, "backward"),
            StageMark(6, 0, "end"),
        ),
        operators=("aten._to_copy.default", "aten.mm.default", "aten.mul.Tensor", "aten.empty.memory_format"),
        modules=("", "", "", ""),
        kinds=("parameter", "activation", "temporary", "temporary"),
    ),
    sizes=(4 * MIB, 12 * MIB, 6 * MIB, 0),
)


def history() -> list[Any]:
    """The trace's own history."""
    return list(simulated_history(TRACE, CachingAllocator()))


def position(events: list[Any], action: str, nbytes: int) -> int:
    """Of the first such event."""
    return next(i for i, event in enumerate(events) if event[0] == action and event[1] == nbytes)


def test_its_own_history_has_all_of_it() -> None:
    """Nothing missed, nothing too many, the same lifetimes, the same segments."""
    found = compare(TRACE, history())
    assert found["requests"] == {"recorded": 3, "real": 3}
    assert found["matched"] == found["lifetimes"]["same"] == 3
    assert (found["missed"]["count"], found["too_many"]["count"], found["not_compared"]) == (0, 0, [])
    assert found["at_the_real_peak"] == {"bytes": 22 * MIB, "missed_bytes": 0}
    # 2 MiB for the markers, 20 for weights and activation, 20 for the gradient, which finds only 4 left.
    assert found["allocator"] == {
        "compared": True,
        "segments": {"simulated": 3, "real": 3, "equal_from_the_first": 3},
        "peak_reserved_bytes": {"simulated": 42 * MIB, "real": 42 * MIB},
    }


def test_a_workspace_is_missed_by_the_operator_before_it() -> None:
    """With its stage, its size and the lines that asked for it, and it counts at the peak while it lives."""
    events = history()
    at = position(events, "alloc", 12 * MIB) + 1
    events[at:at] = [("alloc", 30 * MIB, 1 << 40, "conv.py:1 forward")]
    found = compare(TRACE, events)
    assert found["missed"] == {
        "count": 1,
        "bytes": 30 * MIB,
        "largest": [
            {
                "stage": "forward of step 0",
                "operator": "aten.mm.default",
                "bytes": 30 * MIB,
                "times": 1,
                "where": "conv.py:1 forward",
            }
        ],
    }
    assert (found["matched"], found["too_many"]["count"]) == (3, 0)
    assert found["at_the_real_peak"] == {"bytes": 52 * MIB, "missed_bytes": 30 * MIB}
    # The history was not given the segment that this takes, and the allocator's part tells.
    assert found["allocator"]["segments"] == {"simulated": 4, "real": 3, "equal_from_the_first": 2}


def test_what_the_card_never_asks_for_is_too_many() -> None:
    """With its operator."""
    events = [event for event in history() if event[1] != 6 * MIB]
    found = compare(TRACE, events)
    assert [one["operator"] for one in found["too_many"]["largest"]] == ["aten.mul.Tensor"]
    assert (found["matched"], found["missed"]["count"]) == (2, 0)


@pytest.mark.parametrize("later", [False, True])
def test_another_lifetime_is_told(later: bool) -> None:
    """A block that is released before the request it should outlive, or never."""
    events = history()
    release = events.pop(position(events, "free_completed", 12 * MIB))
    if not later:
        events.insert(position(events, "alloc", 6 * MIB), release)
    found = compare(TRACE, events)["lifetimes"]
    assert found["same"] == 2
    assert found["released_later_bytes" if later else "released_sooner_bytes"] == {"aten.mm.default": 12 * MIB}


def test_other_stages_are_refused() -> None:
    """A history whose markers are not the trace's stages is not compared."""
    events = [event for event in history() if event[1] != MARKER_BYTES + 6]
    with pytest.raises(ValueError, match=r"^the history has 3 stages, the recording 4$"):
        compare(TRACE, events)


def test_a_snapshots_entries() -> None:
    """Releases count when they are complete; of the lines that asked, the innermost three that are the user's."""
    frames = [
        {"filename": "/x/torch/nn/modules/module.py", "line": 1, "name": "_call_impl"},
        *({"filename": f"/x/mine/{name}.py", "line": line, "name": "go"} for line, name in enumerate("abcd")),
    ]
    entries = [
        {"action": "segment_alloc", "addr": 512, "size": 2 * MIB, "frames": frames},
        {"action": "alloc", "addr": 512, "size": 100, "stream": 0, "frames": frames},
        {"action": "free_requested", "addr": 512, "size": 100, "frames": []},
        {"action": "free_completed", "addr": 512, "size": 100},
        {"action": "snapshot", "size": 0},
        {"action": "oom", "size": 9, "device_free": 3},
    ]
    lines = "a.py:0 go < b.py:1 go < c.py:2 go"
    assert read_history(entries) == [
        ("segment_alloc", 2 * MIB, 512, lines),
        ("alloc", 100, 512, lines),
        ("free_completed", 100, 512, ""),
        ("oom", 9, 0, ""),
    ]


def test_stages_have_peaks_of_their_own() -> None:
    """Which together are the whole replay's, and stand beside what was measured in the same stage."""
    stages, message = replay_stages(TRACE, CachingAllocator())
    whole = replay(TRACE.structure, TRACE.sizes, CachingAllocator())
    assert message == ""
    assert [stage["peak_allocated_bytes"] // MIB for stage in stages] == [4, 16, 22, 4]
    assert [stage["allocated_bytes"] // MIB for stage in stages] == [4, 16, 4, 4]
    assert peaks(stages) == {
        "peak_allocated_bytes": whole.max_allocated_bytes,
        "peak_reserved_bytes": whole.max_reserved_bytes,
    }
    (row,) = predicted_and_measured(stages, [{**stages[2], "peak_allocated_bytes": 5}])
    assert (row["step"], row["stage"]) == (0, "backward")
    assert row["predicted_and_measured"]["peak_allocated_bytes"] == [22 * MIB, 5]


def test_a_card_that_is_too_small() -> None:
    """The stages that ended, and the allocator's words."""
    stages, message = replay_stages(TRACE, CachingAllocator(22 * MIB))
    assert [stage["stage"] for stage in stages] == ["model", "forward"]
    assert message.startswith("CUDA out of memory. Tried to allocate 20.00 MiB.")


@given(one=SIZES, other=SIZES)
def test_an_alignment_leaves_as_little_over_as_can_be(one: list[int], other: list[int]) -> None:
    """As many pairs as the longest common subsequence has, equal and in order on both sides."""
    pairs = align(one, other)
    assert pairs is not None
    assert len(pairs) == _common(one, other)
    assert all(one[a] == other[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


def test_too_many_differences_are_given_up() -> None:
    """Two lists that have nothing in common differ by all they have."""
    assert align([1] * 5, [2] * 5, limit=9) is None
    assert align([1] * 5, [2] * 5, limit=10) == []


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]
