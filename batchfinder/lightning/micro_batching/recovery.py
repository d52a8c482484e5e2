"""What to do when a batch runs out of memory in training: run it again from its start, in smaller micro-batches."""

from __future__ import annotations

import logging
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from batchfinder.cache.store import ResultEntry
from batchfinder.cache.validity import lower
from batchfinder.distributed.agreement import Ranks
from batchfinder.errors import CacheFailed, RankFailed, SampleDoesNotFit
from batchfinder.lightning.micro_batching.micro_batch import LengthTable, smaller
from batchfinder.snapshot.training_state import ProcessState

_PLAIN = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set, tuple})
"""What most attributes of a module are; with hundreds of modules a look at each of them would be felt."""


class BatchSnapshot:
    """What a batch's forward and backward change besides gradients, as it was before: cheap enough for each batch.

    Captured are the random numbers of Python, NumPy, torch and the devices, and of generators that a module holds in an
    attribute; buffers, with copies where they are; the states of torchmetrics; and the attributes of each module, by
    reference, lists by their length as well. What a step changes in other containers of the user's, or in callbacks,
    stays as the step left it. Gradients are captured by `gradients_zeroed`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._process = ProcessState()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        self._lists: list[tuple[list[Any], int]] = []
        self._generators: list[tuple[Callable[[Any], object], Any]] = []  # what sets the state, and the state
        self._gradients: list[tuple[Tensor, Tensor | None]] | None = None
        with torch.no_grad():
            for part in module.modules():
                attributes = dict(vars(part))
                self._attributes.append((part, attributes))
                buffers = attributes["_buffers"]
                self._buffers.append((buffers, dict(buffers)))
                copied = list(buffers.values())
                if isinstance(part, Metric):
                    copied += [state for state in part.metric_state.values() if isinstance(state, Tensor)]
                self._values += [(value, value.clone()) for value in copied if value is not None]
                for value in attributes.values():
                    if type(value) in _PLAIN:
                        continue
                    if isinstance(value, list):
                        self._lists.append((value, len(value)))
                    elif isinstance(value, torch.Generator | np.random.RandomState):
                        self._generators.append((value.set_state, value.get_state()))
                    elif isinstance(value, np.random.Generator):
                        self._generators.append(
                            (partial(setattr, value.bit_generator, "state"), value.bit_generator.state)
                        )
                    elif isinstance(value, random.Random):
                        self._generators.append((value.setstate, value.getstate()))

    def gradients_zeroed(self) -> None:
        """Capture the gradients as `zero_grad` has left them, which is done once for each batch."""
        with torch.no_grad():
            self._gradients = [
                (parameter, None if parameter.grad is None else parameter.grad.clone())
                for parameter in self._module.parameters()
            ]

    def restore(self) -> None:
        """Put all of it back. Call it outside the `except` block of what failed."""
        with torch.no_grad():
            for part, attributes in self._attributes:
                vars(part).clear()
                vars(part).update(attributes)
            for held, buffers in self._buffers:
                held.clear()
                held.update(buffers)
            for value, copy in self._values:
                value.copy_(copy)
            for parameter, gradient in self._gradients or ():
                parameter.grad = None if gradient is None else gradient.clone()
        for items, length in self._lists:
            del items[length:]
        for set_state, state in self._generators:
            set_state(state)
        self._process.restore()


_RAISED, _CANNOT_FIT, _OUT_OF_MEMORY, _SUCCEEDED = range(4)  # the least of all ranks' counts

log = logging.getLogger(__name__)


@dataclass
class RecoveryAttempt:
    """How one batch of an epoch has run on this rank so far."""

    batch_idx: int
    tries: int = 0  # how often all ranks have run it
    cuts: int = 0  # how often the sizes were lowered for it
    # Micro-batches that ran out of memory: samples, length, and the first sample's place in the batch.
    failed: list[tuple[int, int | None, int]] = field(default_factory=list)
    message: str = ""  # what the device said last
    record: str = ""  # about the cache's record, which the first rank alone writes; empty if it was not lowered


@dataclass(eq=False)
class Recovery:
    """Decides how a batch that ran out of memory is run again. All ranks decide the same.

    The first time it is run as it was: the sizes ran when they were tried, so a fragmented memory or a neighbour may be
    to blame. From the second time on, what failed is made smaller, for this length and longer ones, for good.

    Attributes:
        table: the sizes, which are lowered.
        entries: where the cache keeps the answer for each length.
        warned: whether the user was told of a batch that ran when it was run again as it was.
    """

    table: LengthTable
    entries: Mapping[int | None, ResultEntry]
    ranks: Ranks
    warned: bool = field(default=False, init=False)

    @contextmanager
    def broadcast_errors(self) -> Iterator[None]:
        """Tell the other ranks of an error that is not about memory, so that none waits for this one."""
        try:
            yield
        except Exception as error:
            if self.ranks.size > 1:
                self.ranks.all_reduce_min(_RAISED, *self.table.values())
                self.ranks.all_gather(f"{type(error).__name__}: {error}")
            raise

    def all_ranks_succeeded(self, run: RecoveryAttempt, failed: bool) -> bool:
        """Whether the batch has run on all ranks, and not `failed` on this one; if not, the table says how to run it.

        Raises:
            SampleDoesNotFit: a single sample ran out of memory on this rank, again.
            RankFailed: one did on another rank, or that rank raised something else.
        """
        status, values, error = _SUCCEEDED, self.table.values(), None
        if failed:
            status = _OUT_OF_MEMORY
            samples, seq_len, position = run.failed[-1]
            if run.tries and samples == 1:
                status = _CANNOT_FIT
                error = SampleDoesNotFit(position, run.batch_idx, seq_len, run.message)
            elif run.tries:
                lowered = LengthTable(self.table.sizes)
                lowered.agree(values)
                lowered.lower(seq_len, smaller(samples, run.cuts))
                values = lowered.values()
        status, *agreed = self.ranks.all_reduce_min(status, *values)
        if status == _SUCCEEDED:
            return True
        if status <= _CANNOT_FIT:
            heard = self.ranks.all_gather(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            rank = next(rank for rank, message in enumerate(heard) if message is not None)
            raise RankFailed(rank, self.ranks.size, f"ran batch {run.batch_idx}", str(heard[rank]))
        before = self.table.sizes
        self.table.agree(agreed)
        run.cuts += run.tries > 0
        run.tries += 1
        for length, size in self.table.sizes.items():
            entry = self.entries.get(length)
            if size == before[length] or entry is None or self.ranks.rank:
                continue
            try:
                lower(entry, before[length], run.message, to=size)
                run.record = " The cache's record is lowered as well; the next start tries it before it uses it."
            except CacheFailed as failure:
                reason = failure.reason.rstrip(".")
                run.record = f" The cache at {failure.url} still says more, since it cannot be written: {reason}."
        return False

    def report(self, run: RecoveryAttempt, samples: int) -> None:
        """Say what happened on this rank, once the batch has run; `samples` of the largest micro-batch at last."""
        if not run.failed:
            return
        *first, at_last = [str(size) for size, _, _ in run.failed]
        sizes = f"{', '.join(first)} and {at_last}" if first else at_last
        seq_len = run.failed[0][1]
        length = "" if seq_len is None else f" of length {seq_len}"
        made = "a micro-batch" if len(run.failed) == 1 else "micro-batches"
        of = "samples" if run.failed[-1][0] > 1 else "sample"
        rank = "" if self.ranks.size == 1 else f" on rank {self.ranks.rank}"
        batch = f"BatchFinder: batch {run.batch_idx}"
        happened = f"{batch} ran out of memory{rank} in {made} of {sizes} {of}{length}"
        said = f"The device said: {run.message.rstrip('.')}."
        if not run.cuts:
            text = f"{happened}. It was run again from its start with memory released, and nothing was lost. {said}"
            log.info(text)
            if not self.warned:
                warnings.warn(
                    f"{text} More of these are logged at level INFO; if there are many, leave more memory free with "
                    "BatchFinder(headroom=0.05).",
                    stacklevel=2,
                )
            self.warned = True
            return
        warnings.warn(
            f"{happened}. Each time it was run again from its start with memory released, at last in micro-batches of "
            f"at most {samples}, and nothing was lost. Batches of this length and longer are split so from now on."
            f"{run.record} {said}",
            stacklevel=2,
        )
