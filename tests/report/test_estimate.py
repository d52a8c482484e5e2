"""The tables of an estimate, whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchfinder.devices import Card, Device, find_gpu
from batchfinder.memory_use.breakdown import Estimate, estimate
from batchfinder.memory_use.sharding import buckets_of
from batchfinder.report.estimate import Alternative, EstimateFindings, EstimateRequest, enough_for, estimate_tables
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure, add_blocks
from batchfinder.training.spec import StepOptions
from batchfinder.units import GIB, MIB

CONTEXT = 300 * MIB
BLOCKS = [
    # kind, module, operator, MiB, shape
    ("parameter", "embed", "aten.empty_strided.default", 100, "float32[25600, 1024]"),
    ("parameter", "layers.0", "aten.empty_strided.default", 40, "float32[10240, 1024]"),
    ("parameter", "layers.1", "aten.empty_strided.default", 40, "float32[10240, 1024]"),
    ("optimizer", "embed", "aten.zeros_like.default", 200, "float32[51200, 1024]"),
    ("input", "", "aten.empty_strided.default", 1, "int64[4, 32768]"),
    ("workspace", "layers.0", "aten.addmm.default", 8, ""),
    ("activation", "layers.0", "aten.addmm.default", 500, "bfloat16[262144, 1000]"),
    ("activation", "layers.1", "aten.addmm.default", 500, "bfloat16[262144, 1000]"),
    ("temporary", "", "aten._log_softmax.default", 60, "float32[15728640]"),
    ("gradient", "layers.1", "aten.mm.default", 40, "float32[10240, 1024]"),
    ("gradient", "layers.0", "aten.mm.default", 40, "float32[10240, 1024]"),
    ("gradient", "embed", "aten.embedding_dense_backward.default", 100, "float32[25600, 1024]"),
    ("temporary", "", "aten._foreach_sqrt.default", 700, "float32[183500800]"),
]
ORDER = (0, 1, 2, 3, 4, 5, 6, 7, 8, ~8, 9, ~7, 10, ~6, 11, 12, ~12, ~9, ~10, ~11)
MARKS = (
    *(StageMark(0, -1, "model"), StageMark(4, 0, "batch"), StageMark(5, 0, "forward"), StageMark(8, 0, "loss")),
    *(StageMark(9, 0, "backward"), StageMark(15, 0, "optimizer"), StageMark(20, 0, "end")),
)
KINDS, MODULES, OPERATORS, SIZES, SHAPES = zip(*BLOCKS, strict=True)
TRACE = Trace(
    batch_size=4,
    seq_len=128,
    structure=TraceStructure(ORDER, MARKS, OPERATORS, MODULES, KINDS),
    sizes=tuple(size * MIB - 100 for size in SIZES),
    shapes=SHAPES,
)


def on(usable: int, trace: Trace = TRACE) -> Estimate:
    """The estimate on a card."""
    return estimate(trace, DeviceMemory(64 * GIB, usable), CONTEXT)


def findings(found: Estimate) -> EstimateFindings:
    """All that there is about one GPU."""
    device = Device("A100", 64 * GIB, found.capacity_bytes - CONTEXT, (8, 0), context_bytes=CONTEXT)
    options = StepOptions(precision="bf16-mixed")
    request = EstimateRequest("mine:net", 4, 128, Card(device, "A100 40GB"), options, 1, AllocatorSettings())
    left_out = ("kernels' small scratch tensors",)
    return EstimateFindings(request, found, unmodelled=left_out, recorder_version="2.13.0")


def printed(found: EstimateFindings, capsys: pytest.CaptureFixture[str], number: int, by_module: bool = False) -> str:
    """One of the tables, as it is printed."""
    estimate_tables(found, by_module)[number].show()
    return capsys.readouterr().out


def test_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """What it takes by kind, whether it fits, the moment, and the smallest card."""
    assert (
        printed(findings(on(20 * GIB)), capsys, 0)
        == """\
