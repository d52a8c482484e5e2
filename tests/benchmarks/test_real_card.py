"""The program for a real card: taken on the stub, and what a comparison says."""

from __future__ import annotations

import copy
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchfinder.testing import CudaStubFixture
from benchmarks.real_card import ROOT, compare, steps, take_steps


def test_steps_have_names_of_their_own() -> None:
    """By which those of two cards are compared."""
    counts = Counter(one.name for one in steps())
    assert len(counts) > 600
    assert counts.most_common(1)[0][1] == 1


def test_steps_without_time_are_rows_too() -> None:
    """With the reason, in order."""
    rows: list[dict[str, Any]] = []
    listed = list(steps())[:3]
    take_steps(listed, jobs=2, seconds=0.0, add=rows.append)
    assert rows == [{"name": one.name, "error": "the time was over"} for one in listed]


RESULT: dict[str, Any] = {
    "properties": {"attributes": {"1": 1024}, "properties": {"L2_cache_size": "52428800"}},
    "contexts": {"init": 500},
    "addresses": {"large": [[2, 1000], [4, 1100], [-1, 1000]]},
    "kernels": ["flash", "math"],
    "steps": [
        {
            "name": "one",
            "allocated": 9,
            "reserved": 20,
            "sizes": [1, 2, 3, 4, 5, 6],
            "segments": [["segment_alloc", 20]],
        },
        {"name": "two", "error": "RuntimeError"},
    ],
}


def test_a_result_is_like_itself() -> None:
    """Wherever the first address lies; a step that failed is left out, and why is said."""
    other = copy.deepcopy(RESULT)
    other["addresses"]["large"] = [[2, 7000], [4, 7100], [-1, 7000]]
    found = compare(RESULT, other)
    assert found["attributes"] == found["properties"] == {}
    assert found["contexts"] == {"init": [500, 500]}
    assert found["addresses"] == {"large": {"blocks": 3, "alike": 3}}
    assert found["kernels"] == 0
    assert found["steps"] == {
        "compared": 1,
        "equal": {"allocated": 1, "reserved": 1, "sizes": 1, "segments": 1},
        "different": [],
        "left out": {"two": "RuntimeError"},
    }


def test_differences_are_named() -> None:
    """What the card says and what the stub says; of a step the first request that differs."""
    other = copy.deepcopy(RESULT)
    other["properties"]["properties"]["L2_cache_size"] = "1"
    other["addresses"]["large"][1] = [4, 1200]
    other["kernels"][0] = "math"
    other["steps"][0] |= {"allocated": 8, "sizes": [1, 2, 3, 4, 7, 5, 6]}
    found = compare(RESULT, other)
    assert found["properties"] == {"L2_cache_size": ["52428800", "1"]}
    assert found["addresses"] == {"large": {"blocks": 3, "alike": 2}}
    assert found["kernels"] == 1
    [different] = found["steps"]["different"]
    assert found["steps"]["equal"] == {"allocated": 0, "reserved": 1, "sizes": 0, "segments": 1}
    assert (different["name"], different["allocated"], different["reserved"]) == ("one", [9, 8], [20, 20])
    assert different["first"] == {"request": 4, "of": [6, 7], "card": [2, 3, 4, 5, 6], "stub": [2, 3, 4, 7, 5, 6]}


@pytest.mark.cuda_build
@pytest.mark.exhaustive
def test_on_the_stub(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """All of its parts but the contexts, which compile a function, with three steps."""
    out = tmp_path / "stub.json.gz"
    run = cuda_stub(gpu="H100 80GB").run_script(
        f"{ROOT}/benchmarks/real_card.py", "--out", str(out), "--only", "mean: ", "--jobs", "2",
        "--parts", "properties,addresses,kernels,steps",
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    result = json.loads(gzip.decompress(out.read_bytes()))
    assert result["properties"]["attributes"]["16"] == 132  # cudaDevAttrMultiProcessorCount
    assert all(address for events in result["addresses"].values() for _, address in events)
    assert set(result["kernels"]) == {"math", "flash", "efficient", "cudnn"}
    assert len(result["steps"]) == 3
    for row in result["steps"]:
        assert row["retries"] == 0
        assert sum(size for action, size, _ in row["segments"] if action == "segment_alloc") == row["reserved"]
        assert 0 < row["allocated"] <= row["reserved"]
