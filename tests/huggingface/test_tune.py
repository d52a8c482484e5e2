"""`tune_trainer` on trainers that run out of memory above a size: what it sets, the cache, and messages in full."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder import AccumulationPlan, tune_trainer
from batchfinder.errors import InvalidValue, OutOfMemory
from tests.huggingface import trainers
from tests.huggingface.trainers import MESSAGE, MOST, SEEN, Stream, fixed, make_trainer, texts
from tests.measure.messages import without_figures

SIZE = r"\d+(\.\d+)? [KMG]?i?B"


@pytest.fixture(autouse=True)
def as_at_first() -> Iterator[None]:
    """Five samples fit, and nothing has been seen."""
    MOST[0] = 5
    SEEN.clear()
    yield
    MOST[0] = 5


def sizes(trainer: Any) -> tuple[int, int, int]:
    """What the trainer will train with."""
    args = trainer.args
    return args.per_device_train_batch_size, args.gradient_accumulation_steps, trainer._train_batch_size


def test_the_effective_batch_is_the_arguments_own_or_the_target(tmp_path: Path) -> None:
    """8 x 3 samples are made up of 4 x 6, and 20 of 5 x 4; the loader and the state have the size too."""
    trainer = make_trainer(tmp_path)
    found = tune_trainer(trainer, tolerance=0, cache=False)
    assert found.plan == AccumulationPlan(24, 4, 6)
    assert sizes(trainer) == (4, 6, 4)
    assert trainer.get_train_dataloader().total_batch_size == 4
    tune_trainer(trainer, target_batch_size=20, tolerance=0, cache=False)
    assert sizes(trainer) == (5, 4, 5)
    trainer.train()
    assert trainer.state.train_batch_size == 5


@pytest.mark.slow
def test_with_throughput_for_a_goal_plans_of_the_effective_batch_are_timed(tmp_path: Path) -> None:
    """Its micro-batch is one that was timed, whichever is at full speed here; the effective batch stays."""
    trainer = make_trainer(tmp_path)
    found = tune_trainer(trainer, goal="throughput", tolerance=0, cache=False)
    throughput = found.tuning.throughput
    assert throughput is not None
    assert [rate.batch_size for rate in throughput.rates] == [1, 2, 4]
    assert found.batch_size == throughput.batch_size
    assert sizes(trainer) == (found.batch_size, 24 // found.batch_size, found.batch_size)


def test_a_target_that_no_large_micro_batch_divides(tmp_path: Path) -> None:
    """Is met nearly, or exactly where that is asked for; what the arguments make up is always met exactly."""
    trainer = make_trainer(tmp_path)
    found = tune_trainer(trainer, target_batch_size=34, tolerance=0, cache=False)
    assert sizes(trainer) == (5, 7, 5)
    assert "; accumulation 5 x 7 = 35 (1 more than the target of 34); " in str(found)
    tune_trainer(trainer, target_batch_size=34, exact=True, tolerance=0, cache=False)
    assert sizes(trainer) == (2, 17, 2)
    tune_trainer(trainer, tolerance=0, cache=False)
    assert sizes(trainer) == (2, 17, 2)


@pytest.mark.parametrize(
    ("drop_last", "last", "samples"), [(False, ", the last of 7", 50), (True, "", 43)], ids=["whole", "drop_last"]
)
def test_an_epoch_too_short_for_the_target_is_explained(
    tmp_path: Path, drop_last: bool, last: str, samples: int
) -> None:
    """With what a step really takes: 43 x 6 of 50 texts are 43 and 7."""
    MOST[0] = 43
    trainer = make_trainer(tmp_path, dataloader_drop_last=drop_last)
    with pytest.warns(UserWarning, match="An epoch has") as caught:
        found = tune_trainer(trainer, target_batch_size=256, tolerance=0, cache=False)
    assert found.plan == AccumulationPlan(256, 43, 6)
    has = f"{2 - drop_last} micro-batch{'' if drop_last else 'es'} of 43 samples on each device{last}"
    assert [str(warning.message) for warning in caught if "An epoch has" in str(warning.message)] == [
        f"An epoch has {has}, and 6 are needed for the target batch size of 256. The Trainer steps at the end of each "
        f"epoch, so that every optimizer step sees at most {samples} samples. For steps of one size pass tune_trainer "
        f"a target_batch_size of at most {samples}."
    ]
    assert caught[0].filename == __file__
    SEEN.clear()
    trainer.train()
    assert sum(size for size, _ in SEEN) == trainer.state.global_step * samples


def test_a_loader_that_drops_its_last_batch_keeps_one(tmp_path: Path) -> None:
    """Of four texts no larger batch is made, and training goes on."""
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 20}
    trainer = make_trainer(tmp_path, dataloader_drop_last=True, train_dataset=texts()[:4], **sizes)
    found = tune_trainer(trainer, tolerance=0, cache=False)
    assert found.plan == AccumulationPlan(20, 4, 5)  # five would run
    trainer.train()
    assert trainer.state.global_step == 3


def test_what_fits_in_one_piece_is_not_divided(tmp_path: Path) -> None:
    """No larger size than the effective batch is tried, and accumulation goes."""
    MOST[0] = 1000
    trainer = make_trainer(tmp_path)
    found = tune_trainer(trainer, cache=False)
    assert (found.result.max_batch_size, sizes(trainer)) == (24, (24, 1, 24))
    assert max(size for size, _ in SEEN) == 24


def test_batches_are_of_the_longest_samples_or_of_a_length(tmp_path: Path) -> None:
    """The longest of all comes last; with seq_len= the batches are stretched, which makes another question."""
    last = {"input_ids": [1] * 19, "labels": [1] * 19}
    trainer = make_trainer(tmp_path, train_dataset=[*texts(), last], train_sampling_strategy="sequential")
    tune_trainer(trainer)
    assert {length for _, length in SEEN} == {19}
    SEEN.clear()
    found = tune_trainer(trainer, seq_len=20)
    assert {length for _, length in SEEN} == {20}
    assert found.result.shape.seq_len == 20


def test_batches_may_be_made_by_a_function(tmp_path: Path) -> None:
    """Then no sample is read."""

    class Unreadable(Stream):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("read")

    trainer = make_trainer(tmp_path, train_dataset=Unreadable(texts()))
    text = torch.ones(1, 9, dtype=torch.int64)
    tune_trainer(
        trainer, make_batch=lambda size, seq_len: {name: text.repeat(size, 1) for name in ("input_ids", "labels")}
    )
    assert {length for _, length in SEEN} == {9}


def test_as_text_it_is_one_line(tmp_path: Path) -> None:
    """Size, peak, headroom, accumulation, tries, and where the answer comes from; a second start certifies it."""
    line = rf"batch size 5; peak {SIZE} of {SIZE}; headroom {SIZE}; accumulation 4 x 6 = 24; "
    first = tune_trainer(make_trainer(tmp_path), headroom="5%", tolerance=0)
    assert re.fullmatch(line + r"\d+ probes in \d+\.\d\d s\.", str(first))
    SEEN.clear()
    trainer = make_trainer(tmp_path, output_dir=str(tmp_path / "elsewhere"), learning_rate=0.5, seed=7, max_steps=9)
    again = tune_trainer(trainer, headroom="5%", tolerance=0)
    assert re.fullmatch(line + r"from the cache, certified with 1 probe in \d+\.\d\d s\.", str(again))
    assert (sizes(trainer), {size for size, _ in SEEN}) == ((4, 6, 4), {5})
    SEEN.clear()
    tune_trainer(make_trainer(tmp_path), headroom="5%", tolerance=0, certify=False)
    assert SEEN == []


@pytest.mark.parametrize(
    "changed",
    [
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
        {"activation_checkpointing": True},
        {"optim": "sgd"},
        {"max_grad_norm": 0.0},
        {"neftune_noise_alpha": 5.0},
        {"kind": trainers.Weighing},
        {"train_dataset": [{"input_ids": [1] * 13, "labels": [1] * 13}]},
        {"gradient_accumulation_steps": 4},
        {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.sum()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_changes_a_step_is_another_question(tmp_path: Path, changed: dict[str, Any]) -> None:
    """The first trainer's answer is not used for the second."""
    MOST[0] = 1000
    tune_trainer(make_trainer(tmp_path))
    SEEN.clear()
    found = tune_trainer(make_trainer(tmp_path, **changed))
    assert found.result.source == "measured"
    assert SEEN


