"""One optimizer step of a batch that is split: Lightning's closure, run over micro-batches, and what they log.

Lightning's loop makes a closure for each batch: training_step, zero_grad, backward. In its place each micro-batch goes
through the module's training_step and backward, with all their hooks, and gradients are zeroed once, after the first
forward, as they are for a batch in one piece. All else of the loop sees one batch and one optimizer step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Trainer
from torch import Tensor

from batchfinder.lightning.compat import (
    closure_functions,
    logged_results,
    replace_closure_step,
    replace_make_closure,
    restore_make_closure,
    run_training_step,
)
from batchfinder.lightning.ddp import GradientSync
from batchfinder.lightning.micro_batching.micro_batch import MicroBatch
from batchfinder.lightning.micro_batching.recovery import BatchSnapshot, Recovery, RecoveryAttempt
from batchfinder.measure.cleanup import Failure, attempt, clear

if TYPE_CHECKING:
    from batchfinder.lightning.compat import (
        AutomaticOptimization,
        Closure,
        ClosureResult,
        LogMetadata,
        ResultCollection,
    )


class LogAggregation:
    """Collects what is logged while micro-batches run, in place of Lightning's results.

    A mean is the micro-batches' mean by their shares of the batch and counts as many samples as they have; maxima,
    minima and sums are the batch's own. So a value logged on each step is the batch's, one logged on each epoch weighs
    batches by their samples, and with `sync_dist` there is one all-reduce for each batch, however many micro-batches
    each rank has. A torchmetrics Metric is updated by each micro-batch; what it shows on a step is the last one's.

    Args:
        results: the training loop's.
    """

    def __init__(self, results: ResultCollection) -> None:
        self._results = results
        self._share = 1.0
        self._run, self._skipped = 0, 0
        self._logged: dict[str, list[tuple[Tensor, int, float]]] = {}

    def __enter__(self) -> LogAggregation:
        self._whole = self._results.batch
        vars(self._results)["update_metrics"] = self._collect
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del vars(self._results)["update_metrics"]
        self._results.batch, self._results.batch_size = self._whole, None
        self._whole = None

    def start_micro_batch(self, part: MicroBatch) -> None:
        """Count what is logged from now on as this micro-batch's."""
        self._results.batch, self._results.batch_size = part.batch, None
        self._run += part.samples
        self._share = part.share

    def skip(self, samples: int) -> None:
        """Count samples that are not run, since nothing in them counts; they are the batch's all the same."""
        self._skipped += samples

    def clear(self) -> None:
        """Forget what was logged: the batch is run again."""
        self._logged.clear()
        self._run, self._skipped = 0, 0

    def log(self) -> None:
        """Log the batch's values, after the `with` block."""
        for key, entries in self._logged.items():
            samples = sum(samples for _, samples, _ in entries)
            value = entries[0][0] if len(entries) == 1 else _reduced(entries, self._results[key].meta)
            self._results.update_metrics(key, value, samples + self._skipped * (samples == self._run))
        self.clear()

    def _collect(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor):
            self._logged.setdefault(key, []).append((value, batch_size, self._share))
        else:
            type(self._results).update_metrics(self._results, key, value, batch_size)


def _reduced(entries: list[tuple[Tensor, int, float]], meta: LogMetadata) -> Tensor:
    """A batch's value of its micro-batches' values, samples and shares."""
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


class MicroBatchClosure:
    """Runs each batch of a trainer's fit in micro-batches.

    Args:
        trainer: set up, and not training yet.
        split_batch: makes the micro-batches of a batch.
        sync: when the gradients of several processes are reduced.
        recovery: what to do when memory runs out; None to let it end the run.

    Attributes:
        seq_len: padded length of the micro-batch that was run last; None before, and for data without lengths.
    """

    def __init__(
        self,
        trainer: Trainer,
        split_batch: Callable[[Any], list[MicroBatch]],
        sync: GradientSync,
        recovery: Recovery | None,
    ) -> None:
        self.trainer = trainer
        self.split_batch = split_batch
        self.sync = sync
        self.recovery = recovery
        self.seq_len: int | None = None
        self.loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._make = replace_make_closure(self.loop, self._make_closure)

    def undo(self) -> None:
        """Let the loop make its own closures again. A second call does nothing."""
        restore_make_closure(self.loop)

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: torch.optim.Optimizer, batch_idx: int) -> Closure:
        closure = self._make(kwargs, optimizer, batch_idx)
        if "batch" not in kwargs:
            raise MisconfigurationException(
                "BatchFinder(split_batches=True) splits the batches that training_step is given, and this one takes a "
                "dataloader_iter. Write training_step(self, batch, batch_idx), or leave split_batches out."
            )
        replace_closure_step(closure, _BatchStep(self, closure, kwargs, batch_idx).run)
        return closure


