"""What of a Trainer cannot be served, and every message in full."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchfinder import tune_trainer
from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.huggingface.tune import check_trainer
from tests.huggingface.trainers import SEEN, LimitedTrainer, Stream, fixed, make_trainer

BY_HAND = "find the size on one device, and set per_device_train_batch_size and gradient_accumulation_steps by hand"
MAKE_BATCH = "or tune_trainer(make_batch=), a function that makes a batch of (batch_size, seq_len)"
SERVED = (
    "expected DDP, FSDP of version 2 (fsdp_config={'version': 2}), or a model that is whole on one device; "
    f"{BY_HAND}."
)


def refuses(trainer: Any, said: str, **options: Any) -> None:
    """It says so, tries nothing, and leaves the trainer as it was."""
    SEEN.clear()
    with pytest.raises(InvalidValue, match=f"^{re.escape(said)}$"):
        tune_trainer(trainer, **options)
    assert SEEN == []


def test_a_trainer_of_others_is_refused() -> None:
    """Its class is named."""
    refuses(
        SimpleNamespace(args=None),
        "trainer: invalid value 'SimpleNamespace'; expected a transformers.Trainer, or a class derived from it.",
    )


def test_without_accelerate_there_is_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    said = (
        "tune_trainer needs accelerate, which is not installed. Install it with: pip install accelerate "
        "(or batchfinder with its extra: torch-batchfinder[huggingface])"
    )
    with pytest.raises(MissingExtra, match=f"^{re.escape(said)}$"):
        check_trainer(None)


def test_data_are_needed(tmp_path: Path) -> None:
    """None, no samples, and a stream that can be read only once."""

    class Once(torch.utils.data.IterableDataset):
        def __init__(self, lines: Iterator[Any]) -> None:
            self.lines = lines

        def __iter__(self) -> Iterator[Any]:
            return self.lines

    class Itself(torch.utils.data.IterableDataset):
        """Its own iterator, over a file, which cannot be copied."""

        def __init__(self, path: Path) -> None:
            self.file = path.open()

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return {"input_ids": [1] * len(next(self.file)), "labels": 0}

    refuses(
        make_trainer(tmp_path, train_dataset=None),
        "train_dataset: missing; expected the data that trainer.train() will read, to make batches of.",
    )
    for dataset, left in ((Once(iter(fixed()["train_dataset"])), 50), (Itself(Path(__file__)), 1), (Stream([]), 0)):
        trainer = make_trainer(tmp_path, fixed, train_dataset=dataset)
        refuses(
            trainer,
            f"train_dataset: invalid value {type(dataset).__name__!r}; expected at least one sample, in data that can "
            "be "
            "read more than once, since what is read to try sizes with would be missing from the training; "
            f"{MAKE_BATCH}.",
        )
        assert len(list(itertools.islice(dataset, left + 1))) >= left


def test_a_length_cannot_be_asked_of_data_without_one(tmp_path: Path) -> None:
    """Nobody can tell where the sequence is in batches of one picture each."""
    pictures = [{"labels": n % 2, "pictures": torch.zeros(3, 4, 4)} for n in range(6)]
    trainer = make_trainer(tmp_path, fixed, train_dataset=pictures, remove_unused_columns=False)
    refuses(
        trainer,
        "seq_len: invalid value 8; expected None, since it cannot be seen which dimension is the sequence: no length "
        "varies between samples, and no two-dimensional integer tensor could hold tokens; "
        f"{MAKE_BATCH}.",
        seq_len=8,
    )


def test_a_loader_with_a_size_of_its_own_is_refused(tmp_path: Path) -> None:
    """The size that is set would change nothing."""

    class Own(LimitedTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

    refuses(
        make_trainer(tmp_path, kind=Own),
        "get_train_dataloader: invalid value 'batches of 2 where trainer._train_batch_size is 7'; expected a loader "
        "whose batch size is trainer._train_batch_size, which tune_trainer sets.",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"auto_find_batch_size": True},
            "auto_find_batch_size: invalid value True; expected False, since it would change the size again, and the "
            "effective batch with it.",
        ),
        (
            {"train_sampling_strategy": "batch_rebalance"},
            "train_sampling_strategy: invalid value 'batch_rebalance'; expected 'random', 'sequential' or "
            "'group_by_length', whose micro-batches have the same number of samples each.",
        ),
    ],
)
def test_arguments_that_set_sizes_themselves_are_refused(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    """With what to set instead."""
    refuses(make_trainer(tmp_path, **arguments), said)


@pytest.mark.parametrize(
    ("of_args", "of_trainer", "said"),
    [
        (
            {"n_gpu": 2},
            {},
            "GPUs of one process: invalid value 2; expected one, such as CUDA_VISIBLE_DEVICES=0 leaves; DataParallel "
            "is "
            "not supported.",
        ),
        (
            {},
            {"is_deepspeed_enabled": True},
            f"the trainer's parallelism: invalid value 'DeepSpeed'; {SERVED}",
        ),
        (
            {},
            {"is_fsdp_enabled": True},
            f"the trainer's parallelism: invalid value 'FSDP of version 1'; {SERVED}",
        ),
        (
            {},
            {"is_model_parallel": True},
            f"the trainer's parallelism: invalid value 'a model on several devices'; {SERVED}",
        ),
        (
            {"device": torch.device("mps")},
            {},
            "device: invalid value 'mps'; expected cpu, cuda or cuda:N, whose memory can be limited and measured.",
        ),
    ],
)
def test_more_than_one_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_args: dict[str, Any], of_trainer: dict[str, Any], said: str
) -> None:
    """What the trainer says of itself is believed."""
    trainer = make_trainer(tmp_path, fixed)
    for name, value in of_args.items():
        monkeypatch.setattr(type(trainer.args), name, value)
    for name, value in of_trainer.items():
        monkeypatch.setattr(trainer, name, value)
    refuses(trainer, said)
