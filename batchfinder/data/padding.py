"""Padding of a batch: its padded length, the samples' own lengths, and what a micro-batch of it can be trimmed to.

Padding is what an attention mask leaves out of every sample. Cutting it off must not change the loss, so it is cut only
from inputs (`..._ids`, `...mask`, `...bias`, embeddings), which the mask hides there, and from labels that are -100
there. Where anything else is as long as the tokens, the batch stays as it is. Padding in front is cut only where the
batch holds `position_ids` (without, models count positions from the first column) and the labels of the samples' first
tokens are -100: a causal model predicts these from the padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchfinder.data.batch import IGNORED, TOKEN_NAMES, Path, map_leaves, tensors
from batchfinder.data.sequence_dim import SequenceDims, find_sequence

MASK = "attention_mask"


def padded_length(batch: Any, sequence: SequenceDims | None = None) -> int | None:
    """How long the sequences of a batch are, padding included.

    Args:
        sequence: where its sequence is, from `find_sequence` on batches of long and of short samples; without it,
            tensors with the usual names are looked for, then an attention mask.

    Returns:
        Tokens; None if the length is not clear.
    """
    if sequence is not None:
        return sequence.length_of(batch)
    found = find_sequence(batch, batch, guess=False)
    if not isinstance(found, str):
        return found.length
    lengths = {tensor.size(1) for path, tensor in tensors(batch) if _is_mask(path, tensor)}
    return lengths.pop() if len(lengths) == 1 else None


def trim(batch: Any, *, multiple_of: int = 1) -> Any:
    """Cut off the padding that all samples of a micro-batch share.

    Reading the mask of a batch that is on a GPU waits for the GPU.

    Args:
        batch: a micro-batch with `attention_mask`, or several masks such as `decoder_attention_mask`, each for the
            tensors with its prefix.
        multiple_of: leave a length that this divides, where the batch is long enough.

    Returns:
        A batch of the same make with views of its tensors; the batch itself if there is nothing that may be cut.
    """
    cuts: dict[tuple[Path, int], tuple[int, int]] = {}
    found = dict(tensors(batch))
    for path, tensor in found.items():
        if _is_mask(path, tensor):
            cuts |= _cuts(found, path, tensor, multiple_of)
    if not cuts:
        return batch

    def trimmed(path: Path, leaf: Any) -> Any:
        for dim in range(1, leaf.ndim if isinstance(leaf, Tensor) else 0):
            if (path, dim) in cuts:
                leaf = leaf.narrow(dim, *cuts[path, dim])
        return leaf

    return map_leaves(trimmed, batch)


@dataclass(frozen=True)
class _Member:
    """A tensor that a mask is for: where it is, and its name without the mask's prefix and suffix."""

    path: Path
    name: str
    tensor: Tensor

    @property
    def is_mask(self) -> bool:
        return self.name.endswith(("mask", "bias"))

    @property
    def is_tokens(self) -> bool:
        return self.name in TOKEN_NAMES or self.name.endswith(("ids", "embeds"))

    def dims(self, length: int) -> list[int]:
        """The dimensions that are as long: of the last two of a mask or bias, the second of tokens, any of the rest."""
        first = max(1, self.tensor.ndim - 2) if self.is_mask else 1
        last = 2 if self.is_tokens else self.tensor.ndim
        return [dim for dim in range(first, min(last, self.tensor.ndim)) if self.tensor.size(dim) == length]

    def may_be_cut(self, start: int, stop: int) -> bool:
        """Whether what lies outside a span does not count for the loss."""
        if self.is_mask or self.is_tokens:
            return True
        if self.tensor.ndim != 2 or self.tensor.is_floating_point() or self.tensor.is_complex():
            return False
        return bool((self.tensor[:, :start] == IGNORED).all() and (self.tensor[:, stop:] == IGNORED).all())

    def may_lose_front(self, mask: Tensor) -> bool:
        """Whether no label is predicted from the padding in front, as a causal model does with a first token's."""
        if self.is_mask or self.is_tokens or self.tensor.ndim != 2:
            return True
        first = mask.ne(0).long().argmax(1, keepdim=True)
        return bool((self.tensor.gather(1, first) == IGNORED).all())


def _cuts(
    found: dict[Path, Tensor], path: Path, mask: Tensor, multiple_of: int
) -> dict[tuple[Path, int], tuple[int, int]]:
    """Where to begin and how much to keep, by path and dimension, of all that the mask is for; empty for no cut."""
    length = mask.size(1)
    seen = mask.ne(0).any(0).nonzero().flatten().tolist()
    members = [(member, dims) for member in _members(found, path) if (dims := member.dims(length))]
    if not seen or not any(member.is_tokens for member, _ in members) or bool((mask < 0).any()):  # one that is added
        return {}
    start = seen[0] if any(member.name == "position_ids" for member, _ in members) else 0
    if start and not all(member.may_lose_front(mask) for member, _ in members):
        start = 0
    kept = min(length, -(-(seen[-1] + 1 - start) // multiple_of) * multiple_of)
    start = min(start, length - kept)
    if kept == length or not all(member.may_be_cut(start, start + kept) for member, _ in members):
        return {}
    return {(member.path, dim): (start, kept) for member, dims in members for dim in dims}


def _members(found: dict[Path, Tensor], mask: Path) -> Iterator[_Member]:
    masks = [path for path, tensor in found.items() if _is_mask(path, tensor)]
    decodes = any("decoder" in _name(path) for path in found)
    for path, tensor in found.items():
        name = _name(path)
        decoded = decodes and ("decoder" in name or name == "labels")
        fitting = []
        for other in masks:
            before, _, after = _name(other).partition(MASK)
            beside = len(masks) == 1 or other[:-1] == path[:-1]
            named = name.startswith(before) or (decoded and before == "decoder_")
            if beside and named and name.endswith(after) and decoded <= ("decoder" in before):
                fitting.append((len(before + after), other, name.removeprefix(before).removesuffix(after)))
        if fitting:
            _, owner, base = max(fitting, key=lambda item: item[0])
            if owner == mask:
                yield _Member(path, base, tensor)


def _is_mask(path: Path, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and MASK in _name(path)


def _name(path: Path) -> str:
    return str(path[-1]) if path else ""


def sample_lengths(batch: Any) -> list[int] | None:
    """How many tokens each sample needs, its own padding left out.

    They are read from the one attention mask of shape (samples, length) that the batch has. Where sequences are padded
    on the right a sample needs all up to its last token; where they are padded on the left, all from its first.

    Returns:
        Tokens of each sample, at least 1; None where there is no such mask, or padding on both sides.
    """
    masks = [tensor for path, tensor in tensors(batch) if path and path[-1] == MASK and tensor.ndim == 2]
    if len(masks) != 1 or not masks[0].numel():
        return None
    here = masks[0].ne(0)
    length = here.size(1)
    places = torch.arange(length, device=here.device)
    last = torch.where(here, places, 0).amax(1) + 1
    first = torch.where(here, places, length).amin(1) % length  # a sample without tokens has no side
    on_the_left, on_the_right = (first > 0).any(), (last < length).any()
    told = torch.stack([last, length - first]).tolist()  # one wait for the device instead of several
    if bool(on_the_left) and bool(on_the_right):
        return None
    return [max(1, tokens) for tokens in told[1 if bool(on_the_left) else 0]]
