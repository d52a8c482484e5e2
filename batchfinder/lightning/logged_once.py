"""What the micro-batches of a batch log, put together and logged once, as the whole batch would have done."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class LoggedOnce:
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

    def __enter__(self) -> LoggedOnce:
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
