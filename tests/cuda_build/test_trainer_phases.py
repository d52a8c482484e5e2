"""`tune_trainer` tries what a training does besides full batches: a restored optimizer, evaluations, an epoch's end."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from batchfinder.testing import CudaStubFixture

pytestmark = pytest.mark.cuda_build


def resumed() -> dict[str, Any]:
    """The size that is found for a training that goes on from a checkpoint, and how such a training fares with it."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    import torch
    from transformers import DefaultDataCollator, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from batchfinder import tune_trainer
    from batchfinder.errors import InvalidValue

    model = GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=6, n_head=8, vocab_size=20000))
    data: Any = [{"input_ids": [1] * 128, "labels": [1] * 128}] * 2000
    usual: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 2000}
    usual["dataloader_drop_last"] = True  # no smaller batch ends an epoch, which would lower both sizes
    with TemporaryDirectory() as folder:

        def trainer(name: str, **options: Any) -> Any:
            arguments = TrainingArguments(f"{folder}/{name}", **usual, **options)
            return Trainer(model=model, args=arguments, train_dataset=data, data_collator=DefaultDataCollator())

        first = trainer("first", max_steps=1, save_strategy="steps", save_steps=1)
        first.args.per_device_train_batch_size = first._train_batch_size = 2
        first.train()
        del first
        torch.cuda.empty_cache()
        (saved,) = Path(folder).glob("first/checkpoint-*")
        sizes = {}
        for checkpoint in (None, str(saved)):
            again = trainer("again", max_steps=40, save_strategy="no")
            found = tune_trainer(again, cache=False, resume_from_checkpoint=checkpoint)
            sizes[str(checkpoint)] = max(trial.batch_size for trial in found.result.trials if trial.fits)
        kept = len(again.optimizer.state) if again.optimizer is not None else 0
        again.args.per_device_train_batch_size = again._train_batch_size = sizes[str(saved)]
        again.args.gradient_accumulation_steps = 1
        before = torch.cuda.memory_stats()
        again.train(resume_from_checkpoint=str(saved))
        after = torch.cuda.memory_stats()
        try:
            tune_trainer(again, cache=False, resume_from_checkpoint=True)
        except InvalidValue as error:
            said = str(error).replace(folder, "")
    return {
        "sizes": list(sizes.values()),
        "kept": kept,
        "steps": again.state.global_step,
        "failures": [after[name] - before[name] for name in ("num_alloc_retries", "num_ooms")],
        "said": said,
    }


@pytest.mark.exhaustive
def test_a_size_trains_on_from_a_checkpoint(cuda_stub: CudaStubFixture) -> None:
    """The restored state lies otherwise than one that a first step makes: what fits a new training runs out of memory."""
    seen = cuda_stub(memory="4GiB").run(resumed).result
    alone, on = seen["sizes"]
    assert on < alone
    assert (seen["kept"], seen["steps"], seen["failures"]) == (0, 40, [0, 0])
    assert seen["said"].startswith(
        "resume_from_checkpoint: invalid value True; expected a folder that a Trainer has saved"
    )


def phases() -> list[dict[str, Any]]:
    """What the last try took, in order, and what the training that follows has the allocator do."""
    import warnings
    from tempfile import TemporaryDirectory
    from unittest.mock import patch

    import torch
    from transformers import DefaultDataCollator, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from batchfinder import tune_trainer

    taken: list[list[int]] = [[]]
    computed: list[int] = []

    class Watched(Trainer):  # type: ignore[misc, unused-ignore]
        def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *rest: Any) -> torch.Tensor:
            taken[-1].append(len(inputs["input_ids"]))
            return super().training_step(model, inputs, *rest)

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, **options: Any) -> Any:
            taken[-1].append(-len(inputs["input_ids"]))
            return super().prediction_step(model, inputs, prediction_loss_only, **options)

    def compute(outputs: Any) -> dict[str, float]:
        computed.append(len(outputs.predictions))
        return {}

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=5000))
    sample = {"input_ids": [1] * 64, "labels": [1] * 64}
    usual: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 3}

    def seen(accumulation: int, strategy: str) -> dict[str, Any]:
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.filterwarnings("error", "An evaluation")
            computed.clear()
            arguments = TrainingArguments(folder, eval_strategy=strategy, per_device_eval_batch_size=32, **usual)
            arguments.per_device_train_batch_size = 100 * accumulation
            trainer = Watched(
                model=model,
                args=arguments,
                train_dataset=[sample] * 1129,
                eval_dataset=[sample] * 70,
                data_collator=DefaultDataCollator(),
                compute_metrics=compute,
            )
            for _ in range(2):  # a second call adds no second callback
                found = tune_trainer(trainer, cache=False, max_batch_size=100, on_trial=lambda trial: taken.append([]))
            # Without what is recorded, and without the one evaluation that is measured with a sample.
            tried, in_tries = [size for size in taken[-2] if size not in (2, -1)], list(computed)
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            with patch.object(torch.cuda, "empty_cache", wraps=torch.cuda.empty_cache) as emptied:
                trainer.train()
        callbacks = [type(each).__name__ for each in trainer.callback_handler.callbacks]
        return {
            "size": found.batch_size,
            "tried": tried,
            "computed": in_tries,
            "callbacks": callbacks.count("EmptyCacheCallback"),
            "emptied": emptied.call_count,
            "retries": torch.cuda.memory_stats()["num_alloc_retries"] - before,
        }

    return [seen(1, "epoch"), seen(4, "no")]


def test_a_try_takes_an_evaluation_and_an_epochs_end(cuda_stub: CudaStubFixture) -> None:
    """Full batches follow each. Metrics are not computed in tries, and the training empties the cache as they do.

    Of 1129 samples in steps of 400 the last has three full micro-batches and a smaller one: a try takes two.
    """
    alone, accumulated = cuda_stub(memory="2GiB").run(phases).result
    for seen in (alone, accumulated):
        assert (seen["size"], seen["computed"], seen["callbacks"], seen["retries"]) == (100, [], 1, 0)
    # As training begins, by the Trainer itself too; before and after each of three evaluations; not at an epoch's end.
    assert [alone["emptied"], accumulated["emptied"]] == [2 + 6, 2]
    assert [size for size, _ in groupby(alone["tried"])] == [100, -32, 100, 29, 100, 29, 100]
    assert alone["tried"][:5] == [100, 100, -32, -32, 100]
    assert alone["tried"][-2:] == [100, 100]
    assert accumulated["tried"][:7] == [100, 100, 100, 100, 100, 29, 100]
    assert [size for size, _ in groupby(accumulated["tried"])] == [100, 29, 100, 29, 100]
