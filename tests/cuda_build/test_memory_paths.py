"""PyTorch's own memory on the stub: what kernels take on each card, and everything that its allocator can do.

Figures of bytes were seen with PyTorch 2.13.0+cu130 and cuDNN 9.20, on this stub and on the prototype before it.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder.cuda_stub import find_build
from batchfinder.cuda_stub.builds import stub_folder
from batchfinder.errors import CudaStubUnavailable
from batchfinder.testing import CudaStubFixture

pytestmark = pytest.mark.cuda_build
MIB = 1 << 20
with_cudnn = pytest.mark.skipif(torch.__version__.partition("+")[0] != "2.13.0", reason="figures are of 2.13.0")


def convolution_bytes(benchmark: bool) -> tuple[int, int]:
    """What a convolution takes at most in its forward, beside the output, and in its backward."""
    import torch

    torch.backends.cudnn.benchmark = benchmark
    layer = torch.nn.Conv2d(64, 128, 3, padding=1).cuda()
    x = torch.randn(32, 64, 56, 56).cuda().requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    forward = torch.cuda.max_memory_allocated() - before - y.numel() * 4
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(y, [x, layer.weight, layer.bias], torch.ones_like(y))
    return forward, torch.cuda.max_memory_allocated() - before


@with_cudnn
@pytest.mark.parametrize(
    ("gpu", "benchmark", "expected"),
    [
        ("T4", False, (175_636_480, 251_953_152)),
        ("A100", False, (27_034_112, 160_793_088)),
        ("RTX A6000", False, (27_034_112, 156_664_320)),
        ("H100", False, (27_034_112, 156_008_448)),
        ("A100", True, (347_373_568, 407_666_688)),
    ],
)
def test_cudnn_chooses_its_own_engines(
    cuda_stub: CudaStubFixture, gpu: str, benchmark: bool, expected: tuple[int, int]
) -> None:
    """By its own heuristics for each card, and all of them in benchmark mode."""
    seen = cuda_stub(gpu=gpu, memory="80GiB").run(convolution_bytes, benchmark)
    assert seen.result == expected
    assert seen.report.unwritten == ()


def convolutions_found() -> list[Any]:
    """The size found for a loop of convolutions, how often requests failed in the search, and what training meets."""
    import torch
    from torch import nn

    from batchfinder import tune_batch_size

    layers: list[nn.Module] = []
    for inside, out, stride in ((4, 64, 1), (64, 128, 2), (128, 256, 1)):
        layers += [nn.Conv2d(inside, out, 3, stride, 1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def make_batch(size: int, seq_len: int | None) -> torch.Tensor:
        return torch.zeros(size, 4, 48, 48, device="cuda")

    def step(batch: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.float16):
            loss = net(batch).float().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    found = tune_batch_size(step, make_batch, [net, optimizer], cache=False)
    before = torch.cuda.memory_stats()
    for _ in range(20):
        step(make_batch(found.batch_size, None))
    after = torch.cuda.memory_stats()
    failures = [after[name] - before[name] for name in ("num_ooms", "num_alloc_retries")]
    return [found.batch_size, before["num_ooms"], *failures]


@with_cudnn
def test_a_workspace_there_is_no_memory_for(cuda_stub: CudaStubFixture) -> None:
    """cuDNN does without, which is no failure of a size: from 471 samples on here. The size found trains as it is."""
    size, ooms, *failures = cuda_stub(gpu="V100 16GB", memory="2GiB").run(convolutions_found).result
    assert size > 600
    assert ooms > 0
    assert failures == [0, 0]


def attention_bytes() -> tuple[int, int, str]:
    """Of fused attention in bf16, (8, 16, 2048, 64), causal: forward, backward, and which kernel ran."""
    import torch

    query = torch.randn(8, 16, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    forward = torch.cuda.max_memory_allocated() - before
    torch.autograd.grad(out, query, torch.ones_like(out))
    return forward, torch.cuda.max_memory_allocated() - before, type(out.grad_fn).__name__


@with_cudnn
@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("A100", (34_604_032, 304_088_064, "ScaledDotProductFlashAttentionBackward0")),
        ("H100", (34_604_544, 238_027_776, "ScaledDotProductCudnnAttentionBackward0")),
    ],
)
def test_attention_of_each_card(cuda_stub: CudaStubFixture, gpu: str, expected: tuple[int, int, str]) -> None:
    """Flash attention on 8.0; cuDNN's on 9.0, which it compiles with nvrtc."""
    assert cuda_stub(gpu=gpu, memory="80GiB", values=False).run(attention_bytes).result == expected


