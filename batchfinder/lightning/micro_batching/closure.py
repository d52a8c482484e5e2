"""What the micro-batches of a batch log, put together and logged once, as the whole batch would have done.

One optimizer step of a batch that is split: Lightning's closure, run over micro-batches.

Lightning's loop makes a closure for each batch: training_step, zero_grad, backward. In its place each micro-batch goes
through the module's training_step and backward, with all their hooks, and gradients are zeroed once, after the first
forward, as they are for a batch in one piece. All else of the loop sees one batch and one optimizer step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from batchfinder.lightning.ddp import GradientSync
from batchfinder.lightning.micro_batching.micro_batch import MicroBatch
from batchfinder.lightning.micro_batching.recovery import BatchSnapshot, Recovery, RecoveryAttempt
from batchfinder.measure.apart import apart
from batchfinder.measure.cleanup import Failure, attempt, clear
from batchfinder.measure.oom import find_in_text


class LogAggregation:
    """Collects what is logged while micro-batches run, in place of Lightning's results.

    A mean is the micro-batches' mean by their shares of the batch and counts as many samples as they have; maxima,
    minima and sums are the batch's own. So a value logged on each step is the batch's, one logged on each epoch weighs
    batches by their samples, and with `sync_dist` the ranks meet once for each batch, however many micro-batches each
    has. A torchmetrics Metric is updated by each micro-batch; what it shows on a step is the last one's.

    Args:
        results: the training loop's `_ResultCollection`.
    """

    def __init__(self, results: Any) -> None:
        self._results = results
        self._share = 1.0
        self._run, self._left_out = 0, 0
        self._noted: dict[str, list[tuple[Tensor, int, float]]] = {}

    def __enter__(self) -> LogAggregation:
        self._whole = self._results.batch
        self._results.update_metrics = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._results.update_metrics
        self._results.batch, self._results.batch_size = self._whole, None
        self._whole = None

    def micro_batch(self, batch: Any, samples: int, share: float) -> None:
        """Say what is run next.

        Args:
            batch: the micro-batch, whose samples are counted where a mean is logged.
            samples: how many it has.
            share: what it counts of the batch.
        """
        self._results.batch, self._results.batch_size = batch, None
        self._run += samples
        self._share = share

    def leave_out(self, samples: int) -> None:
        """Say that some samples are not run, since nothing in them counts; they are the batch's all the same.

        Args:
            samples: how many.
        """
        self._left_out += samples

    def forget(self) -> None:
        """Forget what was logged: the batch is run again."""
        self._noted.clear()
        self._run, self._left_out = 0, 0

    def log(self) -> None:
        """Log it, after the `with` block."""
        for key, entries in self._noted.items():
            meta = self._results[key].meta
            samples = sum(samples for _, samples, _ in entries)
            value = entries[0][0] if len(entries) == 1 else _together(entries, meta)
            self._results.update_metrics(key, value, samples + self._left_out * (samples == self._run))
        self.forget()

    def _note(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor):
            self._noted.setdefault(key, []).append((value, batch_size, self._share))
        else:
            type(self._results).update_metrics(self._results, key, value, batch_size)


def _together(entries: list[tuple[Tensor, int, float]], meta: Any) -> Tensor:
    """The batch's value."""
    values = torch.stack([value for value, _, _ in entries])
    if meta.is_mean_reduction:
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        total = sum(share for _, _, share in entries)
        weights = [share / total if total else 1 / len(entries) for _, _, share in entries]
        return (values * values.new_tensor(weights)).sum()
    if meta.is_max_reduction:
        return values.amax()
    return values.amin() if meta.is_min_reduction else values.sum()


TakeApart = Callable[[Any], list[MicroBatch]]


class MicroBatchClosure:
    """Runs each batch of a trainer's fit in micro-batches.

    Args:
        trainer: set up, and not training yet.
        take_apart: makes the micro-batches of a batch.
        sync: when the gradients of several processes meet.
        recovery: what to do when memory runs out; None to let it end the run.

    Attributes:
        seq_len: padded length of the micro-batch that was run last; None before, and where nobody can tell.
    """

    def __init__(self, trainer: Any, take_apart: TakeApart, sync: GradientSync, recovery: Recovery | None) -> None:
        self.trainer = trainer
        self.take_apart = take_apart
        self.sync = sync
        self.recovery = recovery
        self.seq_len: int | None = None
        self._spoilt = False
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._make = self._loop._make_closure
        self._loop._make_closure = self._make_closure

    def undo(self) -> None:
        """Let the loop make its own closures again. A second call does nothing."""
        vars(self._loop).pop("_make_closure", None)

    def attempted(self, steps: Callable[[], Any]) -> Any:
        """Run steps; return what they return, or how memory ran out.

        On a CPU in which oneDNN found no memory for a kernel, later ones run in threads of their own: it would find
        none for any new shape in this one (see `measure/apart.py`).

        Args:
            steps: takes no arguments.
        """
        device = self.trainer.strategy.root_device.type
        if self._spoilt:
            return apart(lambda: attempt(steps, device))
        seen = attempt(steps, device)
        if isinstance(seen, Failure) and device == "cpu":
            sign = find_in_text(seen.message.partition(" (")[0])  # `attempt` adds a word of doubt
            self._spoilt = sign is not None and sign.library == "oneDNN"
        return seen

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        closure = self._make(kwargs, optimizer, batch_idx)
        if "batch" not in kwargs:
            raise MisconfigurationException(
                "BatchFinder(split_batches=True) splits the batches that training_step is given, and this one takes a "
                "dataloader_iter. Write training_step(self, batch, batch_idx), or leave split_batches out."
            )
        one = _Batch(self, self._loop, closure._zero_grad_fn, closure._backward_fn, kwargs, batch_idx)
        closure._step_fn, closure._zero_grad_fn, closure._backward_fn = one.run, None, None
        return closure


