"""One optimizer step of a batch that is split: Lightning's closure, run over micro-batches, and what they log.

Lightning's loop makes a closure for each batch: training_step, zero_grad, backward. In its place each micro-batch goes
through the module's training_step and backward, with all their hooks, and gradients are zeroed once, after the first
forward, as they are for a batch in one piece. All else of the loop sees one batch and one optimizer step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from batchfinder.measure.trial import Failure, attempt, clear

if TYPE_CHECKING:
    from batchfinder.lightning.compat import (
        Closure,
        ClosureResult,
        ResultCollection,
    )


class LogAggregation:
    """Collects what is logged while micro-batches run, in place of Lightning's results.

    A mean is the micro-batches' mean by their shares of the batch and counts as many samples as they have; maxima,
    minima and sums are the batch's own. So a value logged on each step is the batch's, one logged on each epoch weighs
    batches by their samples, and with `sync_dist` there is one all-reduce for each batch, however many micro-batches
    each rank has. A torchmetrics Metric is updated by each micro-batch; what it shows on a step is the last one's.
    """

    def __init__(self, results: ResultCollection) -> None:
        self._results = results
        self._share = 1.0
        self._run = 0
        self.skipped = 0  # samples that are not run, since nothing in them counts; they are the batch's all the same
        self._logged: dict[str, list[tuple[Tensor, int, float]]] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect what is logged; `log` logs it afterwards."""
        whole = self._results.batch
        vars(self._results)["update_metrics"] = self._collect
        try:
            yield
        finally:
            del vars(self._results)["update_metrics"]
            self._results.batch, self._results.batch_size = whole, None

    def start_micro_batch(self, part: MicroBatch) -> None:
        self._results.batch, self._results.batch_size = part.batch, None
        self._run += part.samples
        self._share = part.share

    def clear(self) -> None:
        """Forget what was logged: the batch is run again."""
        self._logged.clear()
        self._run = self.skipped = 0

    def log(self) -> None:
        """Log the batch's values, each reduced over its micro-batches."""
        for key, entries in self._logged.items():
            samples = sum(count for _, count, _ in entries)
            value, meta = entries[0][0], self._results[key].meta
            if len(entries) > 1:
                values = torch.stack([value for value, _, _ in entries])
                if meta.is_mean_reduction:
                    if not values.is_floating_point():
                        values = values.to(torch.get_default_dtype())
                    total = sum(share for _, _, share in entries)
                    weights = [share / total if total else 1 / len(entries) for _, _, share in entries]
                    value = (values * values.new_tensor(weights)).sum()
                elif meta.is_max_reduction:
                    value = values.amax()
                else:
                    value = values.amin() if meta.is_min_reduction else values.sum()
            self._results.update_metrics(key, value, samples + self.skipped * (samples == self._run))
        self.clear()

    def _collect(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor):
            self._logged.setdefault(key, []).append((value, batch_size, self._share))
        else:
            type(self._results).update_metrics(self._results, key, value, batch_size)


class MicroBatchClosure:
    """Runs each batch of a trainer's fit in micro-batches.

    Args:
        trainer: set up, and not training yet.
        split_batch: makes the micro-batches of a batch.
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
        zero_grad, backward = closure_functions(closure)
        replace_closure_step(closure, lambda: self._run_batch(zero_grad, backward, kwargs, batch_idx))
        return closure

    def _run_batch(
        self,
        zero_grad: Callable[[], None] | None,
        backward: Callable[[Tensor], None] | None,
        kwargs: OrderedDict[str, Any],
        batch_idx: int,
    ) -> ClosureResult:
        """Run all micro-batches of a batch, with recovery as often as it takes; what Lightning expects of a step."""
        trainer, recovery = self.trainer, self.recovery
        logged = LogAggregation(logged_results(trainer))
        start: BatchSnapshot | None = None
        zeroed = False
        at = 0  # the micro-batch that is run, or that failed

        def run(parts: list[MicroBatch]) -> ClosureResult:
            """Forward and backward of each micro-batch."""
            nonlocal zeroed, at
            total: Tensor | None = None
            extra: dict[str, Any] = {}
            last = max((index for index, part in enumerate(parts) if part.factor), default=0)
            for at, part in enumerate(parts):
                if not part.factor:  # nothing in it counts: its loss is a mean over nothing, NaN
                    logged.skipped += part.samples
                    continue
                self.seq_len, extra = part.seq_len, {}
                logged.start_micro_batch(part)
                with self.sync.micro_batch(at == last):
                    output = run_training_step(self.loop, OrderedDict(kwargs, batch=part.batch))
                    loss, extra = output.closure_loss, output.extra
                    if zero_grad is not None and not zeroed:
                        # Once for each batch, however often it is run, since callbacks may count on it.
                        zero_grad()
                        zeroed = True
                        if start is not None:
                            start.gradients_zeroed()
                    if loss is not None and part.factor != 1.0:
                        loss = loss * part.factor
                    if loss is not None and backward is not None:
                        backward(loss)
                if loss is not None:
                    total = loss.detach() if total is None else total + loss.detach()
                del output, loss
            return self.loop.output_result_cls(closure_loss=total, extra=extra)

        def restore() -> None:
            logged.clear()
            if start is not None:
                start.restore()
            clear(trainer.strategy.root_device)

        result: ClosureResult | Failure | None = None
        self.sync.begin()
        with logged.collecting():
            if recovery is None:
                result = run(self.split_batch(kwargs["batch"]))
            else:
                device, tries = trainer.strategy.root_device, RecoveryAttempt(batch_idx)
                start = BatchSnapshot(trainer.lightning_module)
                while True:
                    with recovery.broadcast_errors():
                        parts = self.split_batch(kwargs["batch"])
                        result = attempt(partial(run, parts), device.type)
                    failed = isinstance(result, Failure)
                    if isinstance(result, Failure):
                        # Of the micro-batch only the size is kept.
                        tries.failed.append((parts[at].samples, parts[at].seq_len, parts[at].positions[0]))
                        tries.message = result.message
                        restore()
                    if recovery.all_ranks_succeeded(tries, failed):
                        break
                    if not failed:  # it failed on another rank
                        result = None
                        restore()
                recovery.report(tries, max(part.samples for part in parts))
        assert result is not None
        assert not isinstance(result, Failure)
        if backward is not None:
            self.sync.finish()
        logged.log()
        return result
