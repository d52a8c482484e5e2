"""Megatron Core's GPT and T5 of `--transformer-impl local`, one rank of tensor parallelism, as factories.

Written after megatron/core/transformer/{dot_product_attention,attention,mlp,transformer_layer}.py,
megatron/core/fusions/{fused_softmax,fused_bias_gelu,fused_bias_dropout}.py, megatron/core/tensor_parallel/
{layers,cross_entropy}.py and megatron/core/optimizer at
https://github.com/NVIDIA/Megatron-LM/tree/d98e8a64ddf34856e74b24714e3bedb2f5a39553. Activations are (tokens, batch,
width). A kernel of apex or Transformer Engine is a function here that makes what the kernel makes. A rank of tensor
parallelism has its part of the heads, of the feed-forward layers' inner width and of the vocabulary, and every norm and
residual whole; what it sums with the other ranks is summed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from batchfinder.training.step import Workload

DROPOUT = 0.1
WORDS, WIDTH, LAYERS = 50257, 512, 12
"""Of GPT."""
_Buffers = dict[str, torch.Tensor]  # `GlobalMemoryBuffer`: the largest that was asked for, and kept


class _Softmax(torch.autograd.Function):
    """apex's scaled and masked softmax: it keeps its output, and its backward writes into the gradient it is given."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(shares := torch.empty_like(scores))
        return shares

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _BiasGelu(torch.autograd.Function):
    """`GeLUFunction`, compiled to a kernel each way: it keeps what comes in."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.empty_like(gradient)
        return made, made.sum((0, 1))


class _CrossEntropy(torch.autograd.Function):
    """`_VocabParallelCrossEntropy`: logits in fp32 become the softmax, and that the gradient, all in one tensor."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = logits.float()
        most = wide.max(-1)[0]
        wide -= most.unsqueeze(-1)
        torch.exp(wide, out=wide)
        total = wide.sum(-1)
        wide.div_(total.unsqueeze(-1))
        context.save_for_backward(wide, labels)
        return torch.log(total) - most

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = context.saved_tensors[0]
        # `custom_bwd` of autograd gives back the logits' type.
        return wide.mul_(gradient.unsqueeze(-1)), None


