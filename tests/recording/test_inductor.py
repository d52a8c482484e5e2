"""Tests of batchfinder/recording/inductor.py: compiled steps, beside the code that Inductor has generated for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfinder.models.build import compile_workload
from batchfinder.models.lightning_module import workload_from_training_step
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload

pytest.importorskip("triton")
pytest.importorskip("torch._inductor.compile_fx")  # here, once, and not in each fork
pytestmark = pytest.mark.slow

Record = Callable[..., Trace]
AMPERE, VOCABULARY, WIDTH = (8, 0), 1000, 256


class Block(nn.Module):
    """Attention and a feed-forward layer, with dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.joint = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.joint(self.norm(x)).view(batch, tokens, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=0.1, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, tokens, WIDTH)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks between an embedding and a loss, each recomputed in the backward or not."""

    def __init__(self, recompute: bool, blocks: int) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def tokens(batch_size: int, seq_len: int | None) -> torch.Tensor:
    """One batch of token ids."""
    return torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)


def transformer(compiled: str | None = None, recompute: bool = False, blocks: int = 1) -> Workload:
    """The model, of which all or each block is compiled."""
    workload = Workload(Model(recompute, blocks), tokens)
    return workload if compiled is None else compile_workload(workload, compiled, "transformer")


def layers() -> Workload:
    """The model with each block compiled."""
    return transformer("layers", blocks=2)


def sizes_of(trace: Trace, stage: str, operator: str) -> list[int]:
    """Bytes of the blocks that an operator makes in a stage of the first step, in order."""
    starts = [(mark.step, mark.stage, mark.position) for mark in trace.structure.marks]
    (index,) = (i for i, (step, name, _) in enumerate(starts) if (step, name) == (0, stage))
    events = trace.structure.order[starts[index][2] : starts[index + 1][2]]
    return [trace.sizes[block] for block in events if block >= 0 and trace.structure.operators[block] == operator]


def peak(trace: Trace) -> int:
    """The most bytes alive at one time."""
    live = most = 0
    for event in trace.structure.order:
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        most = max(most, live)
    return most


_ALLOCATION = re.compile(r"= empty_strided_cuda\(\(([^)]*)\), \(([^)]*)\), torch\.(\w+)\)")


def bytes_asked(code: str) -> list[int]:
    """Bytes of each buffer that generated code allocates, in order."""
    found = []
    for sizes, strides, kind in _ALLOCATION.findall(code):
        size, stride = ([int(each) for each in text.split(",") if each.strip()] for text in (sizes, strides))
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else 0
        found.append(elements * getattr(torch, kind).itemsize)
    return found


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("fp32", marks=pytest.mark.exhaustive)])
def test_what_is_recorded_is_what_the_generated_code_allocates(record: Record, tmp_path: Path, precision: str) -> None:
    """Forward and backward allocate the buffers of Inductor's output code, each and in its order."""

    def build() -> Workload:
        from torch._inductor.graph import GraphLowering

        def save(code: str) -> None:
            (tmp_path / f"{len(list(tmp_path.iterdir()))}.py").write_text(code)

        GraphLowering.save_output_code = staticmethod(save)
        return transformer("model")

    trace = record(build, 8, 128, AMPERE, precision=precision)
    forward, backward = ((tmp_path / name).read_text() for name in ("0.py", "1.py"))
    assert len(bytes_asked(forward)) > 10
    assert sizes_of(trace, "forward", "aten.empty_strided.default") == bytes_asked(forward)
    assert sizes_of(trace, "backward", "aten.empty_strided.default") == bytes_asked(backward)
    # Its extern kernels are recorded as eager ones are: attention by the card's kernel, products with their workspace.
    kernel = "flash" if precision == "bf16-mixed" else "efficient"
    assert f"_scaled_dot_product_{kernel}_attention" in forward
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in trace.structure.operators
    assert trace.structure.kinds.count("workspace") == 2
    assert {"parameter", "gradient", "optimizer", "activation"} <= set(trace.structure.kinds)


@pytest.mark.exhaustive
def test_it_is_recorded_the_same_each_time(record: Record) -> None:
    """Two recordings of a compiled step are equal; what a compiled module does is that module's."""
    first, again = (record(layers, 8, 128, AMPERE) for _ in range(2))
    assert first == again
    assert first.compiled
    assert set(filter(None, first.structure.modules)) >= {"blocks.0", "blocks.1", "embedding", "head"}


@pytest.mark.exhaustive
def test_a_compiled_step_takes_less(record: Record) -> None:
    """Fused operators keep less than the eager step's."""
    compiled, eager = (
        peak(record(lambda how=how: transformer(how), 64, 128, AMPERE, precision="bf16-mixed"))
        for how in ("model", None)
    )
    assert compiled < 0.7 * eager


def test_a_triton_kernel_within_a_compiled_model(record: Record) -> None:
    """Inductor reads from a kernel of the user's what it writes into: its input, used again, is not copied before."""
    from tests.builders import small, triton_kernels

    def doubling() -> Workload:
        return compile_workload(Workload(triton_kernels.Doubling(), small.vectors), "model", "doubling")

    inference = record(doubling, 64, None, AMPERE, mode="inference")
    assert sizes_of(inference, "forward", "aten.empty_strided.default") == 2 * [4 * 64 * small.IN]
    mixed = record(doubling, 64, None, AMPERE, precision="bf16-mixed")
    assert sizes_of(mixed, "forward", "aten.empty_strided.default").count(2 * 64 * small.IN) == 4


