"""An out-of-memory, an interrupt or a bug anywhere in a try leaves everything as it was."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder import tune_batch_size
from batchfinder.measure import trial
from tests.loop import loops
from tests.snapshot.state_digest import Digester, differences

STAGES = ("forward", "loss", "backward", "optimizer", "average")
EACH = 4
ACTIVE: list[FailingOperator] = []  # not an attribute of anything that is put back


class FailingOperator(TorchDispatchMode):
    """Writes down in which stage each operator of a search ran, and raises in the Nth."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.error = at, error
        self.stages: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.stages.append(loops.STAGE[0])
        if len(self.stages) - 1 == self.at:
            assert self.error is not None
            raise self.error
        return func(*args, **(kwargs or {}))


class Searching:
    """A loop that fits three samples, to be searched again and again."""

    def __init__(self, net: str) -> None:
        loop = loops.make_loop(net, most=3)
        loop.train_step(loop.make_batch(2, None))
        step: Callable[[Any], None] = loop.train_step

        def under_the_mode(batch: Any) -> None:
            with ACTIVE[0]:
                step(batch)

        self.loop, self.train_step = loop, under_the_mode
        self.digest = Digester(keep=True)
        self.before = self.now()
        self.whole = FailingOperator()
        assert self.search(self.whole) == 3

    def now(self) -> Any:
        return self.digest(state=self.loop.state, step=self.train_step)

    def search(self, mode: FailingOperator) -> int:
        ACTIVE[:] = [mode]
        found = tune_batch_size(
            self.train_step, self.loop.make_batch, self.loop.state, max_batch_size=4, tolerance=0, cache=False
        )
        return found.batch_size

    def places(self, each: int) -> list[tuple[str, int]]:
        """As many operators of each stage, drawn from all tries of a search."""
        draw = random.Random(2)
        return [
            (stage, at)
            for stage in STAGES
            for at in draw.sample([n for n, seen in enumerate(self.whole.stages) if seen == stage], each)
        ]


@pytest.fixture(scope="module", params=list(loops.NETS))
def searching(request: pytest.FixtureRequest) -> Searching:
    """A loop, searched once."""
    return Searching(request.param)


@pytest.fixture(autouse=True)
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full garbage collection after each of these tries would take most of the time."""
    monkeypatch.setattr(trial, "clear", lambda device: None)


def test_an_out_of_memory_in_any_stage_changes_neither_state_nor_answer(searching: Searching) -> None:
    """It is believed when it comes twice; once, it leaves the answer right and the state bit-identical."""
    stages: Counter[str] = Counter()
    for stage, at in searching.places(EACH):
        assert searching.search(FailingOperator(at, torch.OutOfMemoryError(loops.MESSAGE))) == 3
        assert differences(searching.now(), searching.before) == []
        stages[stage] += 1
    assert stages == dict.fromkeys(STAGES, EACH)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), RuntimeError("a memory of an elephant"), ValueError("the labels are wrong")],
    ids=["interrupt", "memory", "bug"],
)
def test_an_interrupt_and_a_bug_propagate_unchanged_after_restoring(searching: Searching, error: BaseException) -> None:
    """The very exception arrives, with the same text and the user's own frames, and everything is back."""
    text = str(error)
    for _, at in searching.places(1):
        with pytest.raises(type(error)) as caught:
            searching.search(FailingOperator(at, error))
        assert caught.value is error
        assert str(error) == text
        assert "under_the_mode" in [entry.name for entry in caught.traceback]
        assert differences(searching.now(), searching.before) == []
