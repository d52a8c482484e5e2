"""The step of one of several GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from batchfinder.estimate.estimate import Estimate, estimate
from batchfinder.estimate.sharding import STAGES, Layers, bucket_sizes, buckets_of, layers_of, sharded_step
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import alive_at
from batchfinder.simulator.trace import Trace, TraceStructure
from batchfinder.units import GIB, MIB
from tests.builders import few_layers
from tests.conftest import Record

DDP, ZERO_1, ZERO_2 = STAGES.values()
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
    """It goes before the second step's forward, where the others are made; `bucket_cap_mb` holds for the first too."""
    gradients = of_kind(bert, "gradient") // 2
    blocks = buckets_of(bert)
    second = [mark.position for mark in bert.structure.marks if (mark.step, mark.stage) == (1, "forward")]
    assert (blocks[0].size, blocks[0].end) == (gradients, second[0])
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
    """Under DDP each GPU has a copy of all gradients more, all the time, in buckets, however many GPUs there are."""
    gradients = of_kind(bert, "gradient") // 2
    trace = sharded_step(bert, DDP, 4)
    assert of_kind(trace, "communication") == 2 * gradients  # those of the first step, and those that replace them
    assert trace == sharded_step(bert, DDP, 8)
    alone, together = found(bert), found(trace)
    assert together.kinds.communication == gradients
    for kind in ("parameters", "gradients", "optimizer", "activations", "temporary", "inputs", "workspace"):
        assert getattr(together.kinds, kind) == getattr(alone.kinds, kind)
    first = next(mark.position for mark in trace.structure.marks if mark.step == 0)
    last = len(trace.structure.order) - 1
    for position in (first + 40, last):
        alive = alive_at(trace.structure, position)
        assert sum(trace.sizes[i] for i in alive if trace.structure.kinds[i] == "communication") == gradients


def test_zero_1(bert: Trace) -> None:
    """ZeRO-1 leaves each GPU an Nth of the optimizer's state, and of what the optimizer allocates for a moment."""
    trace, whole = sharded_step(bert, ZERO_1, 4), sharded_step(bert, DDP, 4)
    assert of_kind(trace, "optimizer") == pytest.approx(of_kind(bert, "optimizer") / 4, abs=200)
    for kind in ("parameter", "gradient", "activation", "communication"):
        assert of_kind(trace, kind) == of_kind(whole, kind)
    assert of_kind(trace, "temporary") < of_kind(whole, "temporary")


def test_zero_2(bert: Trace) -> None:
    """ZeRO-2 leaves each GPU an Nth of the gradients, and twice the largest unit's in each backward."""
    trace = sharded_step(bert, ZERO_2, 4)
    layers = layers_of(bert)
    assert layers.rest > layers.largest
    assert of_kind(trace, "gradient") == pytest.approx(of_kind(bert, "gradient") / 4, abs=200)
    assert of_kind(trace, "parameter") == of_kind(bert, "parameter")
    assert of_kind(trace, "communication") == 2 * 2 * layers.rest  # two blocks in each of two steps
    assert communication_by_stage(trace) == {"backward": 2 * layers.rest}


def test_the_largest_unit_may_be_a_layer(bert: Trace) -> None:
    """Where a layer is larger than all that is in none, its gradients are what is on its way."""
    blocks = zip(bert.structure.modules, bert.sizes, strict=True)
    heavy = replace(bert, sizes=tuple(100 * size if ".layer.0." in module else size for module, size in blocks))
    layers = layers_of(heavy)
    assert layers.largest > layers.rest
    assert of_kind(sharded_step(heavy, ZERO_2, 4), "communication") == 2 * 2 * layers.largest


def communication_by_stage(trace: Trace) -> dict[str, int]:
    """What is gathered or on its way at the end of each stage of the last step, where there is any."""
    marks = trace.structure.marks
    found = {}
    for mark, after in pairwise(marks):
        alive = alive_at(trace.structure, after.position - 1)
        held = sum(trace.sizes[i] for i in alive if trace.structure.kinds[i] == "communication")
        if held and mark.step == 1:
            found[mark.stage] = held
    return found


def test_each_stage_takes_less_of_the_states(bert: Trace) -> None:
    """From DDP to ZeRO-2 the model's states get smaller, activations stay as they are, and kinds sum to the peak."""
    traces = [sharded_step(bert, stage, 8) for stage in STAGES.values()]
    states = [sum(of_kind(trace, kind) for kind in ("parameter", "gradient", "optimizer")) for trace in traces]
    assert states == sorted(set(states), reverse=True)
    assert {of_kind(trace, "activation") for trace in traces} == {of_kind(bert, "activation")}
    for one in map(found, traces):
        assert sum(one.kinds.shown().values()) == one.peak_bytes
        assert one.required_bytes <= one.peak_bytes


def test_one_gpu_has_all_of_it(bert: Trace) -> None:
    """An Nth of one GPU's is all: only what is gathered and sent is added."""
    for stage in (ZERO_1, ZERO_2):
        trace = sharded_step(bert, stage, 1)
        for kind in ("parameter", "gradient", "optimizer", "activation", "temporary"):
            assert of_kind(trace, kind) == of_kind(bert, kind)


def test_accumulation_and_inference(record: Record) -> None:
    """Each micro-batch sends again; a forward alone has no gradients to send."""
    two = record(lambda: few_layers.build("distilbert"), 2, 16, micro_batches=2)
    layers = layers_of(two)
    assert of_kind(sharded_step(two, ZERO_2, 4), "communication") == 4 * 2 * layers.rest
    assert of_kind(sharded_step(two, DDP, 4), "communication") == of_kind(two, "gradient")
    forward = record(lambda: few_layers.build("distilbert"), 2, 16, mode="inference")
    assert [sharded_step(forward, stage, 4) for stage in (DDP, ZERO_1, ZERO_2)] == [forward] * 3


H = 768


def test_bert(bert: Trace) -> None:
    """A layer of BERT-base has the parameters that can be counted by hand; embeddings, pooler and head are the rest."""
    attention = 4 * (H * H + H) + 2 * H
    feed_forward = 2 * 4 * H * H + 4 * H + H + 2 * H
    embeddings = (30522 + 512 + 2) * H + 2 * H
    rest = embeddings + H * H + H + 2 * H + 2
    assert layers_of(bert) == Layers(4 * (attention + feed_forward), 4 * rest)


def test_without_lists(mlp: Trace) -> None:
    """A model without lists of modules is one unit, the root's."""
    held = sum(size for size, kind in zip(mlp.sizes, mlp.structure.kinds, strict=True) if kind == "parameter")
    assert layers_of(mlp) == Layers(0, held)


def test_the_outermost_list_counts() -> None:
    """A list within a layer is part of that layer; what is no parameter does not count."""
    modules = ("stages.0.layers.0", "stages.0.layers.1", "stages.1", "stages.1", "head")
    kinds = ("parameter", "parameter", "parameter", "gradient", "parameter")
    structure = TraceStructure(tuple(range(5)), (), ("x",) * 5, modules, kinds)
    assert layers_of(Trace(1, None, structure, (10, 20, 25, 1000, 7))) == Layers(30, 7)