class Attention(nn.Module):
    """Unfused attention with dropout of its shares; over `memory` where it `crosses`."""

    def __init__(self, width: int, heads: int, ranks: int, buffers: _Buffers, crosses: bool = False) -> None:
        super().__init__()
        part = width // ranks
        self.heads, self.shared = heads // ranks, buffers
        self.projected = nn.Linear(width, part if crosses else 3 * part)
        self.of_memory = nn.Linear(width, 2 * part) if crosses else None
        self.out = nn.Linear(part, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Without the bias of its last product, which comes with the dropout."""
        tokens, batch, _ = x.shape
        query = self.projected(x).view(tokens, batch * self.heads, -1)
        if self.of_memory is None:
            query, key, value = query.chunk(3, dim=2)
        else:
            assert memory is not None
            key, value = self.of_memory(memory).view(memory.size(0), batch * self.heads, -1).chunk(2, dim=2)
        shape = batch * self.heads, tokens, key.size(0)
        kept = self.shared.get("scores")
        if kept is None or kept.numel() < shape[0] * shape[1] * shape[2]:
            self.shared["scores"] = torch.empty(shape[0] * shape[1] * shape[2], dtype=x.dtype, device=x.device)
        buffer = self.shared["scores"][: shape[0] * shape[1] * shape[2]].view(shape)
        scores = torch.baddbmm(buffer, query.transpose(0, 1), key.permute(1, 2, 0), beta=0.0)
        shares = _Softmax.apply(scores)
        del scores
        mixed = torch.bmm(F.dropout(shares, DROPOUT), value.transpose(0, 1))
        mixed = mixed.view(batch, self.heads, tokens, -1).permute(2, 0, 1, 3).contiguous()
        return F.linear(mixed.view(tokens, batch, -1), self.out.weight)


class Layer(nn.Module):
    """`TransformerLayer`: attention, over a memory too where it `crosses`, and a feed-forward layer."""

    def __init__(self, width: int, heads: int, ranks: int, buffers: _Buffers, crosses: bool = False) -> None:
        super().__init__()
        self.attention = Attention(width, heads, ranks, buffers)
        self.across = Attention(width, heads, ranks, buffers, crosses=True) if crosses else None
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm_across = nn.LayerNorm(width) if crosses else None
        self.up, self.down = nn.Linear(width, 4 * width // ranks), nn.Linear(4 * width // ranks, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.norm_1(x)) + self.attention.out.bias, DROPOUT)
        if self.across is not None and self.norm_across is not None:
            x = x + F.dropout(self.across(self.norm_across(x), memory) + self.across.out.bias, DROPOUT)
        inner = _BiasGelu.apply(F.linear(self.norm_2(x), self.up.weight), self.up.bias)
        return x + F.dropout(F.linear(inner, self.down.weight) + self.down.bias, DROPOUT)


class Embedding(nn.Module):
    """Tokens' and positions' embeddings of (batch, tokens), with dropout."""

    def __init__(self, vocabulary: int, width: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        embedded = self.tokens.weight[tokens] + self.positions(places)
        return F.dropout(embedded.transpose(0, 1).contiguous(), DROPOUT)


class Gpt(nn.Module):
    """`GPTModel`: the losses of (batch, tokens); the head is the embedding."""

    def __init__(self, words: int, width: int, heads: int, layers: int, positions: int, ranks: int) -> None:
        super().__init__()
        buffers: _Buffers = {}
        self.embedding = Embedding(padded(words, ranks), width, positions)
        self.layers = nn.ModuleList(Layer(width, heads, ranks, buffers) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.tokens.weight)
        losses: torch.Tensor = _CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1).contiguous()


class T5(nn.Module):
    """`T5Model`: the losses of the decoder's tokens, whose head has a bias of its own and is the embedding else."""

    def __init__(self, words: int, width: int, heads: int, layers: int, positions: int, ranks: int) -> None:
        super().__init__()
        buffers: _Buffers = {}
        self.embedding = Embedding(padded(words, ranks), width, positions)
        self.encoder = nn.ModuleList(Layer(width, heads, ranks, buffers) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, ranks, buffers, crosses=True) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(padded(words, ranks)))

    def forward(self, tokens: torch.Tensor, answer: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        memory = self.embedding(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self.embedding(answer)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = F.linear(self.decoder_norm(x), self.embedding.tokens.weight, self.bias)
        losses: torch.Tensor = _CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1).contiguous()


class MixedPrecisionAdam(torch.optim.Optimizer):
    """Adam on fp32 copies of 16-bit parameters, of which each GPU has an Nth, and a buffer of all gradients.

    `Float16OptimizerWithFloat16Params`, and `DistributedOptimizer` for more than one GPU; gradients go into the buffer
    as they are made (`DistributedDataParallel`, `_make_backward_post_hook`).

    Args:
        gpus: over how many the copies and the state are spread.
        wide: whether the buffer is in fp32 (`accumulate_allreduce_grads_in_fp32`), and not in the parameters' type.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], gpus: int, wide: bool) -> None:
        super().__init__(parameters, {})
        self.trained = list(self.param_groups[0]["params"])
        first = self.trained[0]
        total = sum(parameter.numel() for parameter in self.trained)
        self.buffer = torch.zeros(total, dtype=torch.float32 if wide else first.dtype, device=first.device)
        self.gpus, self.wide = gpus, wide
        place = 0
        for parameter in self.trained:
            self.state[parameter]["main"] = self._part(parameter)
            parameter.register_post_accumulate_grad_hook(
                partial(self._collect, self.buffer[place : place + parameter.numel()])
            )
            place += parameter.numel()
        self.main_gradients: list[torch.Tensor] = []

    def _part(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.zeros(-(-parameter.numel() // self.gpus), dtype=torch.float32, device=parameter.device)

    @staticmethod
    def _collect(place: torch.Tensor, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        place.add_(parameter.grad.view(-1))
        parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.main_gradients.clear()
        self.buffer.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if not self.wide:
            self.main_gradients.extend(self._part(parameter) for parameter in self.trained)
        for parameter in self.trained:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter] |= {"exp_avg": self._part(parameter), "exp_avg_sq": self._part(parameter)}


def padded(words: int, ranks: int) -> int:
    """A rank's part of the vocabulary, which is filled up to a multiple of 128 for each (`vocab_size_with_padding`)."""
    return -(-words // (128 * ranks)) * 128


def gpt(optimizers: int = 1, ranks: int = 1, wide: bool = False) -> Workload:
    """gpt3_mcore_*: GPT-2's vocabulary.

    Args:
        optimizers: GPUs over which the distributed optimizer is spread; 1 without it.
        ranks: of tensor parallelism.
        wide: whether gradients are summed in fp32, as of bf16 parameters and not of fp16 ones.
    """
    model = Gpt(WORDS, WIDTH, heads=8, layers=LAYERS, positions=1024, ranks=ranks)
    return Workload(
        model, _batch_of_gpt, _mean, partial(MixedPrecisionAdam, gpus=optimizers, wide=wide), sums_in_place=True
    )


def _batch_of_gpt(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Token ids, the labels and the mask of later tokens, which the fused softmax does not read."""
    length = seq_len or 1
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    mask = torch.ones(batch_size, 1, length, length, dtype=torch.bool)
    return {"tokens": tokens, "labels": tokens.clone(), "mask": mask}


def t5(ranks: int = 1) -> Workload:
    """t5_mcore_*_vp1: bf16; the vocabulary is that of bert-large-cased with 100 words and two marks more."""
    model = T5(words=28996 + 102, width=768, heads=12, layers=12, positions=512, ranks=ranks)
    return Workload(model, _batch_of_t5, _mean, partial(MixedPrecisionAdam, gpus=1, wide=True), sums_in_place=True)


def _batch_of_t5(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Tokens for the encoder, a quarter of them for the decoder, and three masks."""
    length = seq_len or 1
    answer = torch.zeros(batch_size, length // 4, dtype=torch.int64)
    sizes = {"encoder": (length, length), "decoder": (length // 4, length // 4), "between": (length // 4, length)}
    masks = {name: torch.ones(batch_size, *size, dtype=torch.bool) for name, size in sizes.items()}
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    return {"tokens": tokens, "answer": answer, "labels": answer.clone(), **masks}


def _mean(losses: torch.Tensor, batch: Any) -> torch.Tensor:
    return losses.view(-1).float().mean()
