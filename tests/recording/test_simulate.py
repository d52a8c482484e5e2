"""`simulate`: models at hand on GPUs that are not."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

import batchfinder
from batchfinder.errors import InvalidValue, OutOfMemory, RecordingFailed, UnknownName, UserCodeFailed
from batchfinder.recording.simulate import simulate
from batchfinder.training.step import Workload
from batchfinder.units import MIB


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of random numbers, drawn as they are read."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1024), torch.tensor(random.randrange(10) + np.random.randint(1))


class Classifier(LightningModule):
    """A network whose training and data are its own."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1024, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))
        self.configured = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.configured += 1
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        torch.randperm(50)
        return DataLoader(Rows(), batch_size=4, shuffle=True)


def test_a_lightning_module_as_it_is() -> None:
    """With its own data and optimizer; the same as for a workload of the same step, and on another card as there."""
    found = batchfinder.simulate(Classifier(), gpu="T4", max_batch_size=100_000_000)
    net = Classifier().net

    def make_batch(batch_size: int, _: int | None) -> Any:
        return torch.randn(batch_size, 1024), torch.zeros(batch_size, dtype=torch.int64)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(x), y)

    workload = Workload(Whole(), make_batch, zero_grad_after_loss=True)
    same = simulate(workload, gpu="T4", max_batch_size=10_000)
    assert same.batch_size == 10_000
    assert found.reserved_bytes(10_000) == same.peak_reserved_bytes
    assert found.batch_size > 100_000
    assert found.fits(found.batch_size)
    assert not found.fits(found.batch_size + 1)
    assert 0.99 * found.usable_bytes < found.peak_reserved_bytes <= found.usable_bytes  # type: ignore[operator]
    larger = found.on("RTX 4090")
    assert larger.batch_size > found.batch_size
    assert larger.gpu == "RTX 4090"
    # Its reductions are divided among 128 multiprocessors for 40, of 1536 threads for 1024.
    assert 0 < larger.reserved_bytes(10_000) - found.reserved_bytes(10_000) < 128 * MIB
    assert found.plan(2 * found.batch_size).accumulation == 2


def test_nothing_is_changed() -> None:
    """Not the module, nor what its class is, nor random numbers that its data draws."""
    module = Classifier(16)
    before, attributes = copy.deepcopy(module.state_dict()), set(vars(module))
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    simulate(module, gpu="T4", max_batch_size=64)
    assert random.getstate() == drawn[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), drawn[1], strict=True))
    assert torch.equal(torch.get_rng_state(), drawn[2])
    assert set(vars(module)) == attributes
    assert module.configured == 0
    assert not any(parameter.grad is not None for parameter in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_transformers_model_is_what_its_name_stands_for() -> None:
    """At hand or by its name: the same sizes and peaks."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification(transformers.BertConfig())
    at_hand = simulate(model, gpu="T4", seq_len=128, precision="16-mixed")
    named = simulate("bert-base", gpu="T4", seq_len=128, precision="16-mixed")
    checkpointed = simulate("bert-base", gpu="T4", seq_len=128, precision="16-mixed", gradient_checkpointing=True)
    assert (at_hand.batch_size, at_hand.peak_reserved_bytes) == (named.batch_size, named.peak_reserved_bytes)
    larger = at_hand.on("RTX 4090")
    page = (Path(__file__).parents[2] / "docs/quickstart.md").read_text()
    assert f"# {larger.batch_size}, {at_hand.batch_size}\n" in page
    assert f"# '{larger.plan(1024)}'\n" in page
    assert checkpointed.batch_size > 2 * named.batch_size
    assert "BertForSequenceClassification" in at_hand._repr_html_()
    plain = named.to_json()
    assert (plain["model"], plain["seq_len"], plain["batch_size"]) == ("bert-base", 128, named.batch_size)


def test_a_module_from_a_notebook() -> None:
    """Its class is in no file; the batch is as long as it is asked for."""
    cell: dict[str, Any] = {"nn": nn, "torch": torch}
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
    def forward(self, ids):
        return self.head(self.embedding(ids)).logsumexp(-1).mean()
"""
    exec(code, cell)

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)

    short, long = (
        simulate(cell["Net"](), gpu="T4", batches=make_batch, seq_len=seq_len, optimizer="sgd").batch_size
        for seq_len in (64, 128)
    )
    assert short == pytest.approx(2 * long, rel=0.01)
    assert simulate(cell["Net"](), gpu="T4", seq_len=64, optimizer="sgd").batch_size == pytest.approx(short, rel=0.01)


