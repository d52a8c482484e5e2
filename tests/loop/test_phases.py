"""Tries have what a loop does besides full batches: an evaluation, and an epoch's smaller last batch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder import tune_batch_size
from batchfinder.errors import InvalidValue

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."
MOST = 6  # samples that fit
TAKEN: list[list[Any]] = []  # by each try; nothing that is put back reaches it


class Loop:
    """A loop on ones that writes down what it takes: sizes of batches, and "e" for an evaluation; "|" between steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        TAKEN[:] = [[]]
        self.evaluations_fit_below = 100

    def step(self, micro_batches: Iterable[torch.Tensor]) -> None:
        for batch in [micro_batches] if isinstance(micro_batches, torch.Tensor) else micro_batches:
            TAKEN[-1].append(len(batch))
            if len(batch) > MOST:
                raise torch.OutOfMemoryError(MESSAGE)
            self.model(batch).sum().backward()
        TAKEN[-1].append("|")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        size = TAKEN[-1][-2]
        TAKEN[-1].append("e")
        if size >= self.evaluations_fit_below:
            raise torch.OutOfMemoryError(MESSAGE)

    def tune(self, **options: Any) -> int:
        found = tune_batch_size(
            lambda batches: self.step(batches),
            lambda batch_size, seq_len: torch.ones(batch_size, 1),
            [self.model, self.optimizer],
            **{"cache": False, **options},
            tolerance=0.0,
            on_trial=lambda trial: TAKEN.append([]),
        )
        return found.batch_size

    def of(self, size: int) -> str:
        """What the last try of a size took."""
        return "".join(map(str, next(one for one in reversed(TAKEN) if one and one[0] == size)))


@pytest.mark.parametrize(
    ("epoch_samples", "evaluates", "taken"),
    [
        (None, False, "6|6|"),
        (None, True, "6|6|e6|6|"),
        (60, True, "6|6|e6|6|"),
        (63, False, "6|6|3|6|6|"),
        (63, True, "6|6|e6|6|3|6|6|"),
    ],
)
def test_each_try_has_them(epoch_samples: int | None, evaluates: bool, taken: str) -> None:
    """After the first steps; and two full steps after each, which find the cache in other pieces."""
    loop = Loop()
    assert loop.tune(evaluate=loop.evaluate if evaluates else None, epoch_samples=epoch_samples) == 6
    assert loop.of(6) == taken


@pytest.mark.parametrize(
    ("epoch_samples", "taken"),
    [
        (120, "66|66|"),  # steps of 24
        (131, "66|66|65|66|"),  # 11 are left: 6 and 5
        (124, "66|66|4|66|"),  # 4 are left
        (126, "66|66|6|66|"),  # 6 are left: a full micro-batch that is alone in its step
        (132, "66|66|66|66|"),
        (139, "66|66|61|66|"),  # 19 are left: of three full ones a try takes one, and the last
    ],
)
def test_an_epochs_last_step_accumulates_what_is_left(epoch_samples: int, taken: str) -> None:
    """Two micro-batches stand for any number, a step of one is taken as it is."""
    loop = Loop()
    assert loop.tune(target_batch_size=24, epoch_samples=epoch_samples) == 6
    assert loop.of(6) == taken


def test_devices_share_a_step() -> None:
    """Each takes its part of the target: 24 samples of 48, in an epoch that has 124 on each device."""
    loop = Loop()
    assert loop.tune(target_batch_size=48, num_devices=2, epoch_samples=124) == 6
    assert loop.of(6) == "66|66|4|66|"


def test_a_size_that_makes_up_no_whole_target_accumulates_past_it() -> None:
    """Steps of 25 samples in micro-batches of 6 have five: 9 samples are left of 129, a full one and one of 3."""
    loop = Loop()
    loop.tune(target_batch_size=25, epoch_samples=129)
    assert loop.of(6) == "66|66|63|66|"


def test_a_size_beside_which_an_evaluation_does_not_fit_is_too_large() -> None:
    """Where the smallest size leaves room for it."""
    loop = Loop()
    loop.evaluations_fit_below = 5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "An evaluation")
        assert loop.tune(evaluate=loop.evaluate) == 4


def test_an_evaluation_that_never_fits_is_left_out() -> None:
    """A warning says so, once."""
    loop = Loop()
    loop.evaluations_fit_below = 0
    with pytest.warns(UserWarning, match="An evaluation does not fit") as caught:
        assert loop.tune(evaluate=loop.evaluate) == 6
    assert sum("An evaluation" in str(each.message) for each in caught) == 1
    assert loop.of(6) == "6|6|"


def test_a_cached_size_stays_where_an_evaluation_never_fits(tmp_path: Path) -> None:
    """The smallest size says whether it is the evaluation alone, and not the size."""
    loop = Loop()
    given = {"evaluate": loop.evaluate, "cache": str(tmp_path)}
    assert loop.tune(**given) == 6
    TAKEN[:] = [[]]
    loop.evaluations_fit_below = 0
    with pytest.warns(UserWarning, match="An evaluation does not fit"):
        assert loop.tune(**given) == 6
    assert len(TAKEN) == 2  # a single try


def test_what_an_evaluation_raises_is_raised() -> None:
    """It is the user's own, with the size in a note, and all is put back."""
    loop = Loop()
    before = loop.model.weight.clone()
    with pytest.raises(ZeroDivisionError) as caught:
        loop.tune(evaluate=lambda: 1 // 0)
    assert any(re.search(r"tried batch size \d", note) for note in caught.value.__notes__)
    assert torch.equal(before, loop.model.weight)


def test_what_an_evaluation_changes_is_put_back() -> None:
    """Such as the mode of the model."""
    loop = Loop()
    loop.tune(evaluate=lambda: loop.model.eval())
    assert loop.model.training


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluate": lambda batch: None}, "evaluate: .*a function that is called with nothing else"),
        ({"epoch_samples": 0}, "epoch_samples: .*a whole number of at least 1|epoch_samples: .*from 1 to"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], said: str) -> None:
    """Before anything is tried."""
    loop = Loop()
    with pytest.raises(InvalidValue, match=said):
        loop.tune(**options)
    assert TAKEN == [[]]