mine:net at batch size 4, sequence length 128 on A100 40GB, simulated
bf16-mixed, adamw
fits: takes 2.40 GiB of 20.29 GiB with the CUDA context, 17.89 GiB free
recorder: fake device, PyTorch 2.13.0

kind                     bytes   share
──────────────────────────────────────
parameters          180.00 MiB    7.3%
gradients                  0 B    0.0%
optimizer state     200.00 MiB    8.1%
activations        1000.00 MiB   40.6%
temporary buffers    60.00 MiB    2.4%
inputs             1023.90 KiB    0.0%
cuBLAS workspaces     8.00 MiB    0.3%
fragmentation       713.00 MiB   29.0%
CUDA context        300.00 MiB   12.2%
all                   2.40 GiB  100.0%

peak: step 0, loss, no module, where _log_softmax allocates 60.00 MiB; 1.42 GiB allocated
reserved memory is highest from step 0, optimizer on; fragmentation: reserved, in no tensor at the peak
the smallest GPU that runs it has 1.92 GiB, where PyTorch has to free cached memory for it
GPUs with as much memory: RTX 3050 Laptop, RTX 3050 Ti Laptop, RTX 4050 Laptop
1 assumption; --explain says which
"""
    )


def test_largest(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest tensors, with types as precisions call them and operators without their namespace."""
    assert (
        printed(findings(on(20 * GIB)), capsys, 1)
        == """\
The 9 largest tensors at the peak

      bytes  shape               kind         module    operator
─────────────────────────────────────────────────────────────────────
 500.00 MiB  bf16[262144, 1000]  activations  layers.0  addmm
 500.00 MiB  bf16[262144, 1000]  activations  layers.1  addmm
 200.00 MiB  fp32[51200, 1024]   optimizer    embed     zeros_like
 100.00 MiB  fp32[25600, 1024]   parameters   embed     empty_strided
  60.00 MiB  fp32[15728640]      temporary    -         _log_softmax
  40.00 MiB  fp32[10240, 1024]   parameters   layers.0  empty_strided
  40.00 MiB  fp32[10240, 1024]   parameters   layers.1  empty_strided
   8.00 MiB  -                   workspace    layers.0  addmm
1023.90 KiB  int64[4, 32768]     inputs       -         empty_strided
"""
    )


def test_by_module(capsys: pytest.CaptureFixture[str]) -> None:
    """Modules as a tree, the layers of a list in one line, and what belongs to none at the end."""
    assert (
        printed(findings(on(20 * GIB)), capsys, 2, by_module=True)
        == """\
By module, at the peak

module        model states  activations  temporary         all
──────────────────────────────────────────────────────────────
all             380.00 MiB  1000.00 MiB  60.00 MiB    1.42 GiB
embed           300.00 MiB          0 B        0 B  300.00 MiB
layers.* (2)     80.00 MiB  1000.00 MiB        0 B    1.05 GiB
in no module           0 B          0 B  60.00 MiB   69.00 MiB

model states: parameters, gradients and optimizer state
"""
    )


def test_small_modules_are_left_out() -> None:
    """A module with less than a thousandth of it is no line; it is said how many are not."""
    order = [event + (event >= 4) if event >= 0 else event - (~event >= 4) for event in ORDER]
    order.insert(4, 4)
    tiny = TraceStructure(
        order=tuple(order),
        marks=tuple(StageMark(mark.position + (mark.position >= 4), mark.step, mark.stage) for mark in MARKS),
        operators=(*OPERATORS[:4], "x", *OPERATORS[4:]),
        modules=(*MODULES[:4], "embed.norm", *MODULES[4:]),
        kinds=(*KINDS[:4], "parameter", *KINDS[4:]),
    )
    trace = replace(TRACE, structure=tiny, sizes=(*TRACE.sizes[:4], 4096, *TRACE.sizes[4:]), shapes=())
    table = estimate_tables(findings(on(20 * GIB, trace)), by_module=True)[2]
    assert table.columns["module"] == ["all", "embed", "layers.* (2)", "in no module"]
    assert table.notes[1] == "modules with less than 0.1 % are not shown: 1"


