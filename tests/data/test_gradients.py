"""The gradient of a batch that was split equals that of the whole batch, for each kind of loss, padded or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

from batchfinder.data.padding import padded_length, trim
from batchfinder.data.split import equal_sizes, reorder, split, weigh
from tests.data.nets import Reader, Seer, text

RELATIVE = 1e-6  # what was promised; in fp64 it is about 1e-15
READER, SEER = Reader(), Seer()


def gradients(model, loss_of, parts, factors):
    """Those of the weighted sum of the parts' losses, one after another, as one vector; and the sum itself."""
    model.zero_grad()
    total = 0.0
    for part, factor in zip(parts, factors, strict=True):
        if factor:
            loss = loss_of(part) * factor
            loss.backward()
            total += loss.item()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in found]), total


def check(model, loss_of, batch, parts, weight):
    """The parts make the batch's loss and gradient."""
    whole, loss = gradients(model, loss_of, [batch], [1.0])
    put_together, total = gradients(model, loss_of, parts, weigh(parts, weight))
    assert whole.isfinite().all()
    assert whole.norm() > 0
    assert (put_together - whole).norm() <= RELATIVE * whole.norm()
    assert abs(total - loss) <= RELATIVE * abs(loss)


lengths_of_samples = st.lists(st.integers(2, 9), min_size=7, max_size=12)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        ("sample_mean", "samples"),
        ("token_mean", "tokens"),
        ("next_token_mean", "next_tokens"),
        ("token_sum", "sum"),
        ("token_mean", lambda part: part["labels"].ne(-100).sum()),
    ],
)
@settings(derandomize=True, deadline=None, max_examples=18)
@given(
    lengths=lengths_of_samples,
    parts=st.integers(1, 7),
    padding=st.sampled_from([None, "behind", "in front"]),
    ignored=st.integers(0, 3),
    sort=st.booleans(),
)
def test_text(loss, weight, lengths, parts, padding, ignored, sort):
    """A transformer on text: 1 to 7 micro-batches, each trimmed to its own longest sample, in any order."""
    if padding is None:
        lengths = [max(lengths)] * len(lengths)
    batch = text(lengths, max(lengths) + (padding is not None), padding == "in front", min(ignored, max(lengths) - 1))
    if sort:
        batch = reorder(batch, sorted(range(len(lengths)), key=lengths.__getitem__))
    sizes = equal_sizes(len(lengths), -(-len(lengths) // parts))
    cut = [trim(part) for part in split(batch, sizes)]
    if padding == "behind" or (padding == "in front" and ignored):
        assert all(padded_length(part) < padded_length(batch) for part in cut)
    check(READER, getattr(READER, loss), batch, cut, weight)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [("sample_mean", "samples"), ("sample_sum", "sum"), ("weighted_mean", lambda part: part[1].sum())],
)
@settings(derandomize=True, deadline=None, max_examples=12)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=7))
def test_images(loss, weight, sizes):
    """A conv net on images: 1 to 7 micro-batches of any sizes."""
    samples = sum(sizes)
    images = torch.arange(samples * 3 * 36, dtype=torch.float64).view(samples, 3, 6, 6).mul(0.37).sin()
    batch = (images, torch.arange(1, samples + 1).double())
    check(SEER, getattr(SEER, loss), batch, split(batch, sizes), weight)


def test_a_causal_language_model():
    """GPT-2's own loss, with prompts ignored and one sample of which nothing counts, is a mean over next tokens."""
    config = GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    model = GPT2LMHeadModel(config).double().eval()
    batch = BatchEncoding(text([9, 4, 2, 7, 5], 12, ignored=2))

    def loss_of(part):
        return model(**part).loss

    parts = [trim(part) for part in split(batch, [2, 1, 2])]
    assert [padded_length(part) for part in parts] == [9, 2, 7]
    assert weigh(parts, "next_tokens") == [9 / 17, 0, 8 / 17]
    check(model, loss_of, batch, parts, "next_tokens")
