"""Tests of batchfinder/estimate/sharding.py: the buckets that DDP adds to a step recorded on one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.memory_use.breakdown import Estimate, estimate
from batchfinder.memory_use.sharding import bucket_sizes, buckets_of
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import alive_at
from batchfinder.simulator.trace import Trace, add_blocks
from batchfinder.units import GIB, MIB

CARD = DeviceMemory(16 * GIB, 16 * GIB)


def found(trace: Trace) -> Estimate:
    """An estimate on a large card."""
    return estimate(trace, CARD)


def of_kind(trace: Trace, kind: str) -> int:
    """Bytes of all blocks of a recording's kind."""
    return sum(size for size, one in zip(trace.sizes, trace.structure.kinds, strict=True) if one == kind)


@pytest.mark.slow
def test_buckets_are_those_of_pytorch() -> None:
    """The buckets have the very sizes of those that DistributedDataParallel makes of the same gradients."""
    script = Path(__file__).with_name("ddp_buckets.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    buckets, gradients = map(json.loads, done.stdout.splitlines())
    assert len(buckets) == 4
    assert bucket_sizes(gradients) == buckets


def test_the_first_step_has_one_bucket(bert: Trace) -> None:
    """It goes after the second step's backward, when the others are there; `bucket_cap_mb` holds for the first too."""
    gradients = of_kind(bert, "gradient") // 2
    blocks = buckets_of(bert)
    second = [mark.position for mark in bert.structure.marks if (mark.step, mark.stage) == (1, "forward")]
    updates = [mark.position for mark in bert.structure.marks if (mark.step, mark.stage) == (1, "optimizer")]
    assert (blocks[0].size, blocks[0].end) == (gradients, updates[0])
    assert {(block.start, block.end) for block in blocks[1:]} == {(second[0], None)}
    assert sum(block.size for block in blocks[1:]) == gradients
    assert [block.size for block in buckets_of(bert, rebuilds=False)] == [block.size for block in blocks[1:]]
    small = buckets_of(bert, rebuilds=False, bucket_bytes=5 * MIB)
    assert small[0].size >= 5 * MIB
    assert len(small) > len(blocks)


def test_no_gradients_no_buckets() -> None:
    """What is full to the byte leaves no empty bucket behind, and no gradients make none."""
    assert bucket_sizes([MIB, 25 * MIB]) == [MIB, 25 * MIB]
    assert bucket_sizes([]) == []


def test_distributed(bert: Trace) -> None:
    """Under DDP each GPU has a copy of all gradients more, all the time, in buckets; two at the peak, as of one."""
    gradients = of_kind(bert, "gradient") // 2
    trace = add_blocks(bert, buckets_of(bert))
    assert of_kind(trace, "communication") == 2 * gradients  # those of the first step, and those that replace them
    alone, together = found(bert), found(trace)
    assert together.kinds.communication == 2 * gradients
    for kind in ("parameters", "gradients", "optimizer", "inputs", "workspace"):  # the peak is another moment's
        assert getattr(together.kinds, kind) == getattr(alone.kinds, kind)
    first = next(mark.position for mark in trace.structure.marks if mark.step == 0)
    last = len(trace.structure.order) - 1
    for position in (first + 40, last):
        alive = alive_at(trace.structure, position)
        assert sum(trace.sizes[i] for i in alive if trace.structure.kinds[i] == "communication") == gradients
