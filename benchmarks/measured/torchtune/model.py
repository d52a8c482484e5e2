"""Llama 3.2 3B as torchtune had it in November 2024: its layers, adapters, 4-bit weights, losses and offloading.

Written after torchtune/modules, its loss CEWithChunkedOutputLoss and its recipes full_finetune_single_device and
lora_finetune_single_device at https://github.com/pytorch/torchtune/tree/1814feb17a9038e1a8053ce93111bd26774a8db6, and
after torchao's NF4Tensor at https://github.com/pytorch/ao/blob/v0.7.0/torchao/dtypes/nf4tensor.py. Packed samples are
masked by flex attention there, compiled, which keeps what flash attention keeps; here they are causal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfinder.models.build import allow_fake_weights
from batchfinder.training.step import Workload
from benchmarks.measured.torchtitan.model import Block, Llama

WIDTH, HEADS, KEY_HEADS, INNER, LAYERS = 3072, 24, 8, 8192, 28
POSITIONS = 131072
"""Of which rotary embedding keeps the cosines and sines, in fp32, whatever the length (`Llama3ScaledRoPE`)."""

CHUNKS = 8
STASH = 5
"""Activations on their way to the CPU that are still on the device (torchtune's `max_fwd_stash_size`)."""

RANK, ALPHA = 64, 128
ADAPTED = ("query", "value", "out", "gate", "up", "down")
"""Of recipes/configs/llama3_2/3B_lora_single_device.yaml, and of the QLoRA one: all but the keys."""


def build(
    compiled: bool = False,
    chunked: bool = False,
    checkpointing: bool = False,
    offload: bool = False,
    lora: bool = False,
    quantized: bool = False,
    adamw_8bit: bool = False,
) -> Workload:
    """The model with the levers of one row, all in bf16.

    Args:
        compiled: each layer, and the chunked loss, by torch.compile.
        chunked: whether the loss is taken of 8 chunks of logits, else of all logits in fp32.
        checkpointing: of each layer.
        offload: saved activations to the CPU.
        lora: adapters of rank 64 train, and nothing else.
        quantized: the layers' weights are of 4 bits.
        adamw_8bit: torchao's AdamW with states of 8 bits, whose update of a parameter is compiled.
    """
    turns = torch.arange(POSITIONS)[:, None] * 500000 ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
    angles = torch.stack([turns.cos(), turns.sin()], -1)
    blocks: list[nn.Module] = []
    for _ in range(LAYERS):
        block = Block(WIDTH, HEADS, KEY_HEADS, INNER, rotate_pairs, heads_first=True)
        for name, linear in list(block.named_children()):
            if isinstance(linear, nn.Linear):
                base = Nf4Linear(linear.in_features, linear.out_features) if quantized else linear
                setattr(block, name, Adapted(base, linear) if lora and name in ADAPTED else base)
        if compiled:
            block.compile()
        blocks.append(Checkpointed(block) if checkpointing else block)
    model = Chunked(blocks, WIDTH, angles, tied=True) if chunked else Float(blocks, WIDTH, angles, tied=True)
    with allow_fake_weights():
        model.to(torch.bfloat16)
    model.angles = angles  # which stay fp32
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not lora or "lora_" in name)
    loss = ChunkedLoss(compiled) if chunked else _loss
    tuned = Offloading(model) if offload else model
    return Workload(
        tuned, packed_batch, loss, _adamw_8bit if adamw_8bit else None, casts_weights=False, sums_in_place=True
    )


def _adamw_8bit(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(list(parameters), lr=2e-5)
    return optimizer


def packed_batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, which stand for the labels too, and each token's position in its sample."""
    tokens = torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)
    return tokens, tokens.clone()


def rotate_pairs(heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of (batch, tokens, heads, head size).

    Args:
        heads: what is turned.
        angles: cosines and sines of each position (positions, head size / 2, 2), and the positions (batch, tokens).
    """
    cache, positions = angles
    pairs = heads.float().reshape(*heads.shape[:-1], -1, 2)
    cosine, sine = cache[positions].view(-1, heads.size(1), 1, heads.size(3) // 2, 2).unbind(-1)
    turned = torch.stack(
        [pairs[..., 0] * cosine - pairs[..., 1] * sine, pairs[..., 1] * cosine + pairs[..., 0] * sine], -1
    )
    return turned.flatten(3).type_as(heads)


class Float(Llama):
    """With logits in fp32."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:  # type: ignore[override]
        return self.output(self.hidden(tokens, positions)).float()

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, (self.angles, positions))
        return self.norm(hidden)


