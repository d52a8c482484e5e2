"""While sizes are tried there is a bar in the style of the trainer's own, and afterwards nothing is left of it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import Bounded

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # what hides the terminal's cursor, and what brings it back


class Evaluated(Bounded):
    """Fits 5 samples, and validates."""

    def __init__(self) -> None:
        super().__init__(most=5, rows=24)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(10, 4), batch_size=2)


def fit_and_validate(bar: Any, first: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Find sizes in a fit and in a validation, and check that each is told in one line."""
    finder = BatchFinder(tolerance=0, max_batch_size=8, cache=False, also=["validate"])
    trainer = nets.trainer(
        callbacks=[bar, finder] if first else [finder, bar], enable_progress_bar=True, num_sanity_val_steps=1
    )
    module = Evaluated()
    with caplog.at_level("INFO"):
        trainer.fit(module)
        trainer.validate(module)
    assert finder.batch_size == 5
    told = [message.split(";")[0] for message in caplog.messages if re.match("BatchFinder: (fit|validate)", message)]
    assert told == ["BatchFinder: fit batch size 5", *["BatchFinder: validate batch size 5"] * 2]


@pytest.mark.parametrize("first", [False, True], ids=["finder first", "bar first"])
def test_rich(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where the user's bar writes, a status line says what was tried last; then the bar has the terminal."""
    screen = io.StringIO()
    console = {"file": screen, "force_terminal": True, "width": 150}
    fit_and_validate(RichProgressBar(console_kwargs=console), first, caplog)
    shown = screen.getvalue()
    # Rich draws ten times a second, so that some tries are never shown.
    assert re.search(r"BatchFinder: batch size \d (fits|does not fit) \((1 try|\d+ tries)\)", shown)
    assert shown.rindex("BatchFinder: batch size") < shown.rindex("Validation")
    assert shown.count(HIDE) == shown.count(SHOW) > 0


@pytest.mark.parametrize("first", [False, True], ids=["finder first", "bar first"])
def test_tqdm(first: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of tqdm's says what was tried last, and is wiped; then come the trainer's own bars."""
    fit_and_validate(TQDMProgressBar(), first, caplog)
    output = capsys.readouterr()
    assert "BatchFinder: batch size 1 fits (1 try)" in output.err
    assert "BatchFinder: batch size 8 does not fit (" in output.err
    assert "Epoch 0: 100%" in output.out + output.err
    assert "Validation DataLoader 0: 100%" in output.out + output.err


def test_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer that shows nothing is not made to."""
    nets.trainer(callbacks=[finder := BatchFinder(max_batch_size=4, cache=False)]).fit(Bounded())
    assert finder.batch_size == 4
    output = capsys.readouterr()
    assert "batch size 1 fits" not in output.out + output.err


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_a_bar_that_is_switched_off(
    bar: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is as good as none."""
    fit_and_validate(bar(refresh_rate=0), False, caplog)
    output = capsys.readouterr()
    assert "BatchFinder: batch size" not in output.out + output.err
