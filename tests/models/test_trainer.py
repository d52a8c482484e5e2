"""Tests of batchfinder/models/trainer.py: what `simulate` makes of a Trainer, and of TrainingArguments."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from batchfinder import Workload, simulate
from batchfinder.errors import InvalidValue, RecordingFailed
from batchfinder.models.trainer import precision_of
from tests.huggingface.trainers import Padded, fixed, language_model, make_trainer, texts

WORDS, SIZE = 3000, 64
pytestmark = pytest.mark.usefixtures("one_thread")


def model() -> Any:
    """GPT-2 with a head that is large beside the rest."""
    return language_model(n_embd=64, vocab_size=WORDS)


def trainer(folder: Path, **options: Any) -> Any:
    """One of transformers' own, on texts of 8 words each, without padding."""
    torch.manual_seed(1)
    made = {"kind": Trainer, "model": model(), "train_dataset": texts(False), "data_collator": whole, **options}
    return make_trainer(folder, **made)


def whole(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that repeats the longest sample."""
    longest = torch.tensor(max((sample["input_ids"] for sample in samples), key=len)).repeat(len(samples), 1)
    return {"input_ids": longest, "attention_mask": torch.ones_like(longest), "labels": longest}


def peaks(thing: Any, **options: Any) -> tuple[int | None, int | None]:
    """Allocated and reserved at one size."""
    found = simulate(thing, gpu="A100 80GB", max_batch_size=SIZE, **options)
    assert found.batch_size == SIZE
    return found.peak_allocated_bytes, found.peak_reserved_bytes


def by_hand(accumulation: int = 3, precision: str = "fp32") -> Workload:
    """The step that the Trainer takes: its loss of labels, its optimizer's groups, and the batches that it holds."""
    net = model()
    net.config.use_cache = False

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: dict[str, torch.Tensor], held: list[Any]) -> torch.Tensor:
            labels = [inputs["labels"], *(each["labels"] for each in held[1:])]
            items = sum(each[..., 1:].ne(-100).sum() for each in labels)
            output = self.net(**inputs, num_items_in_batch=items)
            if precision != "fp32":  # as accelerate does
                output.logits = output.logits.float()
            return output.loss  # type: ignore[no-any-return]

    def make_batch(batch_size: int, _: int | None) -> Any:
        text = torch.ones(batch_size, 8, dtype=torch.int64)
        batch = {"input_ids": text, "attention_mask": text, "labels": text}
        return batch, [batch] * accumulation

    def optimizer(_: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        decayed = [each for each in net.parameters() if each.ndim > 1]
        others = [each for each in net.parameters() if each.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, fused=True)

    return Workload(Loss(), make_batch, optimizer=optimizer)


@pytest.mark.parametrize(
    ("accumulation", "precision"),
    [(3, "fp32"), pytest.param(1, "fp32", marks=[pytest.mark.slow, pytest.mark.exhaustive]), (1, "bf16-mixed")],
)
def test_a_trainer_is_the_step_that_it_takes(tmp_path: Path, accumulation: int, precision: str) -> None:
    """To the byte what the same step takes that is written out, with labels, accumulation and mixed precision."""
    made = trainer(tmp_path, gradient_accumulation_steps=accumulation, bf16=precision != "fp32")
    same = by_hand(accumulation, precision)
    assert peaks(made) == peaks(same, accumulation=accumulation, precision=precision)


@pytest.mark.parametrize("asked", [{"bf16": True}, pytest.param({}, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_mixed_precision_is_accelerates(tmp_path: Path, asked: dict[str, Any]) -> None:
    """The model's forward alone is autocast, and what it returns is in fp32."""

    class Checking(Trainer):  # type: ignore[misc, unused-ignore]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            inside = []
            model.lm_head.register_forward_hook(lambda *seen: inside.append(seen[-1].dtype))
            logits = model(**inputs).logits
            product = logits[0] @ logits[0].T
            assert (inside, logits.dtype, product.dtype) == ([torch.bfloat16], torch.float32, torch.float32)
            return logits.mean()

    made = trainer(tmp_path, kind=Checking, gradient_accumulation_steps=1, **asked)
    precision = {} if asked else {"precision": "bf16-mixed"}
    with pytest.raises(RecordingFailed, match="AssertionError") if not asked else nullcontext():
        simulate(made, gpu="A100 80GB", max_batch_size=4)
    assert simulate(made, gpu="A100 80GB", max_batch_size=4, **precision).batch_size == 4


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    """What it trains to afterwards is the same in each bit, though its data and its loss draw random numbers."""

    def weights(look: bool) -> dict[str, torch.Tensor]:
        made = trainer(tmp_path, train_dataset=texts(), data_collator=Padded(), max_steps=2)
        if look:
            before = set(vars(made)), len(made.accelerator._dataloaders), random.getstate(), torch.get_rng_state()
            assert simulate(made, gpu="T4", max_batch_size=32).batch_size == 32
            assert (set(vars(made)), len(made.accelerator._dataloaders), random.getstate()) == before[:3]
            assert torch.equal(torch.get_rng_state(), before[3])
            assert made.optimizer is None
        made.train()
        return copy.deepcopy(made.model.state_dict())

    plain, looked = weights(False), weights(True)
    assert all(torch.equal(plain[name], looked[name]) for name in plain)


def given_sgd(made: Any) -> None:
    """An optimizer of the user's own, as `Trainer(optimizers=)` takes it."""
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)


def has_trained(made: Any) -> None:
    """Its model is prepared by accelerate, and its optimizer has a state."""
    made.args.max_steps = 1
    made.train()


@pytest.mark.parametrize(
    ("options", "change", "same", "state_bytes"),
    [
        ({"optim": "adamw_torch"}, None, {}, 8),
        ({"optim": "sgd"}, None, {}, 0),
        ({}, given_sgd, {}, 0),
        ({}, None, {"optimizer": "sgd"}, 0),
        ({"optim": "adamw_bnb_8bit"}, None, {}, 2),
        pytest.param({"optim": "rmsprop"}, None, {}, 4, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        ({}, has_trained, {}, 8),
        pytest.param({"bf16": True}, has_trained, {}, 8, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_its_optimizer(
    tmp_path: Path, options: dict[str, Any], change: Callable[[Any], None] | None, same: Any, state_bytes: int
) -> None:
    """That of its arguments, one that it was given, one that has stepped, or another that is asked for."""
    made = trainer(tmp_path, **options)
    if change is not None:
        change(made)
    kinds = simulate(made, gpu="A100 80GB", max_batch_size=8, **same).timeline.by_kind
    weights = sum(parameter.numel() for parameter in made.model.parameters())
    assert max(kinds.get("optimizer", (0,))) == pytest.approx(state_bytes * weights, rel=0.1, abs=0.1 * weights)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_its_checkpointing(tmp_path: Path) -> None:
    """Fewer activations are kept, of every layer or of some."""
    deep = {"n_embd": 64, "n_layer": 4}
    none, some, all_of_them = (
        simulate(
            trainer(tmp_path, model=language_model(**deep), **options), gpu="T4", max_batch_size=SIZE
        ).timeline.by_kind["activations"]
        for options in (
            {},
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
            {"activation_checkpointing": True},
        )
    )
    assert max(none) > max(some) > max(all_of_them)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_its_data(tmp_path: Path) -> None:
    """The longest samples make up a batch; with a length, they are cut or repeated to that."""
    long = peaks(trainer(tmp_path, train_dataset=[{"input_ids": [1] * n, "labels": [1] * n} for n in (3, 9, 16)]))
    of_16 = peaks(trainer(tmp_path, train_dataset=[{"input_ids": [1] * 16, "labels": [1] * 16}] * 3))
    asked = peaks(trainer(tmp_path), seq_len=16)
    assert long == of_16 == asked
    assert long > peaks(trainer(tmp_path))  # type: ignore[operator]
    with pytest.raises(InvalidValue, match="seq_len: invalid value 16; expected None, since"):
        simulate(trainer(tmp_path, train_dataset=[{"labels": 1}], data_collator=None), seq_len=16)


def test_its_own_loss(tmp_path: Path) -> None:
    """A `compute_loss` of a derived class is what runs."""

    class Twice(Trainer):  # type: ignore[misc, unused-ignore]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            logits = model(**inputs).logits
            return (logits.float() + logits.double()).logsumexp(-1).mean()

        def training_step(self, *arguments: Any) -> Any:
            return super().training_step(*arguments)

    own = simulate(trainer(tmp_path, kind=Twice), gpu="T4", max_batch_size=SIZE)
    assert own.peak_allocated_bytes > peaks(trainer(tmp_path))[0] * 1.2  # type: ignore[operator]
    assert any("Twice.training_step: compute_loss and a backward run instead" in each for each in own.unmodelled)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_arguments_beside_a_model(tmp_path: Path) -> None:
    """A model, or its config, is trained as TrainingArguments say; what is asked for besides wins."""
    options = {"gradient_accumulation_steps": 3, "optim": "adamw_torch", "report_to": [], "use_cpu": True}
    given, checkpointed = (
        {"seq_len": 8, "training_arguments": TrainingArguments(str(tmp_path), **options, activation_checkpointing=how)}
        for how in (False, True)
    )
    same = {"seq_len": 8, "accumulation": 3, "optimizer": "adamw"}
    config, at_hand = model().config, model()
    assert peaks(config, **checkpointed) == peaks(config, **same, gradient_checkpointing=True)
    adam = peaks(at_hand, **given)
    assert adam == peaks(config, **same)  # which keeps no cache of keys and values
    assert at_hand.config.use_cache
    assert peaks(at_hand, **checkpointed) != adam
    assert not at_hand.is_activation_checkpointing
    sgd = peaks(at_hand, **given, optimizer="sgd")
    weights = 4 * sum(parameter.numel() for parameter in at_hand.parameters())
    assert adam[0] - sgd[0] > weights  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: setattr(made, "train_dataset", None), "train_dataset: missing"),
        (lambda made: setattr(made, "is_fsdp_enabled", True), "the trainer's parallelism: invalid value 'FSDP'"),
    ],
)
def test_trainers_that_are_refused(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    """Without data, or with a model in parts."""
    made = trainer(tmp_path)
    change(made)
    with pytest.raises(InvalidValue, match=words):
        simulate(made)


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    """Beside what has its own; an optimizer of a package that is not here; fp8."""
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for thing in (trainer(tmp_path), by_hand()):
        with pytest.raises(InvalidValue, match=r"training_arguments: .* expected none beside a "):
            simulate(thing, training_arguments=arguments)
    arguments.optim = "grokadamw"
    with pytest.raises(InvalidValue, match="optim: invalid value 'grokadamw'; expected an optimizer whose package"):
        simulate(fixed()["model"], training_arguments=arguments)
    with pytest.raises(InvalidValue, match="mixed_precision: invalid value 'fp8'"):
        precision_of("fp8")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_figures_of_the_page(tmp_path: Path) -> None:
    """The example on Trainers says what its lines give."""
    text = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "simulate(trainer" in block)
    ids = torch.ones(128, dtype=torch.int64)
    names: dict[str, Any] = {"simulate": simulate}
    names |= {name: getattr(transformers, name) for name in re.findall(r"\b(Bert\w+|Train\w+)\(", code)}
    names["data"] = [{"input_ids": ids, "attention_mask": ids, "labels": 0}] * 1000
    exec(code.replace('"out"', repr(str(tmp_path))), names)
    found = names["simulated"]
    assert f"# {found.batch_size}, {found.on('A100 40GB').batch_size}\n" in code