class Chunked(Float):
    """With logits in bf16, in chunks of the sequence; none of them is offloaded."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:  # type: ignore[override]
        hidden = self.hidden(tokens, positions)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return [self.output(chunk) for chunk in hidden.chunk(CHUNKS, dim=1)]


class ChunkedLoss:
    """Cross-entropy of one chunk after the other, each in fp32; the function of a chunk may be compiled."""

    def __init__(self, compiled: bool) -> None:
        self.of_chunk = torch.compile(_of_chunk) if compiled else _of_chunk

    def __call__(self, logits: list[torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        labels = batch[0]
        wanted = (labels != -100).sum()
        targets = [chunk.reshape(-1) for chunk in labels.tensor_split(CHUNKS, dim=1)]
        rows = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
        total: Any = 0.0
        for each, target in zip(rows, targets, strict=True):
            total += self.of_chunk(each, target)
        loss: torch.Tensor = total / wanted
        return loss * wanted  # by the tokens of the step, as the recipe does


def _of_chunk(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def _loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), batch[0].reshape(-1))


class Checkpointed(nn.Module):
    """A layer whose backward computes it again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return checkpoint(self.block, x, angles, use_reentrant=False)


class Adapted(nn.Module):
    """A frozen layer and its adapter, as torchtune's LoRALinear without dropout."""

    def __init__(self, base: nn.Module, shape: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(shape.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, shape.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.base(x)
        adapted = (ALPHA / RANK) * self.lora_b(self.lora_a(x))
        return out + adapted


class Nf4Linear(nn.Module):
    """torchao's 4-bit weight: two codes to a byte, a byte of scale for each 64, an fp32 one for each 256 of these."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape, blocks = (outputs, inputs), inputs * outputs // 64
        self.register_buffer("codes", torch.zeros(inputs * outputs // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(blocks, dtype=torch.int8))
        self.register_buffer("factors", torch.zeros(-(-blocks // 256)))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("table", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> Any:
        return _Nf4Product.apply(x, self.shape, self.codes, self.scales, self.factors, self.mean, self.table)  # type: ignore[no-untyped-call]


def _dequantized(shape: tuple[int, int], *parts: torch.Tensor) -> torch.Tensor:
    """The weight in bf16: `NF4Tensor.get_original_weight`."""
    codes, scales, factors, mean, table = parts
    blocks = scales.numel()
    per_factor = min(256, blocks)
    scaler = (scales.view(-1, per_factor) / factors.unsqueeze(-1)).flatten().to(table.dtype) + mean
    first = table.index_select(0, (codes >> 4).to(torch.long))
    second = table.index_select(0, (codes & 0b1111).to(torch.long))
    scaled = [(half.view(blocks, -1) * scaler.unsqueeze(-1)).reshape(-1) for half in (first, second)]
    return torch.stack(scaled, dim=-1).reshape(shape).to(torch.bfloat16)


class _Nf4Product(torch.autograd.Function):
    """`LinearNF4`: the weight is made for the product in each direction, and only its codes are kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: tuple[int, int], *parts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parts)
        ctx.shape = shape
        return F.linear(x, _dequantized(shape, *parts))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ _dequantized(ctx.shape, *ctx.saved_tensors), *[None] * 6


class Offloading(nn.Module):
    """A model whose saved activations wait on the CPU for the backward, but for the last few.

    Source: `OffloadActivations` in torchtune/training/_activation_offloading.py.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        with Offloaded():
            return self.model(tokens, positions)


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of one forward. At the backward's first saved tensor, the last few are still on the device."""

    def __init__(self) -> None:
        stash: deque[tuple[int, torch.Tensor]] = deque(maxlen=STASH)
        numbers = iter(range(1 << 30))

        def pack(tensor: torch.Tensor) -> Any:
            if isinstance(tensor, nn.Parameter) or tensor.device.type == "cpu" or tensor.nbytes < 1024:
                return tensor
            number = next(numbers)
            stash.append((number, tensor))
            return number, torch.empty_like(tensor, device="cpu"), tensor.device

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            number, on_cpu, device = packed
            for kept, tensor in list(stash):
                if kept == number:
                    stash.remove((kept, tensor))
                    return tensor
            return torch.empty_like(on_cpu, device=device)

        super().__init__(pack, unpack)