def test_a_config_is_a_model() -> None:
    """As by the name of the same model, with the options that a name has; the config is left as it is."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=96, n_head=4, architectures=["GPT2LMHeadModel"])
    before = config.to_dict()
    plain, adapted = (simulate(config, gpu="T4", seq_len=64, max_batch_size=8, **more) for more in ({}, {"lora": 4}))
    assert config.to_dict() == before
    held = {kind: max(sizes) for kind, sizes in adapted.timeline.by_kind.items()}
    assert held["gradients"] < 0.01 * max(plain.timeline.by_kind["gradients"])
    assert plain.timeline.peak_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.01)
    assert plain.to_json()["model"] == "GPT2Config"
    assert 0 < plain.seconds < 60


@pytest.mark.slow
@pytest.mark.exhaustive
def test_options_that_change_the_step() -> None:
    """Several GPUs, each with a part of the optimizer's state, and data of the user's for a model by its name."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=96, n_head=4, architectures=["GPT2LMHeadModel"])
    at: dict[str, Any] = {"gpu": "A100 80GB", "max_batch_size": 4}
    alone, sharded = (simulate(config, seq_len=64, **at, **more) for more in ({}, {"gpus": 8, "strategy": "fsdp2"}))
    states = [max(found.timeline.by_kind["optimizer"]) for found in (alone, sharded)]
    assert states[0] == pytest.approx(8 * states[1], rel=0.01)
    assert sharded.usable_bytes < alone.usable_bytes  # by what NCCL takes
    assert sharded.on("A100 40GB").usable_bytes < alone.on("A100 40GB").usable_bytes
    rows = [{"input_ids": torch.ones(32, dtype=torch.int64), "labels": torch.ones(32, dtype=torch.int64)}] * 4
    of_data = simulate(config, batches=DataLoader(rows, batch_size=2), **at)
    cut = simulate(config, batches=DataLoader(rows, batch_size=2), seq_len=16, **at)
    held = [max(found.timeline.by_kind["inputs"]) for found in (of_data, cut)]
    assert held[0] == 2 * held[1] >= 2 * 4 * 32 * 8


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_does_not_fit() -> None:
    """A size of 0, with what one sample takes."""
    found = simulate("gpt2", gpu="K80", seq_len=1024, accumulation=2, max_batch_size=4)
    assert 0 < found.batch_size <= 4
    huge = simulate("llama-3.1-8b", gpu="T4", seq_len=512)
    assert huge.batch_size == 0
    assert huge.peak_reserved_bytes is None
    assert huge.reserved_bytes(1) > huge.usable_bytes
    with pytest.raises(OutOfMemory, match="does not fit: it takes"):
        huge.plan(64)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": nn.Linear(3, 3)}, InvalidValue, "neither"),
        ({"model": Classifier(), "gpu": "RTX 9999"}, UnknownName, "RTX 9999"),
        ({"model": "bert-bse"}, UnknownName, "bert-base"),
        ({"model": Classifier(), "precision": "fp61"}, InvalidValue, "16-mixed"),
        ({"model": Classifier(), "optimizer": "adam-w"}, InvalidValue, "adamw"),
        ({"model": Classifier(), "lora": 8}, InvalidValue, "lora: .* left out but for a model by its name or config"),
        (
            {"model": Classifier(), "lora_targets": "body"},
            InvalidValue,
            "lora_targets: .* left out but for a model",
        ),
        ({"model": Classifier(), "loss": "liger"}, InvalidValue, "loss: .* left out but for a model by its name"),
        ({"model": "gpt2", "loss": "ligre"}, InvalidValue, "loss: .* one of default, chunked, liger, trl"),
        ({"model": "gpt2", "lora_rank": 8}, InvalidValue, "lora_rank: .* none of this name, but mode, precision, "),
        ({"model": "gpt2", "gpus": 8}, InvalidValue, "strategy: missing; expected one of ddp, .*: how 8 GPUs train"),
        ({"model": "gpt2", "gpus": 8, "strategy": "fdsp"}, InvalidValue, "strategy: .* one of ddp, "),
        ({"model": "gpt2", "strategy": "fsdp2"}, InvalidValue, "gpus: invalid value 1; expected at least 2 with fsdp2"),
        ({"model": Classifier(), "batches": [1]}, InvalidValue, "one DataLoader"),
        ({"model": nn.Linear(3, 3), "batches": lambda b, s: torch.randn(b, 4)}, RecordingFailed, "batch size 7"),
    ],
)
def test_mistakes(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """Each is told in words, with what is expected."""
    with pytest.raises(error, match=words):
        simulate(**arguments)


def test_the_words_of_other_tools() -> None:
    """Precision and optimizer go by the names that the trainer has for them, too."""
    asked = {"gpu": "t4", "max_batch_size": 8}
    named = simulate(Classifier(), precision="fp16", optimizer="adamw_torch_fused", **asked)
    ours = simulate(Classifier(), precision="16-mixed", optimizer="adamw-fused", **asked)
    assert {**named.to_json(), "seconds": 0} == {**ours.to_json(), "seconds": 0}
    assert named.reserved_bytes(8) == ours.reserved_bytes(8)


def test_errors_of_the_users_code() -> None:
    """With the user's own line."""

    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyError("labels")

    with pytest.raises(RecordingFailed, match=r"KeyError: 'labels' at .*test_simulate.py:\d+, in training_step: raise"):
        simulate(Broken(), gpu="T4")

    class NoData(Classifier):
        def train_dataloader(self) -> DataLoader[Any]:
            raise FileNotFoundError("rows.csv")

    with pytest.raises(UserCodeFailed, match=r"rows.csv"):
        simulate(NoData(), gpu="T4")
