"""Synthetic micro-batches: random token ids, pixels or waves, of the shapes that training has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from batchfinder.errors import InvalidValue
from batchfinder.models.catalog import Label, MediaTensor

TRANSCRIPT_TOKENS = 40
"""Labels of a recording whose own length is what a sequence length counts: about ten seconds of speech."""


@dataclass(frozen=True)
class TextBatches:
    """`make_batch` for a model that reads token ids.

    Attributes:
        vocab_size: token ids are below this.
        labels: the tensors the loss is computed from; their bounds are numbers or `seq_len`.
        attention_mask: whether a mask of ones is passed.
        keyword: the name the ids are passed by; None passes them as the only positional argument, and an empty one
            leaves them out, so that there are labels alone.
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
        batch = {self.keyword: ids} if self.keyword else {}
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


@dataclass(frozen=True)
class MediaBatches:
    """`make_batch` for a model that reads an image or a recording with each sample, and text as a rule.

    Attributes:
        tensors: what is read besides text.
        sizes: the dimensions by name, of one sample.
        text: makes the text and the labels; None for labels alone.
        labels: the tensors of labels where there is no text.
        arguments: those of the model's `forward`; others are left out.
        placeholder: the token that stands for a part of the image or recording; None for a model
            whose text has no such token.
        placeholders: how many of it a sample has, before its last token.
        token_kinds: arguments that say which tokens are placeholders.
        length: the size that a sequence length stands for; empty where it counts the text's tokens.
    """

    tensors: tuple[MediaTensor, ...]
    sizes: dict[str, int]
    arguments: frozenset[str]
    text: TextBatches | None = None
    placeholder: int | None = None
    placeholders: int = 0
    token_kinds: tuple[str, ...] = ()
    length: str = ""

    def __call__(self, batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors by name, those of whole samples with the batch first.

        Raises:
            InvalidValue: no sequence length, one outside the model's positions, or no room for the placeholders.
        """
        batch = self.media(batch_size, seq_len)
        if self.text is None:
            return batch
        if seq_len is not None and 0 < seq_len <= self.placeholders:
            expected = f"more than {self.placeholders} tokens, which stand for the image or recording of a sample"
            raise InvalidValue("seq_len", seq_len, expected)
        of_transcript = bool(self.length) or (seq_len is None and not self.text.keyword)
        written = self.text(batch_size, TRANSCRIPT_TOKENS if of_transcript else seq_len)
        assert isinstance(written, dict)
        if self.placeholders and "input_ids" in written:
            ids = written["input_ids"]
            stands = torch.zeros_like(ids, dtype=torch.bool)
            stands[:, -self.placeholders - 1 : -1] = True
            if self.placeholder is not None:
                ids.masked_fill_(ids == self.placeholder, 0 if self.placeholder else 1)
                ids.masked_fill_(stands, self.placeholder)
            batch |= {name: stands.to(torch.int64) for name in self.token_kinds if name in self.arguments}
        return {**{name: tensor for name, tensor in written.items() if name in self.arguments}, **batch}

    def media(self, batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        """Return what is read besides text."""
        generator = torch.Generator(device="cpu").manual_seed(0)  # so that no generator of the user's moves
        sizes = {**self.sizes, "batch": batch_size}
        if seq_len is not None:
            sizes[self.length or "seq_len"] = seq_len
        return {tensor.name: _medium(tensor, sizes, generator) for tensor in self.tensors}


def product(of: int | str, sizes: dict[str, int]) -> int:
    """The number that stands in `MediaTensor`: itself, or a product of numbers and of sizes by name."""
    if isinstance(of, int):
        return of
    return math.prod(int(factor) if factor.isdigit() else sizes[factor] for factor in of.split("*"))


def _medium(tensor: MediaTensor, sizes: dict[str, int], generator: torch.Generator) -> torch.Tensor:
    dtype = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}[tensor.kind]
    shape = [product(each, sizes) for each in tensor.shape]
    if tensor.rows:
        row = torch.tensor([product(each, sizes) for each in tensor.rows], dtype=dtype, device="cpu")
        return row.expand(shape).contiguous()
    if tensor.fill is not None:
        return torch.full(shape, tensor.fill, dtype=dtype, device="cpu")
    return torch.rand(shape, generator=generator, device="cpu").float()


def _integers(below: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(below, shape, generator=generator, dtype=torch.int64, device="cpu")
