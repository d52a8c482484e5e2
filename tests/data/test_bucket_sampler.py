"""The batches of an epoch, on any lengths, table, budget and number of ranks."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder import LengthBucketBatchSampler
from batchfinder.errors import BatchFinderError, InvalidValue, SamplesTooLong

QUICK = settings(derandomize=True, deadline=None, max_examples=150)

LENGTHS = st.lists(st.integers(1, 600), max_size=120)
TABLE = st.dictionaries(st.sampled_from((8, 64, 128, 200, 512, 600)), st.integers(1, 20), min_size=1)
RANKS = st.integers(1, 5)


def _epoch(lengths: Any, *sizes: Any, ranks: int = 1, epoch: int = 0, **settings: Any) -> list[list[list[int]]]:
    """The batches of an epoch, by step and rank."""
    of_ranks = []
    for rank in range(ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = LengthBucketBatchSampler(lengths, *sizes, num_replicas=ranks, rank=rank, **settings)
        sampler.set_epoch(epoch)
        of_ranks.append(list(sampler))
        assert len(of_ranks[-1]) == len(sampler)
    return [list(step) for step in zip(*of_ranks, strict=True)]


def _bucket(length: int, table: dict[int, int]) -> int:
    return min((bound for bound in table if bound >= length), default=10**9)


@QUICK
@given(LENGTHS, TABLE, RANKS, st.booleans(), st.sampled_from(("drop", "own")), st.integers(0, 3))
def test_by_table(lengths, table, ranks, shuffle, overlong, epoch):
    """Every sample once, repeats only to make a bucket come out even; a step is one bucket's, of one size on all ranks,
    none over the table's, and there are as few of them as can be."""
    steps = _epoch(lengths, table, ranks=ranks, shuffle=shuffle, overlong=overlong, epoch=epoch)
    kept = {i for i, length in enumerate(lengths) if overlong == "own" or length <= max(table)}
    sizes = {**table, 10**9: 1}
    by_bucket = Counter(_bucket(lengths[i], table) for i in kept)
    assert len(steps) == sum(math.ceil(n / (ranks * sizes[bucket])) for bucket, n in by_bucket.items())
    times, steps_of = Counter(), Counter()
    for step in steps:
        members = [i for batch in step for i in batch]
        (bucket,) = {_bucket(lengths[i], table) for i in members}
        assert len({len(batch) for batch in step}) == 1
        assert 1 <= len(step[0]) <= sizes[bucket]
        assert len(set(members)) == len(members) or by_bucket[bucket] < ranks * sizes[bucket]
        times.update(members)
        steps_of[bucket] += 1
    assert set(times) == kept
    for bucket, n in by_bucket.items():
        taken = sum(times[i] for i in kept if _bucket(lengths[i], table) == bucket)
        assert taken == math.ceil(n / ranks) * ranks


@QUICK
@given(LENGTHS, st.integers(1, 3000), RANKS, st.booleans(), st.sampled_from(("drop", "own")), st.integers(0, 3))
def test_by_budget(lengths, max_tokens, ranks, shuffle, overlong, epoch):
    """Every sample once, at most one less than the ranks twice; batch size times longest is within the budget, and of
    every step but the last there is no room for one more sample of nearly this length."""
    steps = _epoch(lengths, max_tokens=max_tokens, ranks=ranks, shuffle=shuffle, overlong=overlong, epoch=epoch)
    kept = {i for i, length in enumerate(lengths) if overlong == "own" or length <= max_tokens}
    times = Counter(i for step in steps for batch in step for i in batch)
    assert set(times) == kept
    assert sum(times.values()) == math.ceil(len(kept) / ranks) * ranks
    not_full = 0
    for step in steps:
        size, longest = len(step[0]), max(lengths[i] for batch in step for i in batch)
        assert {len(batch) for batch in step} == {size}
        assert size * longest <= max_tokens or size == 1
        not_full += (size + 1) * longest <= max_tokens * 2 ** (-1 / 32)
    assert not_full <= 1


def test_like_lengths():
    """With a budget, samples of a batch are of nearly one length, and batches have other samples in each epoch."""
    lengths = 10 * list(range(500, 1000))
    sampler = LengthBucketBatchSampler(lengths, max_tokens=20_000)
    first, second = list(sampler), list(sampler)
    for batch in first:
        assert min(lengths[i] for i in batch) > 0.9 * max(lengths[i] for i in batch)
    assert {tuple(sorted(batch)) for batch in first}.isdisjoint({tuple(sorted(batch)) for batch in second})