def test_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """What is short, that the figures are of a larger card, and every option that was given."""
    found = findings(on(GIB))
    options = replace(found.request.options, attention="eager", gradient_checkpointing=True, mode="forward")
    found = replace(found, request=replace(found.request, options=options, accumulation=2))
    lines = printed(found, capsys, 0).splitlines()
    assert lines[1] == "bf16-mixed, forward, eager attention, gradient checkpointing, 2 micro-batches"
    assert lines[2] == "does not fit: 638.00 MiB short; it would take 2.40 GiB of 1.29 GiB with the CUDA context"
    assert lines[18] == "it does not fit, so all figures are for a GPU with unlimited memory"


def test_the_smallest_card_itself() -> None:
    """On the smallest card nothing is to spare, and the cache is given back on the way."""
    required = on(20 * GIB).required_bytes
    table = estimate_tables(findings(on(required - CONTEXT)))[0]
    assert table.details[1] == "fits: takes 1.92 GiB of 1.92 GiB with the CUDA context, 0 B free"
    assert table.notes[2:5] == (
        "the smallest GPU that runs it has 1.92 GiB",
        "GPUs with as much memory: RTX 3050 Laptop, RTX 3050 Ti Laptop, RTX 4050 Laptop",
        "allocation retries: 1; each frees the allocator's cache, which takes time",
    )


def test_the_smallest_cards_have_enough() -> None:
    """Each has what the allocator needs beside its own context; one byte more, or NCCL, and it is another."""
    needed = find_gpu("A100 40GB").usable_bytes
    one = findings(replace(on(64 * GIB), required_bytes=needed + CONTEXT))
    names = [gpu.name for gpu in enough_for(one)]
    assert names[0] == "A100 40GB"
    assert all(find_gpu(name).usable_bytes >= needed for name in names)
    more = replace(one, estimate=replace(one.estimate, required_bytes=needed + CONTEXT + 1))
    assert enough_for(more)[0].name != "A100 40GB"
    several = StepOptions(precision="bf16-mixed", gpus=8, strategy="ddp")
    assert enough_for(replace(one, request=replace(one.request, options=several)))[0].name != "A100 40GB"
    assert one.to_json()["smallest_gpus"] == names
    none = findings(replace(on(64 * GIB), required_bytes=1 << 50))
    assert "GPUs with as much memory: none of the catalogue" in estimate_tables(none)[0].notes


def test_the_smallest_cards_do_what_is_asked() -> None:
    """A card without bf16 units is not named for bf16, nor one that today's PyTorch has left behind, nor a slice."""
    bf16 = findings(replace(on(64 * GIB), required_bytes=14 * GIB + CONTEXT))
    fp32 = replace(bf16, request=replace(bf16.request, options=StepOptions()))
    assert "T4" in [gpu.name for gpu in enough_for(fp32)]
    assert "T4" not in [gpu.name for gpu in enough_for(bf16)]
    assert all(gpu.multiplies("bf16") for gpu in enough_for(bf16))
    old = replace(fp32, estimate=replace(fp32.estimate, required_bytes=10 * GIB))
    assert not {"K80", "GTX 1080 Ti"} & {gpu.name for gpu in enough_for(old)}


def test_bf16_on_a_card_without_units_for_it() -> None:
    """It is said what is missing, and what to ask for; elsewhere, and for another precision, nothing is."""
    asked = findings(on(20 * GIB))
    t4 = Card(replace(asked.request.card.device, name="T4, 12.00 GiB budget", compute_capability=(7, 5)), "T4")
    lacking = replace(asked, request=replace(asked.request, card=t4))
    (note,) = [note for note in estimate_tables(lacking)[0].notes if "bf16" in note]
    lacks, move = note.split("; ")
    assert lacks == "no bf16 units and no fused attention in bf16: T4"
    assert move == "--precision 16-mixed, fp16 with a loss scale, is for such GPUs"
    assert not [note for note in estimate_tables(asked)[0].notes if "bf16" in note]
    half = replace(lacking, request=replace(lacking.request, options=StepOptions(precision="16-mixed")))
    assert not [note for note in estimate_tables(half)[0].notes if "bf16" in note]


