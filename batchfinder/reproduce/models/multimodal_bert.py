"""The model of the estimate "Multi-modal BERT": BERT-base for the text beside a small net for a table's row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchfinder.step.workload import Workload
from batchfinder.zoo import build_workload

# The estimate names counts of parameters and one width. With these widths the counts come out: 100,800 for the tabular
# part, 110.6 million for the text tower, 200,100 for the final layer.
TABULAR_FEATURES, TABULAR_EMBEDDING, TEXT_EMBEDDING, CLASSES = 100, 500, 1500, 100


class MultimodalBert(nn.Module):
    """Text and a row of a table in, classes out."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.normalize = nn.BatchNorm1d(TABULAR_FEATURES)
        self.tabular = nn.Linear(TABULAR_FEATURES, TABULAR_EMBEDDING)
        self.tabular_head = nn.Linear(TABULAR_EMBEDDING, CLASSES)
        self.text = text
        self.text_head = nn.Linear(text.config.hidden_size, TEXT_EMBEDDING)
        self.merge = nn.Linear(TABULAR_EMBEDDING + TEXT_EMBEDDING, CLASSES)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, features: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of both heads' losses.

        Args:
            input_ids: whole numbers, (batch, sequence).
            attention_mask: ones where there is text, (batch, sequence).
            features: a table's rows, (batch, `TABULAR_FEATURES`).
            labels: classes, (batch,).
        """
        tabular = self.tabular(self.normalize(features))
        text = self.text_head(self.text(input_ids=input_ids, attention_mask=attention_mask).pooler_output)
        logits = self.merge(torch.cat([tabular, text], dim=-1))
        losses = (nn.functional.cross_entropy(each, labels) for each in (logits, self.tabular_head(tabular)))
        return sum(losses, torch.zeros((), device=logits.device))


def build() -> Workload:
    """The model with batches of random text and rows."""
    text: Any = build_workload("bert-base", attention="sdpa").model.base_model
    config = text.config

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        shape = (batch_size, seq_len or config.max_position_embeddings)
        return {
            "input_ids": torch.randint(config.vocab_size, shape),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            "features": torch.randn(batch_size, TABULAR_FEATURES),
            "labels": torch.randint(CLASSES, (batch_size,)),
        }

    return Workload(MultimodalBert(text), make_batch, max_seq_len=config.max_position_embeddings)