def gpt2_bytes(compiled: bool) -> list[tuple[int, int]]:
    """Peaks after each of three steps of a GPT-2 of one layer, 8 x 512 in bf16."""
    import gc

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    if compiled:
        model.compile()
    ids = torch.randint(0, 50000, (8, 512)).cuda()
    seen = []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        gc.collect()  # compiling leaves cycles that hold the first step's logits until Python looks for them
    if compiled:
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] > 0, "no graph was compiled"
    return seen


@pytest.mark.exhaustive
@with_cudnn
@pytest.mark.timeout(600)
def test_a_language_model_eager_and_compiled(cuda_stub: CudaStubFixture) -> None:
    """Inductor, Triton and ptxas compile with values followed, and the graph that runs takes half of what eager does."""
    eager = cuda_stub(memory="80GiB").run(gpt2_bytes, False)
    plain = cuda_stub(memory="80GiB", values=False).run(gpt2_bytes, False)
    assert plain.result[-1] == (3_446_321_664, 4_395_630_592)
    assert eager.result[-1] == (3_446_321_664, 3_571_449_856)
    shutil.rmtree(stub_folder() / "caches" / find_build().version, ignore_errors=True)
    compiled = cuda_stub(memory="80GiB", timeout=500).run(gpt2_bytes, True)
    # As requested: what compiling leaves in the cache decides how many blocks are a little larger.
    assert compiled.memory_stats[0]["requested_bytes.all.peak"] == 1_645_557_348
    assert 0 < compiled.result[-1][0] - 1_645_557_348 < 16 * MIB


def embedding_backward() -> int:
    """Many indices: CUB sorts them, by the architecture that a kernel says it has."""
    import torch

    table = torch.nn.Embedding(30000, 64, device="cuda")
    table(torch.randint(0, 30000, (8, 1024), device="cuda")).sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    "gpu",
    [
        *("T4", "RTX 4090", "B200", "Titan X"),
        *(pytest.param(gpu, marks=pytest.mark.exhaustive) for gpu in ("V100", "A100", "RTX A6000", "H100", "RTX 5090")),
    ],
)
def test_language_models_train_on_every_card(cuda_stub: CudaStubFixture, gpu: str) -> None:
    """Also on 8.9, for which PyTorch is not built, and on cards that are older than all it is built for."""
    seen = cuda_stub(gpu=gpu, values=False).run(embedding_backward)
    assert seen.result > 2 * 30000 * 64 * 4


def out_of_memory() -> list[Any]:
    """What is said of a card that is full, and what is left when the error is over."""
    import torch

    held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
    said = ""
    try:
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        said = str(error)
    stats = torch.cuda.memory_stats()
    del held[0]
    again = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").numel()
    return [said, stats["num_ooms"], stats["num_alloc_retries"], again, torch.cuda.mem_get_info()]


def test_out_of_memory(cuda_stub: CudaStubFixture) -> None:
    """PyTorch's own error with the card's numbers; after it the process goes on."""
    seen = cuda_stub(gpu="A100", memory="4GiB", held="512MiB").run(out_of_memory)
    said, ooms, retries, again, (free, total) = seen.result
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 512.00 MiB is free." in said
    assert "Including non-PyTorch memory, this process has 3.00 GiB memory in use." in said
    assert (ooms, retries, again, free, total) == (1, 1, 1 << 30, 512 * MIB, 4 << 30)
    assert (seen.num_ooms, seen.num_alloc_retries) == (1, 1)


def fragmented() -> dict[str, int]:
    """Blocks of 12 MiB of which every second is given back, then one of 120 MiB."""
    import torch

    blocks = [torch.empty(12 << 20, dtype=torch.uint8, device="cuda") for _ in range(40)]
    del blocks[::2]
    torch.empty(120 << 20, dtype=torch.uint8, device="cuda")
    return {name: torch.cuda.memory_stats()[name] for name in ("reserved_bytes.all.peak", "allocated_bytes.all.peak")}