class _BatchStep:
    """Forward and backward of one batch, in its micro-batches.

    Args:
        split: the trainer's.
        closure: the loop's own, for the whole batch.
        kwargs: what training_step is called with for the whole batch.
        batch_idx: the batch's number in the epoch.
    """

    def __init__(
        self, split: MicroBatchClosure, closure: Closure, kwargs: OrderedDict[str, Any], batch_idx: int
    ) -> None:
        self._split = split
        self._zero_grad, self._backward = closure_functions(closure)
        self._kwargs = kwargs
        self._batch_idx = batch_idx
        self._at = 0
        self._zeroed = False
        self._start: BatchSnapshot | None = None

    def run(self) -> ClosureResult:
        """Run all micro-batches; return what Lightning expects of a training_step."""
        sync, recovery = self._split.sync, self._split.recovery
        self._zeroed = False
        sync.begin()
        with LogAggregation(logged_results(self._split.trainer)) as logged:
            if recovery is None:
                result = self._run_micro_batches(self._split.split_batch(self._kwargs["batch"]), logged)
            else:
                result = self._run_with_recovery(recovery, logged)
        if self._backward is not None:
            sync.finish()
        logged.log()
        return result

    def _run_with_recovery(self, recovery: Recovery, logged: LogAggregation) -> ClosureResult:
        """As often as it takes, each time from the start."""
        split, recovered = self._split, RecoveryAttempt(self._batch_idx)
        device = split.trainer.strategy.root_device
        self._start = BatchSnapshot(split.trainer.lightning_module)
        while True:
            with recovery.broadcast_errors():
                parts = split.split_batch(self._kwargs["batch"])
                result = attempt(lambda parts=parts: self._run_micro_batches(parts, logged), device.type)  # type: ignore[misc]
            failed = isinstance(result, Failure)
            if isinstance(result, Failure):
                recovered.record_failure(parts[self._at], result.message)
                self._restore(logged)
            if recovery.all_ranks_succeeded(recovered, failed):
                break
            if not failed:
                del result
                self._restore(logged)
        assert not isinstance(result, Failure)
        recovery.report(recovered, max(part.samples for part in parts))
        return result

    def _restore(self, logged: LogAggregation) -> None:
        assert self._start is not None
        logged.clear()
        self._start.restore()
        clear(self._split.trainer.strategy.root_device)

    def _run_micro_batches(self, parts: list[MicroBatch], logged: LogAggregation) -> ClosureResult:
        """Forward and backward of each micro-batch."""
        loop: AutomaticOptimization = self._split.loop
        total: Tensor | None = None
        extra: dict[str, Any] = {}
        last = max((index for index, part in enumerate(parts) if part.factor), default=0)
        for self._at, part in enumerate(parts):
            if not part.factor:  # nothing in it counts: its loss is a mean over nothing, NaN
                logged.skip(part.samples)
                continue
            self._split.seq_len, extra = part.seq_len, {}
            logged.start_micro_batch(part)
            with self._split.sync.micro_batch(self._at == last):
                output = run_training_step(loop, OrderedDict(self._kwargs, batch=part.batch))
                loss, extra = output.closure_loss, output.extra
                self._zero_grad_once()
                if loss is not None and part.factor != 1.0:
                    loss = loss * part.factor
                if loss is not None and self._backward is not None:
                    self._backward(loss)
            if loss is not None:
                total = loss.detach() if total is None else total + loss.detach()
            del output, loss
        return loop.output_result_cls(closure_loss=total, extra=extra)

    def _zero_grad_once(self) -> None:
        """Zero the gradients: once for each batch, however often it is run, since callbacks may count on it."""
        if self._zero_grad is None or self._zeroed:
            return
        self._zero_grad()
        self._zeroed = True
        if self._start is not None:
            self._start.gradients_zeroed()
