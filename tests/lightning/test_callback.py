"""What the callback says, keeps, lowers and sets beside training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader

from batchfinder.cache import Store
from batchfinder.cli.cache import list_table
from batchfinder.lightning.callback import BatchFinder
from batchfinder.units import format_bytes
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE, Bounded

SIZE = r"\d+(\.\d+)? [KMG]?i?B"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The summary lines since the last call."""
    lines = [line for line in caplog.messages if line.startswith("BatchFinder: fit batch size")]
    caplog.clear()
    return lines


def test_one_line_for_each_length(caplog: pytest.LogCaptureFixture) -> None:
    """Size, peak, headroom, accumulation, probes, seconds, and whether it came from the cache."""
    options: dict[str, Any] = {"target_batch_size": 32, "max_batch_size": 8, "seq_lens": [8, 16], "headroom": 0.25}
    with caplog.at_level("INFO"):
        nets.trainer(callbacks=[BatchFinder(**options)]).fit(nets.Transformer())
        found = said(caplog)
        nets.trainer(callbacks=[finder := BatchFinder(**options)]).fit(nets.Transformer())
        known = said(caplog)
    figures = rf"peak {SIZE} of {SIZE}; headroom {SIZE}; accumulation 8 x 4 = 32"
    for length, line, again in zip((16, 8), found, known, strict=True):
        start = f"BatchFinder: fit batch size 8 at seq_len {length}; {figures}; "
        assert re.fullmatch(start + r"2 probes in \d+\.\d\d s\.", line), line
        assert re.fullmatch(start + r"from the cache, certified with 1 probe in \d+\.\d\d s\.", again), again
    assert list(finder.results["fit"]) == [16, 8]


def test_a_cached_answer_is_tried_once_or_not_at_all() -> None:
    """As `certify` says; either way nothing is searched."""
    finders = [
        BatchFinder(max_batch_size=8),
        BatchFinder(max_batch_size=8),
        BatchFinder(max_batch_size=8, certify=False),
    ]
    for finder in finders:
        nets.trainer(callbacks=[finder], max_steps=1).fit(nets.ConvNet())
    first, certified, trusted = (finder.results["fit"][None] for finder in finders)
    assert len(first.trials) > 1
    assert (certified.source, [trial.batch_size for trial in certified.trials]) == ("cache", [8])
    assert (trusted.source, trusted.trials) == ("cache", ())


