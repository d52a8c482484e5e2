"""Trainers in processes of their own, under a real RLIMIT_AS: what the tests start through `tests/forks.py`."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from tests.forks import lift_limit, limit_growth, ready_to_search, verdict_of

TARGET = 960
WORDS = 512


def prepare() -> None:
    """Import what a Trainer does."""
    import accelerate  # noqa: F401

    import batchfinder
    from tests.huggingface import trainers

    ready_to_search(trainers.language_model())
    assert callable(batchfinder.tune_trainer)


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """`train` with a request's entries."""
    return train(**request)


def train(limit_mib: int, folder: str, beyond: bool = False) -> dict[str, Any]:
    """Tune and train under a limit, in a process that ends afterwards.

    Args:
        limit_mib: by how much the process may grow.
        folder: for the cache and what trainers write.
        beyond: whether to train with twice the answer afterwards.

    Returns:
        What happened, as JSON values.
    """
    import torch

    from batchfinder import tune_trainer

    torch.set_num_threads(1)
    _make(folder, per_device_train_batch_size=2, gradient_accumulation_steps=2).train()  # what is taken once
    limit = limit_growth(limit_mib)

    trainer = _make(folder, per_device_train_batch_size=TARGET, gradient_accumulation_steps=1)
    found = tune_trainer(trainer, tolerance=0.05, cache=folder)
    trainer.train()
    largest = found.result.max_batch_size
    answer: dict[str, Any] = {
        "largest": largest,
        "source": found.result.source,
        "trials": [[trial.batch_size, trial.fits] for trial in found.result.trials],
        "sizes": [trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps],
        "steps": trainer.state.global_step,
        "limit_unchanged": resource.getrlimit(resource.RLIMIT_AS)[0] == limit,
        "verdict": None,
    }
    if beyond:
        trainer.args.per_device_train_batch_size = trainer._train_batch_size = 2 * largest
        try:
            trainer.train()
        except RuntimeError as error:
            answer["verdict"] = verdict_of(error)
    lift_limit()
    return answer


def _make(folder: str, **arguments: Any) -> Any:
    from transformers import Trainer

    from tests.huggingface.trainers import language_model, make_trainer, texts

    samples = [{name: words * 4 for name, words in each.items()} for each in texts(False, 2 * TARGET)]
    return make_trainer(
        Path(folder),
        kind=Trainer,
        model=language_model(n_embd=16, vocab_size=WORDS),
        train_dataset=samples,
        max_steps=1,
        **arguments,
    )
