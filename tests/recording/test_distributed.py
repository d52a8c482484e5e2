"""Tests of batchfinder/recording/distributed.py: one rank of several, recorded without a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.replay import replay
from batchfinder.simulator.scaling import between_gpus
from batchfinder.simulator.steady_state import repeat_last_step
from batchfinder.simulator.trace import Trace, TraceStructure
from batchfinder.training.step import Workload
from batchfinder.training.strategies import BUCKET_ELEMENTS
from tests.builders import sharded
from tests.builders.sharded import ALL, BLOCK, REST, VOCABULARY, WIDTH

Record = Callable[..., Trace]
SHARD = 4 * ALL // 2  # bytes of a rank's half of the parameters
BUFFER = 16e6
"""What PyTorch's test allows for activations, which are under 1 MB here."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def record(record: Record) -> Record:
    """The usual one; each recording is made once, and the code that shards is imported before the forks."""
    sharding = ("torch.distributed.fsdp", "torch.distributed.optim", "torch.testing._internal.distributed.fake_pg")
    for module in (*sharding, "torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    made: dict[str, Trace] = {}

    def once(build: Callable[..., object], *size: int, **settings: object) -> Trace:
        asked = f"{build} {size} {settings}"
        if asked not in made:
            made[asked] = record(build, *size, **settings)
        return made[asked]

    return once


def peaks(trace: Trace) -> dict[tuple[int, str], tuple[int, int]]:
    """Of each stage the most bytes alive, and those alive at its end, without cuBLAS's workspaces."""
    structure = trace.structure
    ends = [*(mark.position for mark in structure.marks[1:]), len(structure.order)]
    alive, found = 0, {}
    for mark, end in zip(structure.marks, ends, strict=True):
        most = alive
        for event in structure.order[mark.position : end]:
            block = event if event >= 0 else ~event
            if structure.kinds[block] != "workspace":
                alive += trace.sizes[block] if event >= 0 else -trace.sizes[block]
                most = max(most, alive)
        found[mark.step, mark.stage] = most, alive
    return found


@pytest.mark.parametrize(("reshards", "offload"), [(True, False), (False, False), (True, True)])
def test_pytorchs_own_memory_tests(record: Record, reshards: bool, offload: bool) -> None:
    """What PyTorch asserts of FSDP2 on two real GPUs holds for the recording, which is also within 3 % of the sums.

    `test_fully_shard_training_memory` of test/distributed/_composable/fsdp/test_fully_shard_memory.py bounds each stage
    of the first step by a sum of shards and blocks and 16 MB. For the forward without resharding it counts one block
    less than PyTorch 2.13 holds: with real tensors too, `wait_for_unshard` keeps the block before in the local
    variable `prev_all_gather_state` while it copies out this one. PyTorch's test compares with `base_mem_mb`, a peak
    that is not reset first, and the subtest before left three shards of parameters and states (128 MB here) in it.
    Those are in reference cycles: the test cannot see the block where a garbage collection has freed them since, and
    would see it where none has, which only two GPUs can tell.
    """
    found = peaks(record(partial(sharded.sharded_by_hand, reshards, offload), 1, sharded.LENGTH, gpus=2))
    shard = 0 if offload else SHARD
    block, rest = 4 * BLOCK, 4 * REST
    most, after = found[-1, "model"]
    assert most <= shard + (1.5 if offload else 1) * block + 4e6
    assert after <= shard + block
    forward = shard + (3 * block + rest if reshards else 4 * ALL + 2 * block)
    assert forward < found[0, "forward"][0] < min(1.03 * forward, forward + BUFFER)
    # At its start the root's pre-backward has fetched the last block ahead, or all are there; then gradients come.
    backward = 2 * shard + (3 + offload) * block + rest if reshards else 2 * shard + 3 * block + rest
    assert 0.99 * backward < found[0, "backward"][0] < min(1.03 * backward, backward + BUFFER)
    if not offload:
        assert found[0, "optimizer"][1] == pytest.approx(4 * shard, rel=1e-6)
        assert found[0, "optimizer"][0] < 4 * shard + BUFFER
        assert found[1, "zero_grad"][1] == pytest.approx(3 * shard, rel=1e-6)


def test_a_block_that_is_fetched_for_a_backward_that_does_not_come(record: Record) -> None:
    """FSDP2 fetches the block before ahead in the backward, although it is frozen, and lets it go at the end.

    It waits for that on the accelerator's current stream, which C++ would answer for, reading our event as its own.
    """
    trace = record(partial(sharded.sharded_by_hand, frozen=True), 1, sharded.LENGTH, gpus=2)
    trained = ALL - BLOCK - REST + VOCABULARY * WIDTH + 2 * WIDTH
    held = 4 * (ALL + 2 * trained) // 2
    assert peaks(trace)[1, "optimizer"][1] == pytest.approx(held + 4 * trained // 2, rel=1e-4)
    # With the two blocks that are there at the loss are the gathered one, its copy, and the frozen one.
    assert peaks(trace)[1, "backward"][0] > held + 4 * (3 * BLOCK + REST)


def test_shards_in_fp32_and_work_in_bf16(record: Record) -> None:
    """Mixed precision: shards, gradients and states take 4 bytes an element, what is gathered takes 2."""
    trace = record(sharded.transformer, 1, sharded.LENGTH, gpus=8, strategy="fsdp2", precision="bf16-mixed")
    eighth = 4 * ALL // 8
    found = peaks(trace)
    assert found[1, "optimizer"][1] == pytest.approx(4 * eighth, rel=1e-4)
    # Parameters, both states, the root's parameters, and of two blocks what was gathered and of one the copy.
    forward = 3 * eighth + 2 * (REST + 3 * BLOCK)
    assert forward < found[1, "forward"][0] < 1.03 * forward


def test_version_1_gathers_into_one_flat_parameter(record: Record) -> None:
    """`fsdp`: a block is gathered once, without a copy, and the one before it ahead in the backward.

    Which parameters a rank has a part of depends on the number of GPUs, and so each number is recorded.
    """
    eight, sixteen = (
        record(sharded.transformer, 1, sharded.LENGTH, gpus=gpus, strategy="fsdp", precision="bf16-mixed")
        for gpus in (8, 16)
    )
    found, eighth = peaks(eight), 4 * ALL // 8
    assert found[1, "optimizer"][1] == pytest.approx(4 * eighth, rel=1e-4)
    forward = 3 * eighth + 2 * (REST + BLOCK + BLOCK // 8)  # the last is the shard in bf16, which is sent
    assert forward < found[1, "forward"][0] < 1.01 * forward
    # Two blocks are gathered; of one the gradients are there twice, as each parameter's and flat, and another's shard.
    backward = 3 * eighth + 2 * (REST + 4 * BLOCK) + 4 * BLOCK // 8
    assert backward < found[1, "backward"][0] < 1.01 * backward
    held = {(module, kind) for module, kind in zip(eight.structure.modules, eight.structure.kinds, strict=True)}
    assert {("layers.0", "parameter"), ("layers.0", "gradient"), ("", "parameter")} < held
    assert between_gpus((8, eight), (16, sixteen), 16) is None


@pytest.mark.exhaustive
def test_what_version_1_gathered_is_used_again_when_the_host_has_waited(record: Record) -> None:
    """Before a block is gathered the host waits for the one two before it to be given back (limit_all_gathers).

    What waits is used again two units later, of the gathered and of the gradients that are sent. A recording of two
    steps says so of all later ones.
    """
    settings = {"gpus": 8, "strategy": "fsdp", "precision": "bf16-mixed"}
    two, four = (record(sharded.transformer, 1, sharded.LENGTH, steps=steps, **settings) for steps in (2, 4))
    structure = two.structure
    released = {~event: position for position, event in enumerate(structure.order) if event < 0}
    waits = [(released[block], at, structure.streams[block]) for at, block in structure.free_completed]
    assert all(start < at for start, at, _ in waits)
    marks = {(mark.step, mark.stage): mark.position for mark in structure.marks}
    gathered = [(start, at) for start, at, stream in waits if stream == 1 and start < marks[1, "forward"]]
    assert len(gathered) == 7  # three blocks' in the forward and in the backward, and the root's
    assert all(at >= after for (_, at), (after, _) in pairwise(gathered))
    longer = repeat_last_step(structure, 2)
    assert longer is not None
    assert longer[0] == four.structure
    plain = replace(structure, free_completed=())
    reserved = [replay(each, two.sizes, CachingAllocator()).max_reserved_bytes for each in (structure, plain)]
    assert reserved[0] >= reserved[1] + 2 * BLOCK
    assert not record(sharded.transformer, 1, sharded.LENGTH, gpus=8, strategy="fsdp2").structure.free_completed


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_version_1_that_keeps_what_it_gathered(record: Record) -> None:
    """`fsdp-shard-grad-op`: all blocks are there at the loss. Between micro-batches gradients are whole, in bf16."""
    settings = {"gpus": 8, "precision": "bf16-mixed", "micro_batches": 2}
    kept, given_back = (
        record(sharded.transformer, 1, sharded.LENGTH, strategy=strategy, **settings)
        for strategy in ("fsdp-shard-grad-op", "fsdp")
    )
    assert peaks(kept)[0, "loss"][1] - peaks(given_back)[0, "loss"][1] == pytest.approx(3 * 2 * BLOCK, rel=1e-3)
    assert peaks(given_back)[0, "batch"][0] == pytest.approx(2 * ALL + 4 * ALL // 8, rel=1e-3)


def test_version_1_by_calls_of_its_own(record: Record) -> None:
    """What `parallelize` returns is trained. The root's frozen unit has no gradient, and goes as the backward ends."""
    trace = record(sharded.wrapped_by_hand, 1, sharded.LENGTH, gpus=2)
    held = SHARD + 3 * 4 * 2 * BLOCK // 2
    assert 0 <= peaks(trace)[1, "optimizer"][1] - held < 4 * REST / 8
    assert 4 * REST <= peaks(trace)[1, "loss"][1] - (SHARD + 2 * 4 * 2 * BLOCK // 2) < 4 * REST + 1e6


def test_hybrid_shards_within_a_node(record: Record) -> None:
    """With `hsdp` on 16 GPUs each holds an eighth.

    What is gathered is on the copy-in stream, and gradients are on the reduce-scatter stream; but what mixed precision
    casts after an all-reduce would be on that one's.
    """
    plain = record(sharded.transformer, 1, sharded.LENGTH, gpus=8, strategy="fsdp2").structure
    trace = record(sharded.transformer, 1, sharded.LENGTH, gpus=16, strategy="hsdp")
    assert peaks(trace)[0, "optimizer"][1] == pytest.approx(4 * 4 * ALL // 8, rel=1e-4)
    hybrid = trace.structure
    longer = repeat_last_step(hybrid, 2)
    assert longer is not None
    assert longer[0].streams == tuple(hybrid.streams[block] for block in longer[1])

    def streams(structure: TraceStructure, kind: str) -> set[int]:
        return {s for s, k in zip(structure.streams, structure.kinds, strict=True) if k == kind}

    assert streams(plain, "gradient") == {3}
    assert streams(plain, "communication") == {0, 1}
    assert streams(plain, "activation") == streams(plain, "optimizer") == streams(plain, "parameter") == {0}
    assert streams(hybrid, "gradient") == {3}


def test_what_was_gathered_stays_until_the_backward(record: Record) -> None:
    """`fsdp2-shard-grad-op`: all of the parameters are there at the loss; with `fsdp2` the root's alone."""
    at_loss = [
        peaks(record(sharded.transformer, 1, sharded.LENGTH, gpus=8, strategy=strategy))[0, "loss"][1]
        for strategy in ("fsdp2", "fsdp2-shard-grad-op")
    ]
    assert at_loss[1] - at_loss[0] == pytest.approx(3 * 4 * BLOCK, rel=1e-6)


def test_gradients_are_whole_between_micro_batches(record: Record) -> None:
    """accelerate sums gradients over the GPUs after the last micro-batch alone: until then each GPU has all of them."""
    trace = record(sharded.transformer, 1, sharded.LENGTH, gpus=8, strategy="fsdp2", micro_batches=2)
    first = next(mark.position for mark in trace.structure.marks if (mark.stage, mark.micro_batch) == ("batch", 1))
    alive = {
        i: trace.sizes[i] for i in trace.structure.order[:first] if i >= 0 and trace.structure.kinds[i] != "workspace"
    }
    for event in trace.structure.order[:first]:
        alive.pop(~event, None)
    assert sum(alive.values()) == pytest.approx(4 * ALL + 4 * ALL // 8, rel=0.01)


@pytest.mark.exhaustive
def test_any_number_of_gpus_between_two(record: Record) -> None:
    """The step on 8 GPUs is what those on 4 and on 16 say that it is, block by block.

    On 32 the 16 positions are filled up to as many, and what lies between is not guessed.
    """
    few, between, many, most = (
        record(sharded.transformer, 1, sharded.LENGTH, gpus=gpus, strategy="fsdp2") for gpus in (4, 8, 16, 32)
    )
    assert between_gpus((4, few), (16, many), 8) == between
    assert between_gpus((4, few), (32, most), 8) is None


def test_ddp(record: Record) -> None:
    """Each GPU has all of the parameters, and the reducer's buckets besides: another copy of the gradients."""
    trace = record(sharded.transformer, 1, sharded.LENGTH, gpus=4, strategy="ddp")
    alone = record(sharded.transformer, 1, sharded.LENGTH)
    assert peaks(trace)[1, "optimizer"][1] - peaks(alone)[1, "optimizer"][1] == 4 * ALL
    assert "gradients are not clipped" in trace.unmodelled
    # With `gradient_as_bucket_view` gradients are in the buckets, also while the next step's forward runs.
    # In the second step's those of the first are still there.
    views = record(sharded.transformer, 1, sharded.LENGTH, gpus=4, strategy="ddp-bucket-view")
    assert peaks(views)[1, "optimizer"][1] == peaks(alone)[1, "optimizer"][1]
    assert peaks(views)[1, "forward"][1] == pytest.approx(peaks(alone)[1, "forward"][1] + 2 * 4 * ALL, rel=1e-3)
    several = record(sharded.transformer, 1, sharded.LENGTH, gpus=4, strategy="ddp-bucket-view", micro_batches=2)
    assert peaks(several)[0, "backward"][0] > peaks(views)[0, "backward"][0] + 3 * ALL


def test_zero_1(record: Record) -> None:
    """PyTorch's ZeroRedundancyOptimizer runs: whole parameters are dealt out, and the fullest of 16 ranks has one.

    Everything else is as with DDP, which is the same on any number of GPUs.
    """
    trace = record(sharded.transformer, 1, sharded.LENGTH, gpus=16, strategy="zero1")
    ddp = record(sharded.transformer, 1, sharded.LENGTH, gpus=4, strategy="ddp")
    saved = peaks(ddp)[1, "optimizer"][1] - peaks(trace)[1, "optimizer"][1]
    assert saved == pytest.approx(2 * 4 * (ALL - 4 * WIDTH * WIDTH), rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_zero_2(record: Record) -> None:
    """DeepSpeed's buffers: bf16 parameters in one tensor, of all else an eighth, and a bucket through the backward."""
    trace = record(sharded.transformer, 1, sharded.LENGTH, gpus=8, strategy="zero2", precision="bf16-mixed")
    found = peaks(trace)
    bucket, eighth = 2 * BUCKET_ELEMENTS, 4 * ALL // 8
    assert found[1, "zero_grad"][1] == pytest.approx(2 * ALL + 3 * eighth, rel=1e-3)
    held = 2 * ALL + 3 * eighth + bucket + 2 * ALL  # the last is what is copied to be summed
    assert held < found[1, "backward"][0] < held + 2 * (ALL // 8 + BLOCK) + 2e6
    assert found[1, "optimizer"][1] == pytest.approx(2 * ALL + 3 * eighth, rel=1e-3)
    several = record(
        sharded.transformer, 1, sharded.LENGTH, gpus=8, strategy="zero2", precision="bf16-mixed", micro_batches=2
    )
    assert 0 < peaks(several)[1, "backward"][0] - found[1, "backward"][0] <= 2 * (ALL // 8 + 2 * BLOCK)


def test_tensor_parallel(record: Record) -> None:
    """`tp` takes the plan that a transformers model has of its own: layers, embedding and head are split, norms whole.

    What a rank gets of the activations is less than all and more than its part. With `fsdp2-tp` on 8 GPUs of which 2
    split a layer it has an eighth of what is split, and a quarter of what is whole.
    """
    several = {"gpus": 8, "strategy": "fsdp2-tp", "tensor_parallel": 2}
    recorded = [
        record(llama, 2, 64, precision="bf16-mixed", **settings)
        for settings in ({}, {"gpus": 4, "strategy": "tp"}, several)
    ]
    held = [
        {kind: sum(s for s, k in zip(each.sizes, each.structure.kinds, strict=True) if k == kind) for kind in KINDS}
        for each in recorded
    ]
    norms = 4 * 5 * 256
    assert held[1]["parameter"] - norms == (held[0]["parameter"] - norms) / 4
    assert held[1]["optimizer"] == 2 * held[1]["parameter"]
    assert held[0]["activation"] / 4 < held[1]["activation"] < held[0]["activation"]
    assert held[2]["parameter"] == (held[0]["parameter"] - norms) / 8 + norms / 4
    assert held[2]["optimizer"] == 2 * held[2]["parameter"]


@pytest.mark.exhaustive
def test_context_parallel(record: Record) -> None:
    """`fsdp2-cp` on 8 GPUs of which 4 share a sequence: parameters and states are those of `fsdp2`.

    Of the activations it is a quarter, of the tokens, and what the ring of attention keeps. PyTorch's ring takes no
    mathematical attention, which bf16 comes to on a V100.
    """
    split = {"gpus": 8, "strategy": "fsdp2-cp", "context_parallel": 4, "precision": "bf16-mixed"}
    parts = record(llama, 2, 64, capability=(8, 0), **split)
    whole = record(llama, 2, 64, capability=(8, 0), gpus=8, strategy="fsdp2", precision="bf16-mixed")
    held = [
        {kind: sum(s for s, k in zip(each.sizes, each.structure.kinds, strict=True) if k == kind) for kind in KINDS}
        for each in (parts, whole)
    ]
    assert [held[0][kind] for kind in KINDS[:2]] == [held[1][kind] for kind in KINDS[:2]]
    assert 0.25 < held[0]["activation"] / held[1]["activation"] < 0.4
    assert any("padded to a multiple of 8 tokens" in each for each in parts.unmodelled)
    with pytest.raises(AssertionError, match="no attention of this model ran as a kernel that PyTorch's context"):
        record(llama, 2, 64, capability=(7, 0), **split)


KINDS = ("parameter", "optimizer", "activation")


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_embeddings_tied_to_the_head(record: Record, strategy: str) -> None:
    """BERT names its embeddings among the modules not to be split. As its head has their weight they go to the root."""
    trace = record(bert, 2, 64, gpus=4, strategy=strategy)
    held = 4 * sum(parameter.numel() for parameter in bert().model.parameters()) // 4
    assert peaks(trace)[1, "optimizer"][1] == pytest.approx(4 * held, rel=0.01)


def bert() -> Workload:
    """A masked language model of two layers."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return Workload(transformers.BertForMaskedLM(config), make_batch)


def llama() -> Workload:
    """A Llama of two layers, from its class of transformers."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return Workload(transformers.LlamaForCausalLM(config), make_batch)


def of_two_types() -> Workload:
    """PyTorch's model with its last norm in another type."""
    model = sharded.Transformer()
    model.norm.bfloat16()
    return Workload(model, sharded.make_batch)


def test_nothing_says_how(record: Record) -> None:
    """Refused in words: no strategy for eight GPUs, one beside own calls, mixed types, heads that do not divide."""
    with pytest.raises(AssertionError, match=r"expected one of ddp, .*fsdp2.* with 8 GPUs, or a workload with"):
        record(sharded.transformer, 1, sharded.LENGTH, gpus=8)
    with pytest.raises(AssertionError, match="none for a workload that brings a `parallelize` of its own"):
        record(sharded.sharded_by_hand, 1, sharded.LENGTH, gpus=8, strategy="fsdp2")
    with pytest.raises(AssertionError, match=r"expected another for this model.*uniform dtype.*float32 and .*bfloat16"):
        record(of_two_types, 1, sharded.LENGTH, gpus=8, strategy="fsdp")
    for option, settings in (
        ("gpus", {"gpus": 3, "strategy": "tp"}),
        ("tensor_parallel", {"gpus": 32, "strategy": "fsdp2-tp"}),
    ):
        refused = f"{option}: invalid value {settings['gpus'] if option == 'gpus' else 8}; expected 2, 4: a number that"
        with pytest.raises(AssertionError, match=f"{refused} divides the 8 attention heads and 4 heads of keys"):
            record(llama, 2, 64, **settings)
