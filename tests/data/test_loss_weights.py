"""Factors put the parts' losses together to the batch's; what cannot be counted is said."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from batchfinder.data.split import count_in, split, weigh
from batchfinder.errors import InvalidValue, NotSplittable

LABELS = torch.tensor(
    [[5, 1, 2, -100], [5, 3, -100, -100], [5, -100, -100, -100], [5, 1, 2, 3], [-100, -100, -100, -100]]
)
BATCH = {"x": torch.ones(5, 4), "labels": LABELS}
PARTS = split(BATCH, [2, 1, 2])


@pytest.mark.parametrize(
    ("weight", "counts"),
    [
        ("samples", [2, 1, 2]),
        ("tokens", [5, 1, 4]),
        ("next_tokens", [3, 0, 3]),
        (lambda part: part["labels"].amin(1).eq(-100).sum(), [2, 1, 1]),
        (lambda part: 0.5 * len(part["x"]), [1, 0.5, 1]),
    ],
)
def test_shares(weight, counts):
    """Each part's share of all that counts; together they are 1."""
    assert [count_in(part, weight) for part in PARTS] == counts
    assert weigh(PARTS, weight) == [count / sum(counts) for count in counts]


def test_sums():
    """Losses that are sums are added up."""
    assert weigh(PARTS, "sum") == [1, 1, 1]
    assert weigh(PARTS) == weigh(PARTS, "samples")


def test_nothing_counts_in_a_part():
    """A part without a label that counts has the factor 0; left out, the rest make the loss, with no NaN in it."""
    parts, logits = split(BATCH, [3, 1, 1]), torch.randn(5, 4, 6, dtype=torch.float64)
    factors = weigh(parts, "tokens")
    assert factors == [0.6, 0.4, 0]
    losses = [
        cross_entropy(scores.flatten(0, 1), part["labels"].flatten())
        for scores, part in zip(logits.split([3, 1, 1]), parts, strict=True)
    ]
    assert torch.isnan(losses[2])
    total = sum(factor * loss for factor, loss in zip(factors, losses, strict=True) if factor)
    torch.testing.assert_close(total, cross_entropy(logits.flatten(0, 1), LABELS.flatten()), rtol=1e-12, atol=0)


def test_nothing_counts_at_all():
    """Where nothing counts in any part, the shares of samples: the loss is what it is for such a batch."""
    nothing = split({"labels": torch.full((3, 2), -100)}, [2, 1])
    assert weigh(nothing, "tokens") == weigh(nothing, "next_tokens") == [2 / 3, 1 / 3]
    assert weigh(nothing, lambda part: 0.0) == [2 / 3, 1 / 3]


@pytest.mark.parametrize(
    ("batch", "there"),
    [
        ((torch.ones(2, 3), torch.ones(2)), "no tensor"),
        ({"a": {"labels": torch.ones(2)}, "b": {"labels": torch.ones(2)}}, "more than one tensor"),
        ({"x": torch.ones(2), "labels": torch.tensor(1)}, "a single number"),
    ],
)
def test_no_labels(batch, there):
    """Tokens can be counted only where one tensor is called labels."""
    with pytest.raises(NotSplittable) as caught:
        weigh([batch], "tokens")
    assert str(caught.value) == (
        f"the batch cannot be split: weight='tokens' counts the labels that are not -100, and {there} in it is called"
        " labels. Pass weight= a function that returns the number of tokens that the loss of a micro-batch is a mean"
        " over."
    )


@pytest.mark.parametrize("count", [-1, float("nan"), torch.tensor(float("inf"))])
def test_counts_that_cannot_be_meant(count):
    """What a function of the user's returns must be a number of something."""
    with pytest.raises(InvalidValue) as caught:
        weigh(PARTS, lambda part: count)
    assert str(caught.value) == (
        f"weight: invalid value {float(count)!r}; expected a function that returns a finite number, 0 or more, for each"
        " micro-batch."
    )


def test_unknown():
    """A weight that there is not is refused, and the ones there are named."""
    with pytest.raises(InvalidValue) as caught:
        weigh(PARTS, "words")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "weight: invalid value 'words'; expected one of samples, tokens, next_tokens, sum, or a function of a"
        " micro-batch."
    )
