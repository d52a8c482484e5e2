"""Losses and modules that mix the samples of a batch are found, by name or by their numbers, and wrong weights too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from batchfinder.data.separability import check_separable, not_separable
from batchfinder.errors import InvalidValue, NotSplittable
from tests.data.nets import Reader, text


class SyncedBatchNorm(nn.Module):
    """A library's own."""


class FrozenBatchNorm2d(nn.Module):
    """As in torchvision: statistics that do not change."""


def layers():
    """Some of which normalise over the batch."""
    return nn.ModuleDict(
        {
            "bn": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
            "untracked": nn.BatchNorm1d(4, track_running_stats=False),
            "sync": nn.SyncBatchNorm(4),
            "own": SyncedBatchNorm(),
            "frozen": FrozenBatchNorm2d(),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
            "spectral_of_old": nn.utils.spectral_norm(nn.Linear(3, 4)),
            "group": nn.GroupNorm(2, 4),
            "instance": nn.InstanceNorm1d(4, track_running_stats=True),
            "layer": nn.LayerNorm(4),
        }
    )


def test_modules():
    """BatchNorms of any kind in train mode, and spectral norms, which change with every forward."""
    model = layers()
    assert not_separable(model) == [
        "bn.1 (BatchNorm2d)",
        "untracked (BatchNorm1d)",
        "sync (SyncBatchNorm)",
        "own (SyncedBatchNorm)",
        "spectral.parametrizations.weight.0 (_SpectralNorm)",
        "spectral_of_old (Linear)",
    ]
    assert not_separable(model.eval()) == ["untracked (BatchNorm1d)"]
    assert not_separable(nn.BatchNorm1d(3)) == ["the model itself (BatchNorm1d)"]


BATCH = {"x": torch.arange(18.0).view(6, 3) % 5, "y": torch.arange(6.0) % 4}
PROJECT = torch.tensor([[0.3, -0.2], [0.1, 0.4], [-0.5, 0.2]])


def mean(batch):
    """A mean over samples."""
    return mse_loss(batch["x"].mean(1), batch["y"])


def total(batch):
    """A sum over samples."""
    return mse_loss(batch["x"].mean(1), batch["y"], reduction="sum")


def contrastive(batch):
    """In-batch negatives: each sample's own neighbour among all in the batch."""
    left = normalize(batch["x"] @ PROJECT, dim=1)
    right = normalize((batch["x"] + batch["y"][:, None]) @ PROJECT, dim=1)
    return cross_entropy(left @ right.T, torch.arange(len(left)))


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (mean, "samples"),
        (total, "sum"),
        (lambda batch: 0 * total(batch), "samples"),
        (lambda batch: total(batch) / (1 + batch["y"]).sum(), lambda part: (1 + part["y"]).sum()),
    ],
)
def test_right(loss, weight):
    """Nothing is said where the parts make the whole."""
    assert check_separable(loss, BATCH, weight) is None


def test_a_wrong_weight():
    """The weight that would do is named, with the numbers."""
    assert check_separable(total, BATCH, "samples") == (
        "the loss of 4 samples is 4.55556, and the losses of 2 and 2 of them, put together by weight='samples', make"
        " 2.27778, 50 % less. With weight='sum' it would be the same: pass that"
    )
    assert check_separable(mean, BATCH, "sum") == (
        "the loss of 4 samples is 1.13889, and the losses of 2 and 2 of them, put together by weight='sum', make"
        " 2.27778, 100 % more. With weight='samples' it would be the same: pass that"
    )


def test_tokens():
    """A mean over tokens is told from one over samples, and one over next tokens from both."""
    model, batch = Reader().eval(), text([3, 7, 5, 2], 7)
    assert check_separable(model.token_mean, batch, "tokens") is None
    assert check_separable(model.next_token_mean, batch, "next_tokens") is None
    for lengths in ([3, 7, 5, 2], [2, 7, 7, 2]):  # the halves of the latter have as many tokens each
        said = check_separable(model.token_mean, text(lengths, 7), "samples")
        assert said is not None
    assert said.endswith(" With weight='tokens' it would be the same: pass that")
    said = check_separable(model.next_token_mean, batch, lambda part: len(part["input_ids"]))
    assert said is not None
    assert "put together by your weight=, make" in said
    assert said.endswith(" With weight='next_tokens' it would be the same: pass that")


def test_samples_that_are_compared():
    """In-batch negatives cannot be split by any weight, and that is said."""
    said = check_separable(contrastive, BATCH)
    assert said is not None
    assert said.startswith(
        "the loss of 4 samples is 1.04373, and the losses of 2 and 2 of them, put together by weight='samples', make"
        " 0.338404, 68 % less. "
    )
    assert said.endswith(
        " % less. A loss that compares the samples of a batch with each other (in-batch negatives) cannot be split; one"
        " that is a mean over something else can, with weight= a function that returns how much of that a micro-batch"
        " has"
    )


def test_a_part_without_a_finite_loss():
    """A loss that is NaN in the halves alone differs from the whole's, and that is said."""
    nothing = torch.tensor(torch.nan)
    said = check_separable(lambda batch: nothing if len(batch["y"]) == 2 else total(batch), BATCH, "sum")
    assert said is not None
    assert said.startswith("the loss of 4 samples is ")


def test_padding_that_counts():
    """A model that looks at what its mask leaves out has another loss once the padding is gone; this is said."""
    model, batch = Reader().eval(), text([8, 3, 6, 8], 8)

    def careless(batch):
        return model.sample_mean({**batch, "attention_mask": torch.ones_like(batch["attention_mask"])})

    assert check_separable(model.sample_mean, batch) is None
    assert check_separable(careless, text([8, 8, 8, 8], 8)) is None
    said = check_separable(careless, batch)
    assert said is not None
    assert said.startswith(
        "the padding that all samples of a micro-batch share is cut off, and here that makes a loss of"
    )
    assert said.endswith(
        ": something looks at tokens that attention_mask leaves out. Pass the mask to every module that needs it; or"
        " give it another name in the batch, and nothing is cut off"
    )


def test_losses_that_cannot_be_compared():
    """A loss that draws random numbers, one that is not finite, and a single sample are not compared."""
    assert check_separable(lambda batch: total(batch) * torch.rand(()), BATCH, "samples") is None
    assert check_separable(lambda batch: total(batch) * float("nan"), BATCH, "samples") is None
    assert check_separable(total, {"x": torch.ones(1, 3), "y": torch.ones(1)}, "samples") is None


def test_no_trace():
    """Random numbers go on as if nothing had been looked at, and no graph is made."""
    seen = []

    def loss(batch):
        seen.append((torch.is_grad_enabled(), random.random(), np.random.rand(), float(torch.rand(()))))
        return mean(batch)

    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    check_separable(loss, BATCH)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]
    assert seen[0] == seen[2] == seen[-1] != seen[1]
    assert not any(enabled for enabled, *_ in seen)


def test_tolerance():
    """What kernels round differently is no difference; how much that is may be said."""

    def rough(batch):
        return mean(batch) * (1 + 0.005 * (len(batch["y"]) < 4))

    assert check_separable(rough, BATCH, tolerance=0.01) is None
    assert check_separable(rough, BATCH) is not None


def test_batches_that_cannot_be_weighed():
    """What `weigh` raises is raised."""
    with pytest.raises(NotSplittable, match="no tensor in it is called labels"):
        check_separable(mean, BATCH, "tokens")
    with pytest.raises(InvalidValue, match="weight: invalid value 'words'"):
        check_separable(mean, BATCH, "words")  # type: ignore[arg-type]
