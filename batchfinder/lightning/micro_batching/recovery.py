"""What a batch's forward and backward change besides gradients, as it was before, for running the batch again.

What to do when a batch runs out of memory in training: run it again, in smaller micro-batches if need be.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from batchfinder.distributed.agreement import Ranks
from batchfinder.errors import CacheFailed, RankFailed, SampleDoesNotFit
from batchfinder.find import ResultEntry
from batchfinder.lightning.micro_batching.micro_batch import LengthTable, MicroBatch, smaller
from batchfinder.measure.tuner import lower
from batchfinder.snapshot.process_state import ProcessState

_PLAIN = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set, tuple})
"""What most attributes of a module are; with hundreds of modules a look at each of them would be felt."""


class BatchSnapshot:
    """The state at the start of a batch: cheap enough to note for each one.

    Noted are the random numbers of Python, NumPy, torch and the devices, and of generators that a module holds in an
    attribute; buffers, with copies where they are; the states of torchmetrics; and the attributes of each module, by
    reference, lists by their length as well. What a step changes in other containers of the user's, or in callbacks,
    stays as the step left it. Gradients are noted by `gradients_zeroed`.

    Args:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._process = ProcessState()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        self._lists: list[tuple[list[Any], int]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] | None = None
        with torch.no_grad():
            for part in module.modules():
                self._note(part)

    def gradients_zeroed(self) -> None:
        """Note the gradients as `zero_grad` has left them, which is done once for each batch."""
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
        for generator, state in self._generators:
            _write(generator, state)
        self._process.restore()

    def _note(self, part: nn.Module) -> None:
        attributes = dict(vars(part))
        self._attributes.append((part, attributes))
        self._buffers.append((part._buffers, dict(part._buffers)))
        self._copy(part._buffers.values())
        for value in attributes.values():
            if type(value) in _PLAIN:
                continue
            if isinstance(value, list):
                self._lists.append((value, len(value)))
            elif (state := _read(value)) is not None:
                self._generators.append((value, state))
        if isinstance(part, Metric):
            states = [attributes.get(name) for name in part._defaults]
            self._copy(state for state in states if isinstance(state, Tensor))

    def _copy(self, values: Iterable[Tensor | None]) -> None:
        self._values.extend((value, value.clone()) for value in values if value is not None)


def _read(value: Any) -> Any:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else None


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


_RAISED, _HOPELESS, _RAN_OUT, _RAN = range(4)  # the least of all ranks' counts

log = logging.getLogger(__name__)


@dataclass
class RecoveryAttempt:
    """What became of one batch on this rank.

    Attributes:
        batch_idx: the batch's number in the epoch.
        tries: how often all ranks have run it.
        cuts: how often the sizes were lowered for it.
        failed: micro-batches that ran out of memory: samples, length, and the first sample's place in the batch.
        words: what the device said last.
        record: what became of the cache's record, in words; only the first rank writes it.
    """

    batch_idx: int
    tries: int = 0
    cuts: int = 0
    failed: list[tuple[int, int | None, int]] = field(default_factory=list)
    words: str = ""
    record: str = ""

    def add(self, part: MicroBatch, words: str) -> None:
        """Note a failure.

        Args:
            part: what ran out of memory; only its size is kept.
            words: the device's own.
        """
        self.failed.append((part.samples, part.seq_len, part.positions[0]))
        self.words = words