def test_the_peak_of_training_is_compared(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """In one line, for the loggers, and in the cache, whose list shows it; not where no step was taken."""
    cache = Store(str(tmp_path / "cache"))
    for steps in (0, 3):
        finder = BatchFinder(max_batch_size=4, cache=cache)
        logger = CSVLogger(str(tmp_path), name="", version=f"of_{steps}")
        with caplog.at_level("INFO"):
            nets.trainer(callbacks=[finder], max_steps=steps, logger=logger).fit(nets.ConvNet())
        lines = [line for line in caplog.messages if line.startswith("BatchFinder: the peak of training")]
        assert len(lines) == (1 if steps else 0)
    assert re.fullmatch(
        rf"BatchFinder: the peak of training with batch size 4 was {SIZE} resident; {SIZE} when it was tried\.",
        lines[0],
    )
    (record,) = cache.records()
    assert record.result.trained is not None
    size, allocated, reserved = record.result.trained
    assert (size, allocated) == (4, None)
    assert reserved is not None
    logged = (tmp_path / "of_3/metrics.csv").read_text().splitlines()
    assert dict(zip(logged[0].split(","), logged[-1].split(","), strict=True))[
        "batchfinder/peak_reserved_bytes"
    ] == str(float(reserved))
    tried = record.result.measurement
    assert tried is not None
    assert tried.peak_reserved_bytes is not None
    shown = f"{format_bytes(reserved)} at 4 (tried: {format_bytes(tried.peak_reserved_bytes)})"
    assert list_table([record], cache.url).columns["peak in training"] == [shown]


def test_the_peak_of_a_plans_micro_batch_is_compared_with_that_of_the_micro_batch(tmp_path: Path) -> None:
    """And not with that of the largest size, which did not train."""
    cache = Store(str(tmp_path))
    finder = BatchFinder(4, max_batch_size=3, cache=cache)
    nets.trainer(callbacks=[finder], max_steps=1).fit(nets.ConvNet())
    (record,) = cache.records()
    assert (record.result.max_batch_size, finder.batch_size) == (3, 2)
    (tried,) = (trial.measurement.peak_reserved_bytes for trial in record.result.trials if trial.batch_size == 2)
    assert tried is not None
    (shown,) = list_table([record], cache.url).columns["peak in training"]
    assert shown.endswith(f"at 2 (tried: {format_bytes(tried)})")


def test_running_out_of_memory_in_training_lowers_the_record(caplog: pytest.LogCaptureFixture) -> None:
    """By 5 %, and says so; the next start tries the new size once."""

    class Later(nets.ConvNet):
        wrong = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.wrong and batch_idx == 2 and self.trainer.callbacks:
                raise torch.OutOfMemoryError(MESSAGE)

    with pytest.warns(UserWarning, match="BatchFinder") as caught, pytest.raises(torch.OutOfMemoryError):
        nets.trainer(callbacks=[BatchFinder(max_batch_size=20)]).fit(Later())
    assert [str(warning.message) for warning in caught if "BatchFinder" in str(warning.message)] == [
        "BatchFinder: fit ran out of memory at batch size 20, which ran when it was tried. The cache now says 19, "
        "which the next start tries before it uses it."
    ]
    Later.wrong = False
    nets.trainer(callbacks=[again := BatchFinder(max_batch_size=20)]).fit(Later())
    assert (again.batch_size, [trial.batch_size for trial in again.results["fit"][None].trials]) == (19, [19])


def test_validation_gets_a_size_of_its_own() -> None:
    """Within a fit, and for `trainer.validate`, `test` and `predict` alone; the training size is another."""

    class Both(Bounded):
        def loss(self, batch: Any) -> torch.Tensor:
            self.most = 5 if self.training else 12
            return super().loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()
            sizes.append(len(batch[0]))
            self.loss(batch)

        test_step = predict_step = validation_step

        def val_dataloader(self) -> Any:
            return DataLoader(nets.Pictures(24, 4), batch_size=2)

        test_dataloader = predict_dataloader = val_dataloader

    sizes: list[int] = []
    finder = BatchFinder(also=["validate", "test", "predict"], tolerance=0, cache=False)
    trainer = nets.trainer(callbacks=[finder])
    module = Both()
    trainer.fit(module)
    assert (finder.batch_size, sizes[-2:]) == (5, [12, 12])
    for stage, run in (("validate", trainer.validate), ("test", trainer.test), ("predict", trainer.predict)):
        module.steps_taken = 0
        run(module)
        assert finder.results[stage][None].max_batch_size == 12
        assert (sizes[-2:], module.steps_taken) == ([12, 12], 2)


def test_a_callback_that_was_left_out_is_named_in_a_note() -> None:
    """Where the step needs what a callback of the user's sets, the error says how to keep it; named, it works."""

    class Sets(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.scale = 2.0

    class Needs(nets.ConvNet):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * self.scale

    with pytest.raises(AttributeError, match="scale") as caught:
        nets.trainer(callbacks=[BatchFinder(cache=False), Sets()]).fit(Needs())
    assert caught.value.__notes__ == [
        "Raised while BatchFinder tried batch size 1 without your callbacks Sets. If the step needs one of them, name "
        "it in probe_callbacks=."
    ]
    finder = BatchFinder(max_batch_size=8, cache=False, probe_callbacks=[Sets])
    nets.trainer(callbacks=[finder, Sets()]).fit(Needs())
    assert finder.batch_size == 8
