"""The accumulation that makes up a target: what is said of it, and that it is there for one fit alone."""

from __future__ import annotations

import logging

import pytest

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.bounded import Bounded

pytestmark = pytest.mark.usefixtures("nothing_old_is_collected")


@pytest.mark.parametrize(
    ("own", "said"), [(1, []), (3, ["BatchFinder: accumulate_grad_batches = 4 (it was 3): 2 x 4 = 8."])]
)
def test_a_number_of_the_users_is_replaced(own: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """It is named beside the one that is used instead; one that nobody set is not; it is back after the fit."""
    finder = BatchFinder(8, max_batch_size=2, cache=False)
    trainer = nets.trainer(callbacks=[finder], accumulate_grad_batches=own, max_steps=1)
    with caplog.at_level(logging.INFO, logger="lightning_utilities.core.rank_zero"):
        trainer.fit(Bounded())
    assert str(finder.plan) == "2 x 4 = 8"
    assert [line for line in caplog.messages if "accumulate_grad_batches" in line] == said
    assert trainer.accumulate_grad_batches == own