class Recovery:
    """Decides how a batch that ran out of memory is run again. All ranks decide the same.

    The first time it is run as it was: the sizes ran when they were tried, so a fragmented memory or a neighbour may be
    to blame. From the second time on, what failed is made smaller, for this length and longer ones, for good.

    Args:
        table: the sizes, which are lowered.
        slots: where the cache keeps the answer for each length.
        ranks: the processes that train together.
    """

    def __init__(self, table: LengthTable, slots: Mapping[int | None, ResultEntry], ranks: Ranks) -> None:
        self._table = table
        self._slots = slots
        self._ranks = ranks
        self._told = False

    @contextmanager
    def others_hear(self) -> Iterator[None]:
        """Tell the other ranks of an error that is not about memory, so that none waits for this one."""
        try:
            yield
        except Exception as error:
            if self._ranks.size > 1:
                self._ranks.smallest(_RAISED, *self._table.values())
                self._ranks.gathered(f"{type(error).__name__}: {error}")
            raise

    def ran_everywhere(self, story: RecoveryAttempt, failed: bool) -> bool:
        """Whether the batch is through on all ranks; if not, the table says how to run it again.

        Args:
            story: what became of it on this one.
            failed: whether memory ran out on this one in this try.

        Raises:
            SampleDoesNotFit: a single sample ran out of memory on this rank, again.
            RankFailed: one did on another rank, or that rank raised something else.
        """
        status, values, hopeless = _RAN, self._table.values(), None
        if failed:
            status = _RAN_OUT
            samples, seq_len, position = story.failed[-1]
            if story.tries and samples == 1:
                status = _HOPELESS
                hopeless = SampleDoesNotFit(position, story.batch_idx, seq_len, story.words)
            elif story.tries:
                lowered = LengthTable(self._table.sizes)
                lowered.agree(values)
                lowered.lower(seq_len, smaller(samples, story.cuts))
                values = lowered.values()
        status, *agreed = self._ranks.smallest(status, *values)
        if status == _RAN:
            return True
        if status <= _HOPELESS:
            heard = self._ranks.gathered(None if hopeless is None else f"{type(hopeless).__name__}: {hopeless}")
            if hopeless is not None:
                raise hopeless
            rank = next(rank for rank, words in enumerate(heard) if words is not None)
            raise RankFailed(rank, self._ranks.size, f"ran batch {story.batch_idx}", str(heard[rank]))
        before = self._table.sizes
        self._table.agree(agreed)
        story.cuts += story.tries > 0
        story.tries += 1
        self._lower_records(before, story)
        return False

    def tell(self, story: RecoveryAttempt, samples: int) -> None:
        """Say what happened on this rank, once the batch is through.

        Args:
            story: of the batch.
            samples: of the largest micro-batch that ran at last.
        """
        if not story.failed:
            return
        sizes = _and([size for size, _, _ in story.failed])
        seq_len = story.failed[0][1]
        length = "" if seq_len is None else f" of length {seq_len}"
        made = "a micro-batch" if len(story.failed) == 1 else "micro-batches"
        of = "samples" if story.failed[-1][0] > 1 else "sample"
        rank = "" if self._ranks.size == 1 else f" on rank {self._ranks.rank}"
        batch = f"BatchFinder: batch {story.batch_idx}"
        happened = f"{batch} ran out of memory{rank} in {made} of {sizes} {of}{length}"
        said = f"The device said: {story.words.rstrip('.')}."
        if not story.cuts:
            text = f"{happened}. It was run again from its start with memory released, and nothing was lost. {said}"
            log.info(text)
            if not self._told:
                warnings.warn(
                    f"{text} More of these are logged at level INFO; if there are many, leave more memory free with "
                    "BatchFinder(headroom=0.05).",
                    stacklevel=2,
                )
            self._told = True
            return
        warnings.warn(
            f"{happened}. Each time it was run again from its start with memory released, at last in micro-batches of "
            f"at most {samples}, and nothing was lost. Batches of this length and longer are split so from now on."
            f"{story.record} {said}",
            stacklevel=2,
        )

    def _lower_records(self, before: Mapping[int | None, int], story: RecoveryAttempt) -> None:
        for length, size in self._table.sizes.items():
            slot = self._slots.get(length)
            if size == before[length] or slot is None or self._ranks.rank:
                continue
            try:
                lower(slot, before[length], story.words)
                story.record = " The cache's record is lowered as well; the next start tries it before it uses it."
            except CacheFailed as error:
                reason = error.reason.rstrip(".")
                story.record = f" The cache at {error.url} still says more, since it cannot be written: {reason}."


def _and(sizes: Sequence[Any]) -> str:
    words = [str(size) for size in sizes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