@QUICK
@given(LENGTHS, TABLE, RANKS, st.booleans())
def test_drop_last(lengths, table, ranks, by_budget):
    """Full batches only, no sample twice, and less than a step of each bucket left out."""
    sizes: dict[str, Any] = {"max_tokens": 900} if by_budget else {"batch_sizes": table}
    try:
        steps = _epoch(lengths, ranks=ranks, drop_last=True, overlong="drop", **sizes)
    except InvalidValue:  # there would be no step at all; what is left out then is looked at below
        steps = []
    times = Counter(i for step in steps for batch in step for i in batch)
    assert set(times.values()) <= {1}
    if by_budget:
        kept = [length for length in lengths if length <= 900]
        assert len(kept) - len(times) < ranks * max(900 // min(kept, default=1), 1)
        return
    for step in steps:
        assert {len(batch) for batch in step} == {table[_bucket(lengths[step[0][0]], table)]}
    for bound, size in table.items():
        mine = [i for i, length in enumerate(lengths) if _bucket(length, table) == bound]
        assert sum(i not in times for i in mine) == len(mine) % (ranks * size)


@QUICK
@given(LENGTHS, TABLE, st.booleans(), st.booleans(), st.data())
def test_resumed(lengths, table, by_budget, shuffle, data):
    """From any place of any epoch, also through JSON, another sampler goes on with the very same batches, and then
    with those of the next epoch."""
    sizes: dict[str, Any] = {"max_tokens": 900} if by_budget else {"batch_sizes": table}
    how = {"overlong": "own", "shuffle": shuffle, "seed": 3, **sizes}
    whole, stopped = LengthBucketBatchSampler(lengths, **how), LengthBucketBatchSampler(lengths, **how)
    epoch = data.draw(st.integers(0, 2))
    epochs = [list(whole) for _ in range(epoch + 2)]
    trained = data.draw(st.integers(0, len(whole)))
    told = data.draw(st.booleans())
    for _ in range(epoch):
        list(stopped)
    batches = iter(stopped)
    for _ in range(len(whole) if told else trained):  # a DataLoader's workers are ahead of what was trained
        next(batches)
    state = stopped.state_dict(trained if told and len(whole) else None)
    resumed = LengthBucketBatchSampler(lengths, **how)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    if trained:
        assert resumed.epoch == epoch
        assert resumed.state_dict() == state
        resumed.set_epoch(epoch)  # as Lightning does
        assert list(resumed) == epochs[epoch][trained:]
        assert resumed.state_dict() == {**state, "epoch": epoch + 1, "batches": 0}
        assert list(resumed) == epochs[epoch + 1]


def test_epochs():
    """A finished epoch is followed by the next; one left early begins again; `set_epoch` chooses any."""
    lengths = torch.arange(1, 201)
    one, other = (LengthBucketBatchSampler(lengths, {100: 8, 200: 4}, seed=seed) for seed in (0, 7))
    first, second = list(one), list(one)
    assert first != second
    assert sorted(map(len, first)) == sorted(map(len, second))
    assert {tuple(sorted(batch)) for batch in first}.isdisjoint({tuple(sorted(batch)) for batch in second})
    assert one.epoch == 2
    third = [next(batches) for batches in [iter(one)] for _ in range(3)]
    assert one.state_dict()["batches"] == 3
    assert one.epoch == 2
    assert list(one)[:3] == third
    one.set_epoch(0)
    assert one.state_dict()["batches"] == 0
    assert list(one) == first
    assert list(other) not in (first, second)
    waiting = iter(one)  # Lightning asks for the iterator first, and says which epoch it is then
    one.set_epoch(1)
    assert list(waiting) == second


def test_not_shuffled():
    """Samples keep the dataset's order within a bucket, and batches come in the order of their first samples."""
    lengths = [5, 50, 5, 50, 50, 5, 5]
    sampler = LengthBucketBatchSampler(lengths, {10: 3, 50: 2}, shuffle=False)
    assert list(sampler) == list(sampler) == [[0, 2, 5], [1, 3], [4], [6]]


@pytest.mark.parametrize(
    "lengths", [[3, 9, 4], (3, 9, 4), np.array([3, 9, 4]), torch.tensor([3, 9, 4], dtype=torch.int16)]
)
def test_lengths_of_any_kind(lengths):
    """Lists, arrays and tensors."""
    assert sorted(LengthBucketBatchSampler(lengths, {4: 2, 10: 1})) in ([[0, 2], [1]], [[1], [2, 0]])


def test_lengths_where_nothing_fits():
    """They are no buckets: samples of that length are too long."""
    with pytest.raises(SamplesTooLong) as error:
        LengthBucketBatchSampler([3, 300, 512, 40], {64: 8, 256: 1, 512: 0})
    assert (error.value.count, error.value.total, error.value.longest, error.value.limit) == (2, 4, 512, 256)
    assert str(error.value) == (
        "2 of 4 samples are longer than 256, the longest that a batch size is known for; the longest has 512. Truncate"
        " them or find a batch size for 512 as well; or leave them out with overlong='drop', or train each by itself"
        " with overlong='own', which may run out of memory."
    )
    assert isinstance(error.value, BatchFinderError)


def test_too_long_for_the_budget():
    """The message speaks of the budget; dropping them warns; on their own they make batches of one."""
    with pytest.raises(SamplesTooLong) as error:
        LengthBucketBatchSampler([3, 300], max_tokens=256)
    assert str(error.value).startswith(
        "1 of 2 samples are longer than 256, the budget of a whole batch; the longest has 300. Truncate them or raise"
        " max_tokens to 300; or"
    )
    with pytest.warns(UserWarning, match="1 of 2 samples are left out: they are longer than 256") as warned:
        assert list(LengthBucketBatchSampler([3, 300], max_tokens=256, overlong="drop")) == [[0]]
    assert warned[0].filename == __file__
    assert sorted(LengthBucketBatchSampler([3, 300, 4], max_tokens=256, overlong="own")) in (
        [[0, 2], [1]],
        [[1], [2, 0]],
    )


def test_another_samplers_state():
    """What differs is named, and that an epoch can begin anew; between epochs the number of ranks may change."""
    lengths, table = [5] * 40, {8: 4}
    saved = LengthBucketBatchSampler(lengths, table, num_replicas=2, rank=1)
    next(iter(saved))
    here = LengthBucketBatchSampler([6] * 40, table, seed=1)
    with pytest.raises(InvalidValue) as error:
        here.load_state_dict(saved.state_dict())
    assert "one of a sampler with the same lengths, seed, num_replicas; set_epoch(0) begins that epoch anew" in str(
        error.value
    )
    list(saved)
    alone = LengthBucketBatchSampler(lengths, table)
    alone.load_state_dict(saved.state_dict())
    assert (alone.epoch, len(list(alone))) == (1, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "batch_sizes and max_tokens: invalid value 'neither'; expected a table of batch sizes or a token budget."),
        (
            {"batch_sizes": {8: 1}, "max_tokens": 8},
            "batch_sizes and max_tokens: invalid value 'both'; expected a table of batch sizes or a token budget.",
        ),
        ({"max_tokens": 0}, "max_tokens: invalid value 0; expected a number of tokens, at least 1."),
        ({"max_tokens": 8, "overlong": "skip"}, "overlong: invalid value 'skip'; expected 'error', 'drop' or 'own'."),
        ({"max_tokens": 8, "rank": 1}, "num_replicas and rank: invalid value (None, 1); expected both, or neither."),
        (
            {"max_tokens": 8, "num_replicas": 2, "rank": 2},
            "rank: invalid value 2; expected one from 0 to 1, for 2 replicas.",
        ),
        (
            {"batch_sizes": {8: 9}, "drop_last": True},
            "drop_last: invalid value True; expected False: no bucket has as many samples as one rank takes in a full"
            " step.",
        ),
        (
            {"lengths": [0.5], "max_tokens": 8},
            "lengths: invalid value 'a tensor of shape (1,) and torch.float32'; expected a whole number for each "
            "sample.",
        ),
        ({"lengths": [3, 0], "max_tokens": 8}, "lengths: invalid value 0; expected lengths of at least 1."),
    ],
)
def test_bad_arguments(arguments, message):
    """Each is told in one sentence."""
    with pytest.raises(InvalidValue) as error:
        LengthBucketBatchSampler(**{"lengths": [1, 2, 3], **arguments})
    assert str(error.value) == message


def test_no_samples():
    """No batches."""
    assert list(LengthBucketBatchSampler([], {8: 1}, drop_last=True)) == []
    assert list(LengthBucketBatchSampler([], max_tokens=1)) == []
    with pytest.raises(InvalidValue, match="epoch: invalid value -1"):
        LengthBucketBatchSampler([], {8: 1}).set_epoch(-1)
