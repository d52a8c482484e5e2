"""An evaluation keeps its outputs on the card: `tune_trainer` says so where they will not fit."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DefaultDataCollator,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from batchfinder import tune_trainer
from batchfinder.huggingface.evaluation import TrainerEvaluation
from tests.huggingface.trainers import language_model, make_trainer

WORDS, LENGTH = 1000, 32
SAMPLE_BYTES = LENGTH * (4 * WORDS + 8)  # of logits and labels
TEXT = {"input_ids": list(range(LENGTH)), "labels": list(range(LENGTH))}


def evaluating(folder: Path, samples: int = 400, **options: Any) -> Any:
    """A trainer that evaluates as it trains, and looks at the outputs."""
    given = {
        "kind": Trainer,
        "model": language_model(vocab_size=WORDS),
        "train_dataset": [TEXT] * 64,
        "eval_dataset": [TEXT] * samples,
        "data_collator": DefaultDataCollator(),
        "compute_metrics": lambda outputs: {},
        "eval_strategy": "steps",
        "per_device_eval_batch_size": 16,
        **options,
    }
    trainer = make_trainer(folder, **given)
    trainer.args._n_gpu = min(1, trainer.args.n_gpu)  # of the two that there are in CI
    return trainer


def said(trainer: Any, free_bytes: int) -> str:
    """What is said of the outputs of an evaluation where so many bytes are free."""
    evaluation = TrainerEvaluation(trainer)
    evaluation()
    return evaluation.warning(free_bytes)


def test_outputs_that_do_not_fit_are_named_with_what_to_do(tmp_path: Path) -> None:
    """A batch more is added to all before by copying both, but where each is kept by itself."""
    trainer, kept = evaluating(tmp_path), 400 * SAMPLE_BYTES
    assert said(trainer, 2 * kept) == ""
    assert said(trainer, 2 * kept - 1) == (
        "An evaluation of 400 samples keeps up to 48.93 MiB of outputs on the GPU until it ends, and copies them with "
        "each batch; 97.85 MiB are free beside the model and the optimizer. Pass "
        "TrainingArguments(eval_accumulation_steps=12) to move them to the host every 12 batches, or "
        "Trainer(preprocess_logits_for_metrics=) to keep less."
    )
    trainer.args.eval_do_concat_batches = False
    assert said(trainer, kept) == ""
    assert "until it ends; 48.93 MiB are free" in said(trainer, kept - 1)
    trainer.eval_dataset = {"few": [TEXT] * 10, "many": [TEXT] * 600}
    assert said(trainer, kept).startswith("An evaluation of 600 samples")


@pytest.mark.parametrize(
    "options",
    [
        {"compute_metrics": None},
        {"prediction_loss_only": True},
        {"eval_accumulation_steps": 8},
        {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_where_next_to_nothing_is_kept_nothing_is_said(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever else the evaluation does."""
    assert said(evaluating(tmp_path, **options), 100 * SAMPLE_BYTES) == ""


def test_an_evaluation_that_raises_is_the_trainers_to_raise(tmp_path: Path) -> None:
    """It is not measured, and what it raised is told; an error about memory goes on to the try."""
    evaluation = TrainerEvaluation(evaluating(tmp_path, preprocess_logits_for_metrics=lambda logits, labels: 1 / 0))
    evaluation()
    assert evaluation.warning(1) == ""
    assert evaluation.raised == "ZeroDivisionError: division by zero"

    def out_of_memory(logits: Any, labels: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    evaluation = TrainerEvaluation(evaluating(tmp_path, preprocess_logits_for_metrics=out_of_memory))
    with pytest.raises(torch.OutOfMemoryError):
        evaluation()


def test_two_batches_of_each_evaluation_are_predicted(tmp_path: Path) -> None:
    """Of the evaluation's own size, or what there is; metrics are left as they are, and not computed."""
    data = {"few": [TEXT] * 10, "many": [TEXT] * 600}
    trainer = evaluating(tmp_path, eval_dataset=data, compute_metrics=lambda outputs: 1 / 0, prediction_loss_only=True)
    sizes: list[int] = []

    def predict(model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        return Trainer.prediction_step(trainer, model, inputs, *rest, **options)

    trainer.prediction_step, computes = predict, trainer.compute_metrics
    trainer.args.prediction_loss_only = False
    TrainerEvaluation(trainer)()
    assert sizes == [1, 10, 10, 16, 16]
    assert trainer.compute_metrics is computes


def test_an_evaluation_that_generates_does_so_as_the_trainers_own(tmp_path: Path) -> None:
    """With the length and the beams of its arguments, which `evaluate` of a Seq2SeqTrainer would set."""
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        predict_with_generate=True,
        generation_max_length=7,
        generation_num_beams=3,
        per_device_eval_batch_size=4,
    )
    data: Any = [{"input_ids": [3] * 5, "labels": [4] * 5}] * 9
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        eval_dataset=data,
        data_collator=DefaultDataCollator(),
        compute_metrics=lambda outputs: {},
    )
    seen: list[Any] = []
    generate = model.generate

    def noted(*inputs: Any, **options: Any) -> Any:
        seen.append([options.get("max_length"), options.get("num_beams")])
        return generate(*inputs, **options)

    model.generate = noted  # type: ignore[method-assign]
    evaluation = TrainerEvaluation(trainer)
    evaluation()
    assert evaluation.raised == ""
    assert seen[-2:] == [[7, 3], [7, 3]]


@pytest.mark.gpu
def test_the_evaluation_that_is_warned_of_runs_out_of_memory(tmp_path: Path) -> None:
    """With the number that the warning names it does not; of one that fits nothing is said."""
    budget = 192 << 20  # of which cuBLAS's workspaces may be 64: another module of tests chooses their size
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "An evaluation")
        tune_trainer(evaluating(tmp_path, samples=100, use_cpu=False), budget=budget, cache=False)
    trainer = evaluating(tmp_path, samples=2400, use_cpu=False)
    with pytest.warns(UserWarning, match="An evaluation") as caught:
        tune_trainer(trainer, budget=budget, cache=False)
    advised = [re.search(r"eval_accumulation_steps=(\d+)", str(warning.message)) for warning in caught]
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.evaluate()
        torch.cuda.empty_cache()
        (trainer.args.eval_accumulation_steps,) = [int(number[1]) for number in advised if number]
        trainer.evaluate()
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


class Emptied(TrainerCallback):  # type: ignore[misc]
    """What is reserved as training begins and after each step, with no gradients and no cache."""

    def __init__(self) -> None:
        self.reserved: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.empty_cache()
        self.reserved.append(torch.cuda.memory_reserved())

    on_train_begin = on_step_end


@pytest.mark.gpu
def test_training_leaves_no_segment_that_cannot_be_given_back(tmp_path: Path) -> None:
    """cuBLAS has its workspaces as training begins, and not in the midst of what a first step takes."""
    options = {"eval_strategy": "no", "optim": "sgd", "gradient_accumulation_steps": 1}
    trainer = evaluating(tmp_path, use_cpu=False, samples=1, **options)
    tune_trainer(trainer, budget="1GiB", cache=False)
    emptied = Emptied()
    trainer.add_callback(emptied)
    trainer.train()
    assert len(emptied.reserved) == 4
    assert len(set(emptied.reserved[1:])) == 1, emptied.reserved
    assert emptied.reserved[1] - emptied.reserved[0] <= 2 << 20, emptied.reserved
