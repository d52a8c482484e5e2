"""Which lengths sizes are found for, and what the lengths get that none was found for."""

from __future__ import annotations

from typing import Any

import pytest

from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.micro_batching.fit import MicroBatchingFit
from tests.lightning import nets
from tests.lightning.varied_lengths import Reader


@pytest.mark.parametrize(
    ("longest", "seq_lens", "expected"),
    [
        (64, None, [64, 48, 32, 24, 16]),
        (22, None, [22, 16]),
        (21, None, [21]),
        (5, None, [5]),
        (None, None, [None]),
        (64, [40, 8], [40, 8]),
    ],
)
def test_lengths(longest: int | None, seq_lens: Any, expected: Any) -> None:
    """The longest, 3/4 of it, 1/2, 3/8 and so on, none of them below 16; or those that were asked for."""
    assert MicroBatchingFit(BatchFinder(seq_lens=seq_lens).options, 1).lengths(longest) == expected


def test_recovery_is_for_a_single_process() -> None:
    """Unless it is asked for: under DDP it costs each step the overlap of the all-reduce with the backward."""
    on, off, default = (BatchFinder(split_batches=True, recover=recover).options for recover in (True, False, None))
    assert [MicroBatchingFit(options, 1).recovers for options in (on, off, default)] == [True, False, True]
    assert [MicroBatchingFit(options, 2).recovers for options in (on, off, default)] == [True, False, False]


def test_lengths_below_one_at_which_a_batch_fits_whole() -> None:
    """They are not tried, and get that one's size."""
    module = Reader()
    module.most = 64
    finder = BatchFinder(split_batches=True, weight="tokens", seq_lens=[16, 8, 4, 2], cache=False)
    nets.trainer(callbacks=[finder]).fit(module)
    assert list(finder.results["fit"]) == [16, 8]
    assert finder.micro_batch_sizes == {2: 8, 4: 8, 8: 8, 16: 4}
