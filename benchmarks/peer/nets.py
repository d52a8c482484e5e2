"""What is trained: two real nets, and a small one for steps whose memory is simulated. Each returns its own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

VOCABULARY = 256


class Transformer(nn.Module):
    """Two encoder layers with dropout, mean pooling, and a classifier; the first token stands for the label."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The loss of (batch, length) token numbers."""
        return nn.functional.cross_entropy(self.head(self.encoder(self.embed(input_ids)).mean(1)), input_ids[:, 0] % 10)


class ConvNet(nn.Module):
    """Three convolutions with batch normalisation, dropout, and a classifier; the first pixel's sign is the label."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 8, 16, 16)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
                for before, after in pairwise(channels)
            ),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of (batch, 3, height, width) images."""
        return nn.functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), (x[:, 0, 0, 0] > 0).long())


class Small(nn.Module):
    """Has all that a search may change: weights, buffers, an optimizer's state, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of (batch, 4) numbers. Batch normalisation needs two samples, so a single one is repeated."""
        return self.layers(x if len(x) > 1 else x.repeat(2, 1)).square().mean()


@dataclass(frozen=True)
class Net:
    """A net and its samples.

    Attributes:
        build: makes it.
        sample: one sample's dimensions.
        integer: whether samples are token numbers.
    """

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    integer: bool = False

    def batch(self, batch_size: int) -> torch.Tensor:
        """Random samples."""
        if self.integer:
            return torch.randint(0, VOCABULARY, (batch_size, *self.sample))
        return torch.randn(batch_size, *self.sample)


NETS = {
    "transformer": Net(Transformer, (512,), integer=True),
    "conv net": Net(ConvNet, (3, 384, 384)),
    "small": Net(Small, (4,)),
}