@pytest.mark.exhaustive
def test_with_checkpoints_and_accumulation(record: Record) -> None:
    """Checkpoints inside the compiled graph save memory, and dropout's random numbers are made again."""
    kept, computed_again = (
        record(lambda recompute=recompute: transformer("model", recompute, blocks=2), 64, 128, AMPERE, micro_batches=2)
        for recompute in (False, True)
    )
    assert peak(computed_again) < peak(kept)


@pytest.mark.parametrize("way", ["function", "forward", "LightningModule", "its part"])
def test_a_factory_may_compile(record: Record, way: str) -> None:
    """However a model is compiled, it is not recorded as it runs eagerly."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.GELU(), nn.Linear(8 * WIDTH, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def configure_model(self) -> None:
            if way == "its part":
                self.net = torch.compile(self.net)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def make_batch(self, batch_size: int, seq_len: int | None) -> torch.Tensor:
            return torch.zeros(batch_size, WIDTH)

    def build(compiled: bool = True) -> Workload:
        model = Module()
        if way == "function" or (way == "LightningModule" and compiled):
            model = torch.compile(model) if compiled else model
        if way == "forward":
            model.forward = torch.compile(model.forward)
        if way in ("function", "forward"):
            return Workload(model, model.make_batch)
        return workload_from_training_step(model, "model", lambda what, function: function())

    trace = record(build, 4096, None, AMPERE)
    assert trace.compiled
    # One kernel for both activations: what eager code keeps for each is not there.
    large = [size for size in sizes_of(trace, "forward", "aten.gelu.default") if size > 1 << 20]
    assert not large


def test_a_table_is_read_by_indices(record: Record) -> None:
    """A compiled graph may index one tensor with another, as code that decodes 4-bit weights does."""

    class Decoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("table", torch.zeros(16))
            self.register_buffer("codes", torch.zeros(WIDTH, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.table[self.codes]

    def build() -> Workload:
        return Workload(torch.compile(Decoded()), lambda batch_size, seq_len: torch.zeros(batch_size, WIDTH))

    assert record(build, 64, None, AMPERE).compiled


def test_a_graph_without_a_backward_is_compiled(record: Record) -> None:
    """Code that takes gradients inside the compiled function, as Liger's chunked losses do, and asked for Triton."""

    def gradients(output: torch.Tensor, _: Any) -> torch.Tensor:
        torch.utils._triton.has_triton()  # remembered by PyTorch, from before there is a card
        return output.sum() + chunk(output.detach())[1]

    @torch.compile
    def chunk(x: torch.Tensor) -> Any:
        return torch.func.grad_and_value(lambda x: torch.where(x > 0, x, 0).exp().exp().sum())(x)

    def build() -> Workload:
        return Workload(nn.Linear(WIDTH, WIDTH), lambda batch_size, seq_len: torch.zeros(batch_size, WIDTH), gradients)

    trace = record(build, 64, None, AMPERE)
    assert trace.compiled
    assert not sizes_of(trace, "loss", "aten.exp.default")


@pytest.mark.parametrize("part", ["model", "layers"])
def test_modules_of_pytorchs_own_are_compiled(record: Record, part: str) -> None:
    """A model of torch.nn's modules, of which the method `compile` compiles nothing, takes less compiled than eager."""

    def build(part: str | None) -> Workload:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.GELU()) for _ in range(2)]
        model = nn.Sequential(*blocks)
        if part == "layers":
            model.forward = lambda x: model.blocks[1](model.blocks[0](x))
            model.blocks = nn.ModuleList(blocks)
        workload = Workload(model, lambda batch_size, seq_len: torch.zeros(batch_size, WIDTH))
        return workload if part is None else compile_workload(workload, part, "model")

    compiled, eager = (record(lambda part=part: build(part), 4096, None, AMPERE) for part in (part, None))
    assert compiled.compiled
    assert peak(compiled) < peak(eager)


def test_modes_that_measure_are_said_to_be_left_out(record: Record) -> None:
    """`max-autotune` has Inductor time kernels and run CUDA graphs: the trace says that neither is modelled."""

    def build() -> Workload:
        model = torch.compile(nn.Linear(WIDTH, WIDTH), mode="max-autotune")
        return Workload(model, lambda batch_size, seq_len: torch.zeros(batch_size, WIDTH))

    said = " ".join(record(build, 64, None, AMPERE).unmodelled)
    assert "CUDA graphs' private memory pool" in said
    assert "autotuning" in said


@pytest.mark.parametrize(
    ("capability", "disabled", "words"),
    [((6, 1), False, "needs compute capability 7.0 or newer"), (AMPERE, True, "has compiled nothing of this model")],
)
def test_what_cannot_be_compiled_is_an_error(
    record: Record, capability: tuple[int, int], disabled: bool, words: str
) -> None:
    """A card too old for Triton, and a Dynamo that is switched off, are refused: eager figures are never given."""

    def build() -> Workload:
        torch._dynamo.config.disable = disabled
        return layers()

    with pytest.raises(AssertionError, match=f"RecordingFailed.*{words}"):
        record(build, 8, 128, capability)
