"""Trainers of transformers on tiny models and generated data, with all that people put into one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DefaultDataCollator,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."
WORDS = 30
SAMPLES = 50
MOST = [5]  # samples that fit; not an attribute of anything that is put back
SEEN: list[tuple[int, ...]] = []  # shapes of what training_step was given


class LimitedTrainer(Trainer):
    """Runs out of memory above `MOST` samples."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        SEEN.append(tuple(inputs["input_ids"].shape))
        if len(inputs["input_ids"]) > MOST[0]:
            raise torch.OutOfMemoryError(MESSAGE)
        return super().training_step(model, inputs, num_items_in_batch)


class Weighing(LimitedTrainer):
    """With a loss of its own, noise from three generators, and a counter."""

    losses = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        self.losses += 1
        noise = random.random() + torch.rand(()).item()
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten()) * (1 + noise / 10)
        return (loss, outputs) if return_outputs else loss


class Stream(torch.utils.data.IterableDataset):
    """Samples that come one after another, with a count of how many have come."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.given = samples, 0

    def __iter__(self) -> Iterator[Any]:
        for sample in self.samples:
            self.given += 1
            yield sample


class Loud(TrainerCallback):
    """Writes down what it is told, in a list that nothing puts back."""

    heard: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.heard.append("train begins")

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.heard.append("step ends")


class Padded:
    """A collator: pads to the longest, and drops words at random."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
        text = torch.tensor(rows)
        text = text.masked_fill(torch.rand(text.shape) < 0.1, 0)
        return {"input_ids": text, "attention_mask": (text != 0).long(), "labels": text}


def language_model(**config: Any) -> GPT2LMHeadModel:
    """GPT-2 of one layer, with dropout."""
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": WORDS, "n_positions": 32, **config}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **settings))


def classifier() -> BertForSequenceClassification:
    """BERT of one layer, with dropout."""
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )


def texts(varying: bool = True, count: int = SAMPLES) -> list[dict[str, list[int]]]:
    """Generated text, of 3 to 12 words, or of 8."""
    draw = random.Random(1)
    lengths = [draw.randint(3, 12) if varying else 8 for _ in range(count)]
    return [{"input_ids": (words := [draw.randrange(1, WORDS) for _ in range(n)]), "labels": words} for n in lengths]


def labelled(count: int = SAMPLES) -> list[dict[str, Any]]:
    """Generated text of 8 words, with a label."""
    return [{"input_ids": each["input_ids"], "labels": n % 2} for n, each in enumerate(texts(False, count))]


def make_trainer(folder: Path, make: Callable[[], dict[str, Any]] = dict, **options: Any) -> Any:
    """A trainer, seeded; options that TrainingArguments know go there, the rest to the trainer."""
    torch.manual_seed(1)
    random.seed(1)
    options = {**make(), **options}
    kind = options.pop("kind", LimitedTrainer)
    known = TrainingArguments.__dataclass_fields__
    arguments = {name: options.pop(name) for name in list(options) if name in known}
    arguments = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "output_dir": str(folder / "out"),
        **arguments,
    }
    if not {"model", "model_init"} & options.keys():
        options["model"] = language_model()
    options.setdefault("train_dataset", texts())
    options.setdefault("data_collator", Padded())
    return kind(
        args=TrainingArguments(**{"use_cpu": True, "report_to": [], "save_strategy": "no", **arguments}),
        **options,
    )


def fixed() -> dict[str, Any]:
    """Data of one shape, and transformers' own collator."""
    return {"train_dataset": labelled(), "data_collator": DefaultDataCollator(), "model": classifier()}
