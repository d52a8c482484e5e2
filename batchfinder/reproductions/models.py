"""The models of the published tables, written for the memory they take. They import torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from batchfinder.models import build_workload
from batchfinder.training.step import Workload

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
        """The sum of both heads' losses; `input_ids` are (batch, sequence), `features` (batch, `TABULAR_FEATURES`)."""
        tabular = self.tabular(self.normalize(features))
        text = self.text_head(self.text(input_ids=input_ids, attention_mask=attention_mask).pooler_output)
        logits = self.merge(torch.cat([tabular, text], dim=-1))
        losses = (nn.functional.cross_entropy(each, labels) for each in (logits, self.tabular_head(tabular)))
        return sum(losses, torch.zeros((), device=logits.device))


def build_multimodal_bert() -> Workload:
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


WORDS, EMBEDDING, HIDDEN = 30000, 500, 1000
LENGTH = 50


class _FusedGruCell(torch.autograd.Function):
    """CUDA's fused GRU cell as it was in 2018: it keeps its workspace.

    PyTorch has since kept both products that go into the cell as well, for a second derivative.
    """

    @staticmethod
    def forward(ctx: Any, *args: torch.Tensor) -> torch.Tensor:
        hidden, workspace = torch.ops.aten._thnn_fused_gru_cell(*args)
        ctx.save_for_backward(workspace)
        state: torch.Tensor = hidden
        return state

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (workspace,) = ctx.saved_tensors
        return torch.ops.aten._thnn_fused_gru_cell_backward(grad, workspace, True)


class _GruCell(nn.GRUCell):
    def forward(self, data: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for_input = torch.mm(data, self.weight_ih.t())
        for_hidden = torch.mm(hidden, self.weight_hh.t())
        state: torch.Tensor = _FusedGruCell.apply(for_input, for_hidden, hidden, self.bias_ih, self.bias_hh)  # type: ignore[no-untyped-call]
        return state


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, EMBEDDING)
        self.gru = nn.GRU(EMBEDDING, HIDDEN, bidirectional=True, batch_first=True)

    def forward(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = [source.size(1)] * source.size(0)
        packed = pack_padded_sequence(self.words(source), lengths, batch_first=True)
        outputs, last = self.gru(packed)
        return pad_packed_sequence(outputs, batch_first=True)[0], last


class _Attention(nn.Module):
    """Additive: a score for each source word, and the sum of their features by these."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(
        self, state: torch.Tensor, keys: torch.Tensor, features: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        scores = self.score(torch.tanh(keys + self.query(state).unsqueeze(1))).squeeze(-1)
        shares = torch.softmax(scores.masked_fill(mask, -math.inf), -1)
        return torch.bmm(shares.unsqueeze(1), features).squeeze(1)


class Seq2Seq(nn.Module):
    """Source and target words in, a score for each word of the vocabulary at each place of the target out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder()
        self.keys = nn.Linear(2 * HIDDEN, HIDDEN)
        self.start = nn.Linear(HIDDEN, HIDDEN)
        self.words = nn.Embedding(WORDS, EMBEDDING)
        self.first = _GruCell(EMBEDDING, HIDDEN)
        self.attention = _Attention()
        self.second = _GruCell(2 * HIDDEN, HIDDEN)
        self.readout = nn.Linear(EMBEDDING + HIDDEN + 2 * HIDDEN, EMBEDDING)
        self.logits = nn.Linear(EMBEDDING, WORDS)
        self.last_logits: torch.Tensor | None = None

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The scores; `source` and `target` are words, (batch, length)."""
        features, last = self.encoder(source)
        mask = source.eq(0)
        state = torch.tanh(self.start(last[-1]))
        keys, words = self.keys(features), self.words(target)
        states, contexts = [], []
        for word in words.unbind(1):
            state = self.first(word, state)
            context = self.attention(state, keys, features, mask)
            state = self.second(context, state)
            states.append(state)
            contexts.append(context)
        all_states, all_contexts = torch.stack(states, 1), torch.stack(contexts, 1)
        read = torch.tanh(self.readout(torch.cat([words, all_states, all_contexts], -1)))
        # The script's variable, which held its logits until those of the next step took their place.
        scores: torch.Tensor = self.logits(read)
        self.last_logits = scores
        return scores


class _Adam(torch.optim.Adam):
    """Adam as it was in 2018: parameter by parameter, and `zero_grad` fills the gradients with zeros."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, foreach=False)

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def build_seq2seq() -> Workload:
    """The model with its loss and its optimizer, on sentences all of whose words are the same."""

    def make_batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch_size, seq_len or LENGTH)
        return torch.full(shape, 2), torch.full(shape, 2)

    def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        _, target = batch
        summed = nn.functional.cross_entropy(logits.view(-1, WORDS), target.reshape(-1), reduction="sum")
        return summed / target.size(0)

    return Workload(Seq2Seq(), make_batch, loss=loss, optimizer=_Adam)