def test_a_larger_card_may_fail() -> None:
    """Where the smallest card that would do is smaller than one that does not, nothing is said to be short."""
    found = replace(on(GIB), required_bytes=GIB)
    assert (
        estimate_tables(findings(found))[0].details[1]
        == "does not fit; it would take 2.40 GiB of 1.29 GiB with the CUDA context"
    )


def test_no_card_was_named() -> None:
    """A budget alone has no context, which is one of the assumptions."""
    found = findings(estimate(TRACE, DeviceMemory(8 * GIB, 8 * GIB)))
    assert estimate_tables(found)[0].notes[-1] == "2 assumptions; --explain lists them"
    assert estimate_tables(found, explain=True)[0].notes[-3:] == (
        "left out or assumed: the CUDA context, as no GPU was named",
        "left out or assumed: kernels' small scratch tensors",
        "docs/glossary.md explains the words",
    )


def test_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """What each of several GPUs takes, by strategy, and what is approximated."""
    spread = {"DDP": add_blocks(TRACE, buckets_of(TRACE)), "ZeRO-3, FSDP": TRACE}
    each = {name: on(1900 * MIB, trace) for name, trace in spread.items()}
    found = findings(on(20 * GIB))
    request = replace(found.request, card=replace(found.request.card, count=8))
    found = replace(found, request=request, strategies=each)
    assert (
        printed(found, capsys, 2)
        == """\
On 8 GPUs, each with a batch of 4 of its own

strategy      each takes  model states  communication  smallest GPU  fits
─────────────────────────────────────────────────────────────────────────
DDP             2.09 GiB    380.00 MiB     180.00 MiB      2.09 GiB  yes
ZeRO-3, FSDP    1.92 GiB    380.00 MiB            0 B      1.92 GiB  yes

model states: parameters, gradients and optimizer state at the peak
communication: DDP's buckets and ZeRO-2's; for FSDP what is gathered from shards or on its way to them
1 assumption; --explain says which
"""
    )


def test_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """What each option changes, and why one cannot be used."""
    alternatives = (
        Alternative("", 4, 2 * GIB, False, 2),
        Alternative("--batch-size 2 --accumulation 2", 2, 900 * MIB, True, 3, effective_batch_size=4),
        Alternative("--gradient-checkpointing", 4, error="this model has none"),
    )
    found = replace(findings(on(GIB)), alternatives=alternatives)
    assert (
        printed(found, capsys, 2)
        == """\
Other options on one GPU

change                                takes  fits  largest batch
────────────────────────────────────────────────────────────────
none                               2.00 GiB  no                2
--batch-size 2 --accumulation 2  900.00 MiB  yes               3
--gradient-checkpointing                  -  -                 -

takes: with a batch of 4, or the --batch-size named, the CUDA context included
--batch-size 2 --accumulation 2: an effective batch of 4
--gradient-checkpointing: this model has none
"""
    )
    assert found.to_json()["advice"][1] == {
        "change": "--batch-size 2 --accumulation 2",
        "batch_size": 2,
        "peak_bytes": 900 * MIB,
        "fits": True,
        "max_batch_size": 3,
        "error": None,
        "effective_batch_size": 4,
    }


def test_markdown_keeps_the_tree() -> None:
    """In Markdown a module stays under the one it is in, and a list's star is a star."""
    modules = tuple(module and f"net.{module}" if module != "embed" else "net" for module in MODULES)
    found = findings(on(20 * GIB, replace(TRACE, structure=replace(TRACE.structure, modules=modules))))
    text = estimate_tables(found, by_module=True)[2].to_markdown()
    assert "\n| net | 380.00 MiB | 1000.00 MiB | 0 B | 1.35 GiB |\n" in text
    assert "\n| &nbsp;&nbsp;layers.\\* (2) | 80.00 MiB |" in text
