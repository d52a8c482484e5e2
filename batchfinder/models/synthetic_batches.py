"""Synthetic micro-batches: random token ids or pixels, of the shapes that training has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchfinder.errors import InvalidValue
from batchfinder.models.catalog import Label


@dataclass(frozen=True)
class TextBatches:
    """`make_batch` for a model that reads token ids.

    Attributes:
        vocab_size: token ids are below this.
        labels: the tensors the loss is computed from; their bounds are numbers or `seq_len`.
        attention_mask: whether a mask of ones is passed.
        keyword: the name the ids are passed by; None passes them as the only positional argument.
        max_seq_len: the longest sequence allowed, in tokens; None where there is no limit.
    """

    vocab_size: int
    labels: tuple[Label, ...] = ()
    attention_mask: bool = False
    keyword: str | None = "input_ids"
    max_seq_len: int | None = None

    def __call__(self, batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor] | torch.Tensor:
        """Return int64 tensors of (batch_size, seq_len), and of (batch_size,) for labels of whole samples.

        Raises:
            InvalidValue: no sequence length, or one outside the model's positions.
        """
        if seq_len is None or seq_len < 1 or (self.max_seq_len is not None and seq_len > self.max_seq_len):
            most = "" if self.max_seq_len is None else f" up to the {self.max_seq_len} positions the model has"
            raise InvalidValue("seq_len", seq_len, f"a number of tokens from 1{most}")
        generator = torch.Generator(device="cpu").manual_seed(0)  # so that no generator of the user's moves
        ids = _integers(self.vocab_size, (batch_size, seq_len), generator)
        if self.keyword is None:
            return ids
        batch = {self.keyword: ids}
        if self.attention_mask:
            batch["attention_mask"] = torch.ones((batch_size, seq_len), dtype=torch.int64, device="cpu")
        for label in self.labels:
            shape = (batch_size,) if label.each == "sample" else (batch_size, seq_len)
            below = label.below if isinstance(label.below, int) else seq_len
            batch[label.name] = _integers(below, shape, generator)
        return batch


@dataclass(frozen=True)
class PackedBatches:
    """`make_batch` for a causal model that reads samples packed one after the other, without padding.

    The tensors are those of transformers' `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`.

    Attributes:
        vocab_size: token ids are below this.
        max_seq_len: the longest sample allowed, in tokens; None where there is no limit.
    """

    vocab_size: int
    max_seq_len: int | None = None

    def __call__(self, batch_size: int, seq_len: int | None) -> dict[str, Any]:
        """Return `batch_size` samples of `seq_len` tokens in one row.

        Token ids, labels (ignored where a sample starts) and positions are int64 of (1, batch_size x seq_len), where
        samples end is int32 of (batch_size + 1,), and the longest sample's length is a number.

        Raises:
            InvalidValue: no sequence length, or one outside the model's positions.
        """
        labels = Label("labels", "token", self.vocab_size)
        rows: Any = TextBatches(self.vocab_size, (labels,), max_seq_len=self.max_seq_len)(batch_size, seq_len)
        length = int(seq_len or 0)
        positions = torch.arange(length, device="cpu").repeat(batch_size)
        rows["labels"][:, 0] = -100
        ends = torch.arange(0, batch_size * length + 1, length, dtype=torch.int32, device="cpu")
        packed: dict[str, Any] = {name: tensor.reshape(1, -1) for name, tensor in rows.items()}
        packed |= {"position_ids": positions[None], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone()}
        return packed | {"max_length_q": length, "max_length_k": length}


@dataclass(frozen=True)
class ImageBatches:
    """`make_batch` for a model that classifies square images; the sequence length is the side in pixels.

    Attributes:
        num_labels: class indices are below this.
        channels: colours.
        side: the side that `None` stands for, in pixels.
        smallest_side: smallest side allowed.
        multiple: sides must be multiples of this, the patch of a vision transformer.
        resizable: whether sides other than `side` are allowed.
        interpolate: whether the model must be told to interpolate its positions (it does so where the side differs).
    """

    num_labels: int
    channels: int = 3
    side: int = 224
    smallest_side: int = 1
    multiple: int = 1
    resizable: bool = True
    interpolate: bool = False

    def __call__(self, batch_size: int, seq_len: int | None) -> dict[str, Any]:
        """Return float32 `pixel_values` (batch_size, channels, side, side) and int64 `labels` (batch_size,).

        Raises:
            InvalidValue: the model does not take images of this side.
        """
        side = self.side if seq_len is None else seq_len
        if side != self.side and not self.resizable:
            raise InvalidValue("seq_len", side, f"an image side of {self.side} pixels, the only one the model takes")
        if side < self.smallest_side or side % self.multiple:
            every = "" if self.multiple == 1 else f", a multiple of the patch of {self.multiple}"
            raise InvalidValue("seq_len", side, f"an image side of at least {self.smallest_side} pixels{every}")
        generator = torch.Generator(device="cpu").manual_seed(0)  # so that no generator of the user's moves
        pixels = torch.rand((batch_size, self.channels, side, side), generator=generator, device="cpu")
        batch = {"pixel_values": pixels.float(), "labels": _integers(self.num_labels, (batch_size,), generator)}
        return {**batch, "interpolate_pos_encoding": True} if self.interpolate else batch


def _integers(below: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(below, shape, generator=generator, dtype=torch.int64, device="cpu")