class _Batch:
    """One batch's way through its micro-batches.

    Args:
        split: the trainer's.
        loop: the trainer's automatic optimization.
        zero_grad: zeroes the gradients, with its hooks; None where nothing is to be trained.
        backward: the backward of a loss, with its hooks; None where nothing is to be trained.
        kwargs: what training_step is called with for the whole batch.
        batch_idx: the batch's number in the epoch.
    """

    def __init__(
        self,
        split: MicroBatchClosure,
        loop: Any,
        zero_grad: Callable[[], None] | None,
        backward: Callable[[Any], None] | None,
        kwargs: OrderedDict[str, Any],
        batch_idx: int,
    ) -> None:
        self._split = split
        self._loop = loop
        self._zero_grad = zero_grad
        self._backward = backward
        self._kwargs = kwargs
        self._batch_idx = batch_idx
        self._at = 0
        self._zeroed = False
        self._start: BatchSnapshot | None = None

    def run(self) -> Any:
        """Run all micro-batches; return what Lightning expects of a training_step."""
        sync, self._zeroed = self._split.sync, False
        sync.begin()
        with LogAggregation(self._split.trainer._results) as logged:
            if self._split.recovery is None:
                seen = self._through(self._split.take_apart(self._kwargs["batch"]), logged)
            else:
                seen = self._recovered(self._split.recovery, logged)
        if self._backward is not None:
            sync.finish()
        logged.log()
        return seen

    def _recovered(self, recovery: Recovery, logged: LogAggregation) -> Any:
        """As often as it takes, each time from the start."""
        split, story = self._split, RecoveryAttempt(self._batch_idx)
        self._start = BatchSnapshot(split.trainer.lightning_module)
        while True:
            with recovery.others_hear():
                parts = split.take_apart(self._kwargs["batch"])
                seen = split.attempted(lambda parts=parts: self._through(parts, logged))  # type: ignore[misc]
            failed = isinstance(seen, Failure)
            if failed:
                story.add(parts[self._at], seen.message)
                self._undo(logged)
            if recovery.ran_everywhere(story, failed):
                break
            if not failed:
                seen = None
                self._undo(logged)
        recovery.tell(story, max(part.samples for part in parts))
        return seen

    def _undo(self, logged: LogAggregation) -> None:
        assert self._start is not None
        logged.forget()
        self._start.restore()
        clear(self._split.trainer.strategy.root_device)

    def _through(self, parts: list[MicroBatch], logged: LogAggregation) -> Any:
        """Forward and backward of each micro-batch."""
        total: Any = None
        extra: dict[str, Any] = {}
        last = max((index for index, part in enumerate(parts) if part.factor), default=0)
        for self._at, part in enumerate(parts):
            if not part.factor:  # nothing in it counts: its loss is a mean over nothing, NaN
                logged.leave_out(part.samples)
                continue
            self._split.seq_len, extra = part.seq_len, {}
            logged.micro_batch(part.batch, part.samples, part.share)
            with self._split.sync.micro_batch(self._at == last):
                seen = self._loop._make_step_fn(OrderedDict(self._kwargs, batch=part.batch))()
                loss, extra = seen.closure_loss, seen.extra
                self._zero_once()
                if loss is not None and part.factor != 1.0:
                    loss = loss * part.factor
                if loss is not None and self._backward is not None:
                    self._backward(loss)
            if loss is not None:
                total = loss.detach() if total is None else total + loss.detach()
            del seen, loss
        return self._loop.output_result_cls(closure_loss=total, extra=extra)

    def _zero_once(self) -> None:
        """Zero the gradients: once for each batch, however often it is run, since callbacks may count on it."""
        if self._zero_grad is None or self._zeroed:
            return
        self._zero_grad()
        self._zeroed = True
        if self._start is not None:
            self._start.gradients_zeroed()