@pytest.mark.parametrize(
    ("allocator", "reserved"),
    [
        ("", 40 * 12 + 120),
        ("expandable_segments:True", 40 * 12 + 120),
        ("roundup_power2_divisions:2", 40 * 12 + 128),
        ("max_split_size_mb:64", 40 * 12 + 120),
    ],
)
def test_settings_of_the_allocator(cuda_stub: CudaStubFixture, allocator: str, reserved: int) -> None:
    """They are PyTorch's own, with segments by cudaMalloc or by pages."""
    seen = cuda_stub(memory="8GiB", allocator=allocator, values=False).run(fragmented)
    assert seen.result["reserved_bytes.all.peak"] == reserved * MIB


def grown() -> int:
    """A block that grows again and again, as a cache of keys does."""
    import torch

    held = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
    for size in range(30, 200, 10):
        held = torch.cat([held, held.new_empty((size << 20) - held.numel())])
    return torch.cuda.memory_stats()["reserved_bytes.all.peak"]


def test_expandable_segments_reserve_less(cuda_stub: CudaStubFixture) -> None:
    """What grows finds its pages again, where segments by cudaMalloc stay as they are."""
    usual = cuda_stub(memory="8GiB", values=False).run(grown).result
    expandable = cuda_stub(memory="8GiB", values=False, allocator="expandable_segments:True").run(grown).result
    assert expandable < 0.6 * usual


def test_a_garbage_threshold_and_a_fraction(cuda_stub: CudaStubFixture) -> None:
    """A fraction refuses what is beyond it; with a threshold unused blocks go before that."""

    def limited() -> list[Any]:
        import torch

        torch.cuda.set_per_process_memory_fraction(0.5)
        blocks = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (300, 400)]
        del blocks
        torch.empty(500 << 20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            return [torch.cuda.memory_stats()["reserved_bytes.all.peak"] >> 20, "1024.00 MiB allowed" in str(error)]
        return []

    assert cuda_stub(memory="2GiB", values=False).run(limited).result == [700, True]
    threshold = cuda_stub(memory="2GiB", values=False, allocator="garbage_collection_threshold:0.5").run(limited)
    assert threshold.result[1]


def pooled() -> list[Any]:
    """A block in a pool of its own and one outside."""
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    outside = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    pools = {tuple(each["segment_pool_id"]) for each in segments}
    return [len(segments), len(pools), inside.numel() + outside.numel()]


def test_pools_snapshots_and_history(cuda_stub: CudaStubFixture) -> None:
    """A pool of its own is not mixed with others'; what happened is in order, with the sizes that were asked for."""
    seen = cuda_stub(memory="2GiB", values=False, keep_events=True).run(pooled)
    assert seen.result == [2, 2, 6 << 20]
    made = [event["size"] for event in seen.events[0] if event["action"] == "alloc"]
    assert made == [3 << 20, 3 << 20]


def test_the_other_backend_is_refused_by_name(cuda_stub: CudaStubFixture) -> None:
    """cudaMallocAsync's pools are the driver's, whose rules are not known."""

    def allocate() -> None:
        import torch

        torch.empty(1, device="cuda")

    stub = cuda_stub(allocator="backend:cudaMallocAsync")
    with pytest.raises(RuntimeError, match="operation not supported"):
        stub.run(allocate)


def graphs() -> list[Any]:
    """A graph of two streams, one of the same pool, and a layer as a graph."""
    import torch

    x = torch.randn(512, 512, device="cuda")
    weight = torch.randn(512, 512, device="cuda", requires_grad=True)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            (x @ weight).sum().backward()
            weight.grad = None
    torch.cuda.synchronize()
    graph, seen = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        y = x @ weight
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            seen.append(torch.cuda.is_current_stream_capturing())
            z = y * 2
        torch.cuda.current_stream().wait_stream(other)
        z.sum().backward()
    seen.append(torch.cuda.is_current_stream_capturing())
    graph.replay()
    before = torch.cuda.memory_reserved()
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=graph.pool()):
        q = x + x
    layer = torch.cuda.make_graphed_callables(torch.nn.Linear(64, 64).cuda(), (torch.randn(8, 64, device="cuda"),))
    layer(torch.randn(8, 64, device="cuda")).sum().backward()
    pools = {tuple(each["segment_pool_id"]) for each in torch.cuda.memory_snapshot()}
    return [*seen, torch.cuda.memory_reserved() >= before, len(pools) > 1, q.shape[0]]