def test_a_bug_is_raised_as_it_came_and_the_sizes_stay(tmp_path: Path) -> None:
    """With a note that names the size; the trainer can train."""

    class Wrong(trainers.LimitedTrainer):
        def compute_loss(self, *args: Any, **rest: Any) -> Any:
            raise ValueError("the labels are wrong")

    trainer = make_trainer(tmp_path, kind=Wrong)
    with pytest.raises(ValueError, match=r"^the labels are wrong") as caught:
        tune_trainer(trainer)
    assert caught.value.__notes__ == ["Raised while tune_trainer tried batch size 1."]
    assert (sizes(trainer), trainer.is_in_train, trainer.optimizer) == ((8, 3, 8), False, None)
    assert "get_train_dataloader" not in vars(trainer)


def test_no_size_that_fits_is_an_error_with_advice(tmp_path: Path) -> None:
    """It names the smallest size and the device's own words."""
    MOST[0] = 0
    trainer = make_trainer(tmp_path)
    said = (
        f"batch size 1 does not fit: {MESSAGE} Try a smaller model, a lower precision, activation checkpointing or an "
        "optimizer with less state."
    )
    with pytest.raises(OutOfMemory) as caught:
        tune_trainer(trainer)
    assert without_figures(str(caught.value)) == said
    assert sizes(trainer) == (8, 3, 8)


