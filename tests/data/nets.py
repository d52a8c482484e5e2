"""What is split in these tests: a transformer that reads padded text, and a conv net, with losses of each kind."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

WORDS = 11


class Reader(nn.Module):
    """A transformer in fp64 with an attention mask and, where the batch gives them, positions."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            self.words = nn.Embedding(WORDS, 8, dtype=torch.float64)
            self.places = nn.Embedding(32, 8, dtype=torch.float64)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True, dtype=torch.float64)
            self.head = nn.Linear(8, WORDS, dtype=torch.float64)

    def forward(self, batch):
        """The states of all tokens."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        places = batch.get("position_ids", torch.arange(ids.size(1)).expand_as(ids))
        return self.layer(self.words(ids) + self.places(places), src_key_padding_mask=mask == 0)

    def sample_mean(self, batch):
        """A mean over samples of what each one's tokens say together."""
        mask = batch["attention_mask"][..., None].double()
        pooled = (self(batch) * mask).sum(1) / mask.sum(1)
        return cross_entropy(self.head(pooled), (batch["input_ids"] * batch["attention_mask"]).amax(1))

    def token_mean(self, batch):
        """A mean over the tokens whose label counts."""
        return cross_entropy(self.head(self(batch)).flatten(0, 1), batch["labels"].flatten())

    def next_token_mean(self, batch):
        """The same, each label one token later."""
        return cross_entropy(self.head(self(batch))[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def token_sum(self, batch):
        """A sum over the tokens whose label counts."""
        return cross_entropy(self.head(self(batch)).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class Seer(nn.Module):
    """A conv net in fp64."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            self.net = nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 3, stride=2)
            ).double()

    def sample_mean(self, batch):
        """A mean over samples."""
        images, targets = batch
        return mse_loss(self.net(images).mean((1, 2, 3)), targets)

    def sample_sum(self, batch):
        """A sum over samples."""
        images, targets = batch
        return mse_loss(self.net(images).mean((1, 2, 3)), targets, reduction="sum")

    def weighted_mean(self, batch):
        """A mean over what each sample weighs."""
        images, targets = batch
        return ((self.net(images).mean((1, 2, 3)) - targets) ** 2 * targets).sum() / targets.sum()


def text(lengths, width, left=False, ignored=0):
    """Padded text; the first labels of each sample may be ignored as a prompt's are."""
    places = torch.arange(width) - (torch.tensor([[width - length] for length in lengths]) if left else 0)
    seen = (places >= 0) & (places < torch.tensor(lengths)[:, None])
    ids = (7 * places + 3 * torch.arange(len(lengths))[:, None] + places * places) % WORDS
    batch = {
        "input_ids": torch.where(seen, ids, 0),
        "attention_mask": seen.long(),
        "labels": torch.where(seen & (places >= ignored), (ids * 5 + 1) % WORDS, -100),
    }
    return batch | {"position_ids": places.clamp(min=0)} if left else batch
