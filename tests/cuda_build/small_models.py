"""Small models that train the same on any device, for processes on the stub; nothing of batchfinder is needed."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def seeded(seed: int) -> torch.Generator:
    """Random numbers that do not depend on the device."""
    return torch.Generator().manual_seed(seed)


class Convolutions(nn.Module):
    """Batch norm, group norm, a depthwise convolution and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8),
            nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip

    def forward(self) -> torch.Tensor:
        device = next(self.parameters()).device
        images, labels = torch.randn(4, 3, 16, 16, generator=seeded(2)), torch.tensor([0, 1, 2, 1])
        return F.cross_entropy(self.net(images.to(device)), labels.to(device))


class Recurrent(nn.Module):
    """A recurrent layer of cuDNN's on a card."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 16, batch_first=True, **options)
        self.head = nn.Linear(self.layer.hidden_size * (2 if self.layer.bidirectional else 1), 1)

    def forward(self) -> torch.Tensor:
        data = torch.randn(4, 5, 8, generator=seeded(2)).to(self.head.weight.device)
        return self.head(self.layer(data)[0]).square().mean()


class Transformer(nn.Module):
    """PyTorch's own encoder with dropout off, on padded sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self) -> torch.Tensor:
        device = self.head.weight.device
        ids = torch.randint(1, 50, (4, 12), generator=seeded(3)).to(device)
        padding = torch.arange(12, device=device)[None] >= torch.tensor([12, 9, 5, 12], device=device)[:, None]
        logits = self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))
        return F.cross_entropy(logits[~padding], ids[~padding])


class OfTransformers(nn.Module):
    """A model of transformers', by its config, on padded texts or on images."""

    def __init__(self, kind: str, attention: str) -> None:
        super().__init__()
        import transformers

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        text = {"vocab_size": 99, "attn_implementation": attention}
        self.kind = kind
        if kind == "bert":
            dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **text, **dropout))
        elif kind == "gpt2":
            dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "eos_token_id": 0, "bos_token_id": 0}
            config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, **text, **dropout)
            self.model = transformers.GPT2LMHeadModel(config)
        elif kind == "mixtral":
            more = {"num_key_value_heads": 1, "num_local_experts": 4}
            self.model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **text, **more))
        else:
            config = transformers.T5Config(
                vocab_size=99, d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, decoder_start_token_id=0,
                pad_token_id=0, dropout_rate=0.0,
            )  # fmt: skip
            self.model = transformers.T5ForConditionalGeneration(config)

    def forward(self) -> torch.Tensor:
        device = next(self.parameters()).device
        ids, mask = torch.randint(3, 99, (4, 16), generator=seeded(1)), torch.ones(4, 16, dtype=torch.long)
        mask[0, 8:] = 0
        labels = torch.tensor([0, 1, 0, 1]) if self.kind == "bert" else ids
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        return self.model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss


MODELS = {
    "convolutions": Convolutions,
    "transformer": Transformer,
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU),
    "bert eager": lambda: OfTransformers("bert", "eager"),
    "bert sdpa": lambda: OfTransformers("bert", "sdpa"),
    "gpt2 sdpa": lambda: OfTransformers("gpt2", "sdpa"),
    "t5": lambda: OfTransformers("t5", "sdpa"),
    "mixtral": lambda: OfTransformers("mixtral", "sdpa"),
}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
}


def losses(name: str, optimizer: str, device: str, steps: int = 4) -> list[float]:
    """Of so many steps, with the gradients clipped."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    seen = []
    for _ in range(steps):
        loss = model()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()
        stepping.zero_grad()
        seen.append(loss.item())
    return seen


def all_losses(device: str) -> dict[str, list[float]]:
    """Of every model with an optimizer or three."""
    which = {name: ["adamw"] for name in MODELS} | {"transformer": list(OPTIMIZERS)}
    return {f"{name}, {each}": losses(name, each, device) for name, some in which.items() for each in some}


if __name__ == "__main__":
    print(json.dumps(all_losses(sys.argv[1])))