def test_an_out_of_memory_in_training_lowers_the_record(tmp_path: Path) -> None:
    """In `watch` it is raised unchanged, a warning has the numbers, and the next start tries the lower size."""
    trainer = make_trainer(tmp_path)
    found = tune_trainer(trainer, tolerance=0)
    MOST[0] = 3
    said = (
        "training ran out of memory at batch size 4, which ran when it was tried. The cache now says 3, which the next "
        "start tries before it uses it."
    )
    with (
        pytest.warns(UserWarning, match=f"^{re.escape(said)}$"),
        pytest.raises(torch.OutOfMemoryError, match=re.escape(MESSAGE)),
        found.watch(),
    ):
        trainer.train()
    SEEN.clear()
    again = make_trainer(tmp_path)
    found = tune_trainer(again, tolerance=0)
    assert [trial.batch_size for trial in found.result.trials] == [3]
    assert sizes(again) == (3, 8, 3)


def test_an_out_of_memory_in_an_evaluation_leaves_the_record(tmp_path: Path) -> None:
    """Its size is another one, and what it keeps has an argument of its own."""

    class Evaluated(trainers.LimitedTrainer):
        def prediction_step(self, *args: Any, **options: Any) -> Any:
            raise torch.OutOfMemoryError(MESSAGE)

    trainer = make_trainer(tmp_path, kind=Evaluated, eval_dataset=texts(), eval_strategy="steps")
    found = tune_trainer(trainer, tolerance=0)
    said = (
        "an evaluation ran out of memory, so the size of training stays as it is. The Trainer keeps its outputs on the "
        "GPU until it ends: pass TrainingArguments(eval_accumulation_steps=) to move them to the host, or a smaller "
        "per_device_eval_batch_size."
    )
    with (
        pytest.warns(UserWarning, match=f"^{re.escape(said)}$"),
        pytest.raises(torch.OutOfMemoryError, match=re.escape(MESSAGE)),
        found.watch(),
    ):
        trainer.train()
    assert found.tuning.entry is not None
    assert found.tuning.entry.get().max_batch_size == found.result.max_batch_size == 5


def test_without_a_cache_the_advice_names_the_function(tmp_path: Path) -> None:
    """The way to leave more free is tune_trainer's own."""
    trainer = make_trainer(tmp_path)
    found = tune_trainer(trainer, tolerance=0, cache=False)
    MOST[0] = 3
    said = (
        "training ran out of memory at batch size 4, which ran when it was tried. Leave more memory free with "
        "tune_trainer(headroom=0.05)."
    )
    with (
        pytest.warns(UserWarning, match=f"^{re.escape(said)}$"),
        pytest.raises(torch.OutOfMemoryError),
        found.watch(),
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_batch_size": 0}, "target_batch_size: invalid value 0; expected a size of at least 1."),
        (
            {"seq_len": 0},
            "seq_len: invalid value 0; expected a length of at least 1, or None for the longest in the data.",
        ),
        (
            {"multiple_of": 16},
            "target_batch_size: invalid value 24; expected a multiple of 16, as multiple_of asks of each size.",
        ),
        ({"tolerance": 1.0}, "tolerance: invalid value 1.0; expected a share from 0 (exact) to below 1, such as 0.01."),
        (
            {"headroom": "much%"},
            "headroom: invalid value 'much%'; expected a share such as 0.1 or 10%, or a size such as 1GiB.",
        ),
        ({"budget": "much"}, "budget: invalid value 'much'; expected a positive size such as 12GiB, 900MiB or 24GB."),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    """Before anything is prepared or tried."""
    trainer = make_trainer(tmp_path, fixed)
    with pytest.raises(InvalidValue) as caught:
        tune_trainer(trainer, **options)
    assert str(caught.value) == said
    assert (SEEN, trainer.optimizer, sizes(trainer)) == ([], None, (8, 3, 8))
