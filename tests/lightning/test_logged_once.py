"""Values of micro-batches become one value of the batch. Whole fits that log are in test_split_step.py."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection

from batchfinder.lightning.micro_batching.closure import LogAggregation


def logged(values: list[float], samples: list[int], shares: list[float], left_out: int = 0, **options: Any) -> Any:
    """What Lightning has after micro-batches logged values."""
    results = _ResultCollection(training=True)
    results.batch = torch.zeros(sum(samples) + left_out)
    with LogAggregation(results) as once:
        once.leave_out(left_out)
        for value, count, share in zip(values, samples, shares, strict=True):
            once.micro_batch(torch.zeros(count), count, share)
            results.log("training_step", "a", torch.tensor(value), on_step=True, on_epoch=True, **options)
        assert not results["training_step.a"].update_called
    once.log()
    metric = results["training_step.a"]
    assert len(results.batch) == sum(samples) + left_out
    return metric


def test_a_mean_is_by_shares_and_counts_samples() -> None:
    """The step's value is that of the batch; over an epoch the batch counts as many samples as it has."""
    metric = logged([1.0, 4.0], [3, 1], [0.25, 0.75])
    assert float(metric._forward_cache) == 3.25
    assert (float(metric.value), int(metric.cumulated_batch_size)) == (13.0, 4)


def test_samples_that_were_left_out_are_the_batchs() -> None:
    """Those of micro-batches in which nothing counts; not where the user says how many there are."""
    assert int(logged([1.0], [3], [1.0], left_out=2).cumulated_batch_size) == 5
    assert int(logged([1.0], [3], [1.0], left_out=2, batch_size=8).cumulated_batch_size) == 8


def test_other_reductions() -> None:
    """Maximum, minimum and sum of all."""
    values, samples, shares = [1.0, 4.0, 2.0], [1, 1, 1], [1 / 3] * 3
    for reduce, value in ((torch.max, 4.0), (torch.min, 1.0), (torch.sum, 7.0)):
        metric = logged(values, samples, shares, reduce_fx=reduce)
        assert float(metric._forward_cache) == value


def test_shares_of_nothing_are_equal() -> None:
    """Where no micro-batch that logged has a share, each counts the same."""
    assert float(logged([1.0, 3.0], [1, 1], [0.0, 0.0])._forward_cache) == 2.0
