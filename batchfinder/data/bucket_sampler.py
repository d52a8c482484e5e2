"""A batch sampler that gives each length its own batch size.

Samples are laid out by group: those of a bucket, or those of nearly one length. A step takes the next samples of the
layout, as many as its group's batch size times the number of ranks, so all ranks train batches of one size and of like
lengths at the same time. The cut into steps is the same in every epoch; the samples in each are not.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import distributed
from torch.utils.data import Sampler

from batchfinder.data.size_table import Found, table_of
from batchfinder.errors import InvalidValue, SamplesTooLong

Overlong = Literal["error", "drop", "own"]

_GROUPS_PER_OCTAVE = 32
"""With a token budget: samples within 2 % of each other's length are shuffled with each other."""


class Step(NamedTuple):
    """The samples that all ranks train at the same time, as places in an epoch's layout."""

    start: int
    stop: int
    pool: int  # the first of the samples, up to `start`, that may be repeated to fill the step up


class LengthBucketBatchSampler(Sampler[list[int]]):
    """Batches of samples of like length, as large as that length allows. For `DataLoader(batch_sampler=...)`.

    Either a table says how large (`{128: 134, 512: 33}`: samples up to 128 long in batches of 134, longer ones in
    batches of 33), or a token budget does: batch size times longest sample is at most `max_tokens`.

    Every sample comes once in an epoch. With several ranks, each has as many batches, and all train batches of one size
    and of one bucket at the same time; where a bucket does not come out even, up to `num_replicas - 1` of its samples
    come twice, as in `DistributedSampler`.

    An epoch that was finished is followed by the next one, in another order; one that was left early begins again.
    `set_epoch` chooses, as in `DistributedSampler`. Give a Lightning trainer with several devices
    `use_distributed_sampler=False`: its own sampler cannot be put into this one. It calls `set_epoch` itself.

    `state_dict()` counts the batches that were handed out. Workers of a DataLoader ask for some before they are
    trained: say how many were trained, `state_dict(batches=...)`, or use torchdata's `StatefulDataLoader`, which knows.

    Args:
        lengths: of every sample of the dataset, in its order.
        batch_sizes: the table, or what it can be read from (see `table_of`); lengths where nothing fits are left out.
        max_tokens: the budget, in place of a table.
        shuffle: whether samples of a bucket, and the batches, come in a random order; else batches come in the order of
            their first samples.
        seed: of that order; the same on all ranks.
        drop_last: whether the rest of a bucket that does not fill a step is left out.
        overlong: samples longer than the table knows or the budget holds: `error`, `drop` (with a warning), or `own`
            (a batch of one each, which may run out of memory).
        num_replicas: ranks that train together; None for what torch.distributed says when it is iterated.
        rank: this one.

    Raises:
        InvalidValue: an argument is out of range, or does not go with another.
        SamplesTooLong: samples are too long, and `overlong` is `error`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        batch_sizes: Found | None = None,
        *,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        overlong: Overlong = "error",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        values = torch.as_tensor(lengths if hasattr(lengths, "__array__") else list(lengths))
        if not len(values):
            values = values.long()
        if values.dim() != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            shape = f"a tensor of shape {tuple(values.shape)} and {values.dtype}"
            raise InvalidValue("lengths", shape, "a whole number for each sample")
        if len(values) and values.min() < 1:
            raise InvalidValue("lengths", int(values.min()), "lengths of at least 1")
        self.lengths = values.long().cpu()
        if (batch_sizes is None) == (max_tokens is None):
            given = "neither" if batch_sizes is None else "both"
            raise InvalidValue("batch_sizes and max_tokens", given, "a table of batch sizes or a token budget")
        if overlong not in get_args(Overlong):
            raise InvalidValue("overlong", overlong, "'error', 'drop' or 'own'")
        if max_tokens is not None and max_tokens < 1:
            raise InvalidValue("max_tokens", max_tokens, "a number of tokens, at least 1")
        if (num_replicas is None) != (rank is None):
            raise InvalidValue("num_replicas and rank", (num_replicas, rank), "both, or neither")
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise InvalidValue("rank", rank, f"one from 0 to {num_replicas - 1}, for {num_replicas} replicas")
        self.batch_sizes = None if batch_sizes is None else table_of(batch_sizes)
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.overlong = overlong
        self.num_replicas = num_replicas
        self.rank = rank
        self._group()
        self._cut: dict[int, list[Step]] = {}
        self._digest: str | None = None
        self._epoch = 0
        self._batches = 0
        self._resuming = False
        self._finished = False
        len(self)  # whether there is a step at all

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or begins next."""
        return self._epoch + self._finished

    @property
    def sampler(self) -> LengthBucketBatchSampler:
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch next.

        Args:
            epoch: its number. The one that is under way or next already is left as it is, also where it was resumed.

        Raises:
            InvalidValue: it is negative.
        """
        if epoch < 0:
            raise InvalidValue("epoch", epoch, "a number from 0")
        if epoch != self.epoch:
            self._epoch, self._batches, self._resuming, self._finished = epoch, 0, False, False

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where it is, to go on from there bit for bit.

        Args:
            batches: how many batches of the epoch begun last were trained; None for all that were handed out.
        """
        epoch = self._epoch
        if batches is None:
            epoch, batches = (self.epoch, 0) if self._finished else (epoch, self._batches)
        if self._digest is None:
            self._digest = hashlib.sha256(self.lengths.numpy().tobytes()).hexdigest()
        settings = {  # everything that the batches of an epoch depend on
            "lengths": self._digest,
            "batch_sizes": None if self.batch_sizes is None else sorted(map(list, self.batch_sizes.items())),
            "max_tokens": self.max_tokens,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "overlong": self.overlong,
            "num_replicas": self._ranks()[0],
        }
        return {"epoch": epoch, "batches": batches, "settings": settings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another sampler was.

        Args:
            state_dict: of a sampler with the same lengths and arguments. At the beginning of an epoch, the number of
                ranks may be another.

        Raises:
            InvalidValue: the arguments are others; the epoch could not go on with the same batches.
        """
        epoch, batches, saved = state_dict["epoch"], state_dict["batches"], state_dict["settings"]
        mine = self.state_dict()["settings"]
        differ = [name for name in mine if mine[name] != saved.get(name) and (batches or name != "num_replicas")]
        if differ:
            expected = f"one of a sampler with the same {', '.join(differ)}; set_epoch({epoch}) begins that epoch anew"
            raise InvalidValue("state_dict", {name: saved.get(name) for name in differ}, expected)
        self._epoch, self._batches, self._resuming, self._finished = epoch, batches, True, False

    def _group(self) -> None:
        """Choose the samples that take part, and lay them out by group: those of a bucket, or of nearly one length.

        Sets `_samples`, their indices in the dataset, ascending, and `_groups`, the group of each, from 0 in the order
        of the layout, both of shape (samples,); `_sizes`, the batch size of each group on one rank; and `_joined`,
        whether a step that a group does not fill goes on with samples of the next group.

        Raises:
            SamplesTooLong: there are samples longer than the limit, and `overlong` is `error`.
        """
        table, max_tokens = self.batch_sizes, self.max_tokens or 0
        limit = max(table) if table is not None else max_tokens
        too_long = self.lengths > limit
        count, total = int(too_long.sum()), len(self.lengths)
        self._samples = torch.arange(total)
        if count and self.overlong == "error":
            longest = int(self.lengths.max())
            what, remedy = "the budget of a whole batch", f"raise max_tokens to {longest}"
            if table is not None:
                what = "the longest that a batch size is known for"
                remedy = f"find a batch size for {longest} as well"
            raise SamplesTooLong(count, total, longest, limit, what, remedy)
        if count and self.overlong == "drop":
            self._samples = torch.nonzero(~too_long).flatten()
            warnings.warn(f"{count} of {total} samples are left out: they are longer than {limit}.", stacklevel=3)
        taken = self.lengths[self._samples]
        self._joined = table is None
        if table is not None:
            self._groups = torch.bucketize(taken, torch.tensor(list(table)))
            self._sizes = [*table.values(), 1]  # one at a time beyond the longest bucket
            return
        nearly = -(taken.double().log2() * _GROUPS_PER_OCTAVE).floor().long()
        _, self._groups = torch.unique(nearly, return_inverse=True)  # the longest come first
        longest_of = torch.zeros(int(self._groups.max()) + 1 if len(taken) else 0, dtype=torch.int64)
        longest_of.scatter_reduce_(0, self._groups, taken, "amax")
        self._sizes = [max(1, max_tokens // length) for length in longest_of.tolist()]

    def __len__(self) -> int:
        """How many batches each rank has in an epoch."""
        return len(self._steps(self._ranks()[0]))

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: what epoch it is, is asked when the first batch is, as Lightning sets it after `iter()`.
        if self._finished:
            self._epoch, self._batches = self.epoch, 0
        elif not self._resuming:
            self._batches = 0
        self._resuming = self._finished = False
        num_replicas, rank = self._ranks()
        steps, groups = self._steps(num_replicas), self._groups
        # The layout: places in the samples, group by group, shuffled within each.
        generator = torch.Generator()
        generator.manual_seed(self.seed + self._epoch)
        places = torch.randperm(len(groups), generator=generator) if self.shuffle else torch.arange(len(groups))
        layout = places[torch.argsort(groups[places], stable=True)]
        if self.shuffle:
            order = torch.randperm(len(steps), generator=generator).tolist()
        else:
            order = sorted(range(len(steps)), key=lambda number: int(layout[steps[number].start]))
        for number in order[self._batches :]:
            self._batches += 1
            step = steps[number]
            members = layout[step.start : step.stop]
            missing = -len(members) % num_replicas
            if missing:  # as many are repeated, so that every rank has as many
                pool = layout[step.pool : step.start][:missing]
                again = members.repeat(math.ceil(missing / len(members)))[: missing - len(pool)]
                members = torch.cat((members, pool, again))
            yield self._samples[members[rank::num_replicas]].tolist()
        self._finished = True

    def _steps(self, num_replicas: int) -> list[Step]:
        """Cut the layout into steps. Those that are not full are smaller, or left out with `drop_last`."""
        if num_replicas in self._cut:
            return self._cut[num_replicas]
        counts = torch.bincount(self._groups, minlength=len(self._sizes)).tolist()
        steps, position, end, total = [], 0, 0, len(self._samples)
        for count, batch_size in zip(counts, self._sizes, strict=True):
            begin, end = end, end + count
            whole = batch_size * num_replicas
            while position < end:
                stop = min(position + whole, total if self._joined else end)
                if stop - position == whole or not self.drop_last:
                    # Samples of the groups before are longer than this step's where groups are joined.
                    steps.append(Step(position, stop, position if self._joined else begin))
                position = stop
        if not steps and total:
            ranks = "one rank takes" if num_replicas == 1 else f"{num_replicas} ranks take"
            raise InvalidValue("drop_last", True, f"False: no bucket has as many samples as {ranks} in a full step")
        self._cut[num_replicas] = steps
        return steps

    def _ranks(self) -> tuple[int, int]:
        """How many ranks there are, and which this is."""
        if self.num_replicas is not None and self.rank is not None:
            return self.num_replicas, self.rank
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size(), distributed.get_rank()
        return 1, 0
