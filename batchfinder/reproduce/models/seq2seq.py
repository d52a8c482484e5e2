"""The translation model of the thread "High GPU memory usage problem", written down from its description."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from batchfinder.step.workload import Workload

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
        """Return the scores.

        Args:
            source: words, (batch, source length).
            target: words, (batch, target length).
        """
        features, last = self.encoder(source)
        mask = source.eq(0)
        # The script's variable, which held its logits until those of the next step took their place.
        self.last_logits = self._decode(features, torch.tanh(self.start(last[-1])), mask, target)
        return self.last_logits

    def _decode(
        self, features: torch.Tensor, state: torch.Tensor, mask: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
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
        scores: torch.Tensor = self.logits(read)
        return scores


class _Adam(torch.optim.Adam):
    """Adam as it was in 2018: parameter by parameter, and `zero_grad` fills the gradients with zeros."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, foreach=False)

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def _loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    _, target = batch
    summed = nn.functional.cross_entropy(logits.view(-1, WORDS), target.reshape(-1), reduction="sum")
    return summed / target.size(0)


def build() -> Workload:
    """The model with its loss and its optimizer, on sentences all of whose words are the same."""

    def make_batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch_size, seq_len or LENGTH)
        return torch.full(shape, 2), torch.full(shape, 2)

    return Workload(Seq2Seq(), make_batch, loss=_loss, optimizer=_Adam)
