"""Padding of a batch: its padded length, the samples' own lengths, and what a micro-batch of it can be trimmed to.

Padding is what an attention mask leaves out of every sample. Cutting it off must not change the loss, so it is cut only
from inputs (`..._ids`, `...mask`, `...bias`, embeddings), which the mask hides there, and from labels that are -100
there. Where anything else is as long as the tokens, the batch stays as it is. Padding in front is cut only where the
batch holds `position_ids` (without, models count positions from the first column) and the labels of the samples' first
tokens are -100: a causal model predicts these from the padding.
"""

from __future__ import annotations

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
        In tokens; None if the length is not clear.
    """
    if sequence is not None:
        return sequence.length_of(batch)
    found = find_sequence(batch, batch, guess=False)
    if not isinstance(found, str):
        return found.length
    lengths = {tensor.size(1) for path, tensor in tensors(batch) if tensor.ndim == 2 and MASK in str(path[-1:])}
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
    found = dict(tensors(batch))
    # By mask, the paths of the tensors it is for, itself included, with their names less its prefix and suffix.
    names = {path: str(path[-1]) if path else "" for path in found}
    members: dict[Path, list[tuple[Path, str]]] = {
        path: [] for path, tensor in found.items() if tensor.ndim == 2 and MASK in names[path]
    }
    decodes = any("decoder" in name for name in names.values())
    for path, name in names.items():
        decoded = decodes and ("decoder" in name or name == "labels")
        fitting = []
        for mask in members:
            before, _, after = names[mask].partition(MASK)
            beside = len(members) == 1 or mask[:-1] == path[:-1]
            named = name.startswith(before) or (decoded and before == "decoder_")
            if beside and named and name.endswith(after) and decoded <= ("decoder" in before):
                fitting.append((len(before + after), mask, name.removeprefix(before).removesuffix(after)))
        if fitting:
            _, owner, base = max(fitting, key=lambda item: item[0])
            members[owner].append((path, base))
    cuts: dict[tuple[Path, int], tuple[int, int]] = {}
    for mask, masked in members.items():
        cuts |= _cuts(found, found[mask], masked, multiple_of)
    if not cuts:
        return batch

    def trimmed(path: Path, leaf: Any) -> Any:
        for dim in range(1, leaf.ndim if isinstance(leaf, Tensor) else 0):
            if (path, dim) in cuts:
                leaf = leaf.narrow(dim, *cuts[path, dim])
        return leaf

    return map_leaves(trimmed, batch)


def _cuts(
    found: dict[Path, Tensor], mask: Tensor, members: list[tuple[Path, str]], multiple_of: int
) -> dict[tuple[Path, int], tuple[int, int]]:
    """Where to begin and how much to keep, by path and dimension, of all that a mask is for; empty for no cut."""
    length = mask.size(1)
    places: list[tuple[Path, int]] = []  # the dimensions that are as long as the mask
    has_tokens = has_positions = False
    others = []  # what is neither mask nor tokens: labels, whatever their name
    for path, name in members:
        tensor = found[path]
        is_mask = name.endswith(("mask", "bias"))
        is_tokens = name in TOKEN_NAMES or name.endswith(("ids", "embeds"))
        # Of the last two dimensions of a mask or bias, the second of tokens, any of the rest.
        first = max(1, tensor.ndim - 2) if is_mask else 1
        stop = min(2, tensor.ndim) if is_tokens else tensor.ndim
        dims = [dim for dim in range(first, stop) if tensor.size(dim) == length]
        places += [(path, dim) for dim in dims]
        if dims:
            has_tokens |= is_tokens
            has_positions |= name == "position_ids"
            others += [] if is_mask or is_tokens else [tensor]

    seen = mask.ne(0).any(0).nonzero().flatten().tolist()
    if not seen or not has_tokens or bool((mask < 0).any()):  # a mask that is added to attention's scores
        return {}
    start = seen[0] if has_positions else 0
    if start:
        # A causal model predicts a first token's label from the padding in front.
        first_tokens = mask.ne(0).long().argmax(1, keepdim=True)
        if any(other.ndim == 2 and bool((other.gather(1, first_tokens) != IGNORED).any()) for other in others):
            start = 0
    kept = min(length, -(-(seen[-1] + 1 - start) // multiple_of) * multiple_of)
    start = min(start, length - kept)
    if kept == length:
        return {}
    for other in others:
        if other.ndim != 2 or other.is_floating_point() or other.is_complex():
            return {}
        if bool((other[:, :start] != IGNORED).any() or (other[:, start + kept :] != IGNORED).any()):
            return {}
    return dict.fromkeys(places, (start, kept))


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