def test_graphs_on_several_streams(cuda_stub: CudaStubFixture) -> None:
    """A stream that waits for a capturing one captures too, and their memory is the graph's own pool's."""
    seen = cuda_stub(memory="8GiB").run(graphs)
    assert seen.result == [True, False, True, True, 512]
    assert seen.report.unwritten == ()


def streamed() -> int:
    """Blocks that another stream uses, given back on this one: when do they serve again?"""
    import torch

    side = torch.cuda.Stream()
    for _ in range(8):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            block.add_(1)
        block.record_stream(side)
        del block
    return torch.cuda.memory_stats()["reserved_bytes.all.peak"] >> 20


def test_both_ends_of_what_streams_do(cuda_stub: CudaStubFixture) -> None:
    """At once, one block serves all; if the host never waits, each needs its own. A card lies between."""
    reserved = [
        cuda_stub(memory="8GiB", values=False, events=events).run(streamed).result for events in ("early", "late")
    ]
    assert reserved == [64, 512]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(cuda_stub: CudaStubFixture, kind: str) -> None:
    """cuDNN's operators, packed sequences and half precision too: sizes of a sane order, which are said to be assumed."""

    def run() -> list[int]:
        import torch
        from torch.nn.utils.rnn import pack_padded_sequence

        made = []
        for options in ({}, {"bidirectional": True, "num_layers": 2, "dropout": 0.1}):
            layer = getattr(torch.nn, kind)(96, 128, **options).cuda()
            data = torch.randn(50, 32, 96, device="cuda", requires_grad=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer(data)[0].sum().backward()
            made.append(torch.cuda.max_memory_allocated() - before)
            with torch.autocast("cuda"):
                layer(data)[0].float().sum().backward()
            packed = layer(pack_padded_sequence(data[:10, :4], [10, 8, 5, 2]))[0].data
            assert packed.shape == (25, 256 if options else 128)
        return made

    seen = cuda_stub(memory="8GiB").run(run)
    assert all(MIB < each < 100 * MIB for each in seen.result)
    assert (
        "cuDNN's reserve space and workspaces of recurrent layers are taken to be those of 2017" in seen.report.assumed
    )


def test_without_cudnn_it_is_said(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """Where its libraries are not there convolutions take no workspaces; where they are broken, nothing runs."""
    seen = cuda_stub(gpu="A100", memory="80GiB", build=replace(find_build(), cudnn_folder=None)).run(
        convolution_bytes, False
    )
    assert seen.result[0] < 2 * MIB
    assert any(re.match(r"cuDNN takes no workspaces: .*are not there", each) for each in seen.report.assumed)
    (tmp_path / "libcudnn_graph.so.9").write_bytes(b"\x7fELF and no more")
    broken = cuda_stub(gpu="A100", build=replace(find_build(), cudnn_folder=tmp_path))
    with pytest.raises(
        CudaStubUnavailable, match=r"libcudnn_graph\.so\.9 is not a whole library .*: install its package"
    ):
        broken.run(convolution_bytes, False)


def test_several_unequal_cards(cuda_stub: CudaStubFixture) -> None:
    """Each is asked for what it has."""

    def look() -> list[Any]:
        import torch

        cards = range(torch.cuda.device_count())
        free = [torch.cuda.mem_get_info(card)[0] >> 30 for card in cards]
        moved = torch.ones(4, device="cuda:0").to("cuda:1").sum().item()
        return [free, moved, torch.cuda.get_device_name(1)]

    seen = cuda_stub(gpu="T4", memory="16GiB", count=2, held=["4GiB", 0]).run(look)
    assert seen.result == [[12, 16], 4.0, "NVIDIA T4"]
