"""How the samples are divided into steps: the cut is the same in every epoch, the samples in it are not.

Samples are laid out by group: those of a bucket, or those of nearly one length. A step takes the next samples of the
layout, as many as its group's batch size times the number of ranks, so all ranks train batches of one size and of like
lengths at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from batchfinder.errors import SamplesTooLong

Overlong = Literal["error", "drop", "own"]

_GROUPS_PER_OCTAVE = 32
"""With a token budget: samples within 2 % of each other's length are shuffled with each other."""


@dataclass(frozen=True, slots=True)
class Step:
    """The samples that all ranks train at the same time, as places in an epoch's layout.

    Attributes:
        start: the first of them.
        stop: behind the last of them.
        pool: the first of the samples, up to `start`, that may be repeated to fill the step up.
    """

    start: int
    stop: int
    pool: int


@dataclass(frozen=True)
class Division:
    """The samples that take part, by group.

    Attributes:
        samples: their indices in the dataset, ascending. Shape: (samples,).
        groups: the group of each, from 0 in the order of the layout. Shape: (samples,).
        batch_sizes: of each group, on one rank.
        joined: whether a step that a group does not fill goes on with samples of the next group.
        left_out: how many samples were dropped for their length.
    """

    samples: torch.Tensor
    groups: torch.Tensor
    batch_sizes: tuple[int, ...]
    joined: bool
    left_out: int

    def steps(self, num_replicas: int, drop_last: bool) -> list[Step]:
        """Cut the layout into steps.

        Args:
            num_replicas: ranks that train at the same time.
            drop_last: whether steps that are not full are left out; else they are smaller.
        """
        counts = torch.bincount(self.groups, minlength=len(self.batch_sizes)).tolist()
        steps, position, end, total = [], 0, 0, len(self.samples)
        for count, batch_size in zip(counts, self.batch_sizes, strict=True):
            begin, end = end, end + count
            whole = batch_size * num_replicas
            while position < end:
                stop = min(position + whole, total if self.joined else end)
                if stop - position == whole or not drop_last:
                    # Samples of the groups before are longer than this step's where groups are joined.
                    steps.append(Step(position, stop, position if self.joined else begin))
                position = stop
        return steps

    def layout(self, generator: torch.Generator | None) -> torch.Tensor:
        """Places in `samples`, group by group.

        Args:
            generator: shuffles the samples of each group; None for the order of the dataset.
        """
        if generator is None:
            return torch.argsort(self.groups, stable=True)
        shuffled = torch.randperm(len(self.groups), generator=generator)
        return shuffled[torch.argsort(self.groups[shuffled], stable=True)]


def by_table(lengths: torch.Tensor, table: Mapping[int, int], overlong: Overlong) -> Division:
    """A group for each length of the table: samples up to that length and longer than the one before.

    Args:
        lengths: of all samples. Shape: (samples,).
        table: batch size by length; both positive.
        overlong: what becomes of samples longer than the longest of the table.

    Raises:
        SamplesTooLong: there are such samples, and no way was named to deal with them.
    """
    bounds = sorted(table)
    sizes = [table[bound] for bound in bounds]
    what = "the longest that a batch size is known for"
    samples = _checked(lengths, bounds[-1], overlong, what, "find a batch size for {longest} as well")
    groups = torch.bucketize(lengths[samples], torch.tensor(bounds))
    return Division(samples, groups, (*sizes, 1), joined=False, left_out=len(lengths) - len(samples))


def by_budget(lengths: torch.Tensor, max_tokens: int, overlong: Overlong) -> Division:
    """Groups of nearly one length, the longest first, whose batches are as large as the budget allows.

    Args:
        lengths: of all samples. Shape: (samples,).
        max_tokens: the most that batch size times longest sample may be.
        overlong: what becomes of samples longer than that.

    Raises:
        SamplesTooLong: there are such samples, and no way was named to deal with them.
    """
    samples = _checked(lengths, max_tokens, overlong, "the budget of a whole batch", "raise max_tokens to {longest}")
    taken = lengths[samples]
    nearly = -(taken.double().log2() * _GROUPS_PER_OCTAVE).floor().long()
    _, groups = torch.unique(nearly, return_inverse=True)
    longest = torch.zeros(int(groups.max()) + 1 if len(groups) else 0, dtype=torch.int64)
    longest.scatter_reduce_(0, groups, taken, "amax")
    sizes = tuple(max(1, max_tokens // length) for length in longest.tolist())
    return Division(samples, groups, sizes, joined=True, left_out=len(lengths) - len(samples))


def share_of(step: Step, layout: torch.Tensor, num_replicas: int, rank: int) -> torch.Tensor:
    """One rank's part of a step.

    Where the samples do not come out even, as many are repeated as are missing, so that every rank has as many.

    Args:
        step: of the layout.
        layout: of the epoch.
        num_replicas: ranks that share the step.
        rank: whose part.

    Returns:
        Places in `Division.samples`.
    """
    members = layout[step.start : step.stop]
    missing = -len(members) % num_replicas
    if missing:
        pool = layout[step.pool : step.start][:missing]
        again = members.repeat(math.ceil(missing / len(members)))[: missing - len(pool)]
        members = torch.cat((members, pool, again))
    return members[rank::num_replicas]


def _checked(lengths: torch.Tensor, limit: int, overlong: Overlong, what: str, remedy: str) -> torch.Tensor:
    """The samples that take part."""
    too_long = lengths > limit
    count = int(too_long.sum())
    if count and overlong == "error":
        longest = int(lengths.max())
        raise SamplesTooLong(count, len(lengths), longest, limit, what, remedy.format(longest=longest))
    if count and overlong == "drop":
        return torch.nonzero(~too_long).flatten()
    return torch.arange(len(lengths))
