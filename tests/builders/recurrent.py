"""Recurrent models whose memory can be counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from batchfinder.training.step import Workload

FEATURES, HIDDEN = 48, 64


class Layers(nn.Module):
    """Recurrent layers and nothing else.

    Args:
        kind: `GRU`, `LSTM` or `RNN`.
        packed: whether the sequences are packed before and unpacked after.
        tied: whether two of the weights are one.
        options: the layers' own.
    """

    def __init__(self, kind: str, packed: bool = False, tied: bool = False, **options: Any) -> None:
        super().__init__()
        options = {"input_size": FEATURES, "hidden_size": HIDDEN, **options}
        self.layers = getattr(nn, kind)(**options)
        self.packed = packed
        if tied:
            self.layers.bias_hh_l0 = self.layers.bias_ih_l0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            out: torch.Tensor = self.layers(x)[0]
            return out
        first = self.layers.batch_first
        lengths = [x.size(1 if first else 0)] * x.size(0 if first else 1)
        out = self.layers(pack_padded_sequence(x, lengths, batch_first=first))[0]
        return pad_packed_sequence(out, batch_first=first)[0]


def layers(kind: str, **options: Any) -> Workload:
    """Layers on sequences of vectors; the batch comes first where they say so."""
    model = Layers(kind, **options)
    features = model.layers.input_size

    def make_batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
        steps = seq_len or 1
        shape = (batch_size, steps) if model.layers.batch_first else (steps, batch_size)
        return (torch.zeros(*shape, features),)

    return Workload(model, make_batch)


def gru_cell() -> Workload:
    """One step of a GRU cell."""
    return Workload(nn.GRUCell(FEATURES, HIDDEN), lambda batch_size, seq_len: (torch.zeros(batch_size, FEATURES),))
