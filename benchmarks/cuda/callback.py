"""BatchFinder on a real trainer: what the search costs, and whether training is bit for bit that of a plain run."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from batchfinder.devices.catalog import memory_fraction
from batchfinder.lightning.callback import BatchFinder

_VOCABULARY = 500
_STEPS = 4


class _Net(pl.LightningModule):
    """Keeps each loss."""

    def __init__(self, batch_size: int, rows: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.rows = rows
        self.losses: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def _loader(self, inputs: torch.Tensor, classes: int) -> Any:
        labels = torch.randint(classes, (self.rows,), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, labels), batch_size=self.batch_size, shuffle=True)


class Transformer(_Net):
    """Two encoder layers with dropout, on random tokens."""

    def __init__(self, batch_size: int, rows: int, seq_len: int, width: int) -> None:
        super().__init__(batch_size, rows)
        self.seq_len = seq_len
        self.embed = nn.Embedding(_VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(self.embed(tokens)).mean(1))
        return out

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return self._loader(torch.randint(_VOCABULARY, (self.rows, self.seq_len), generator=generator), 10)


class ConvNet(_Net):
    """Convolutions with BatchNorm and dropout, on noise."""

    def __init__(self, batch_size: int, rows: int, side: int, width: int) -> None:
        super().__init__(batch_size, rows)
        self.side = side
        self.net = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(pictures)
        return out

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return self._loader(torch.randn(self.rows, 3, self.side, self.side, generator=generator), 10)


NETS: dict[str, Callable[..., _Net]] = {"transformer": Transformer, "conv net": ConvNet}


class _Timestamp(pl.Callback):
    """The time at which its `on_fit_start` runs."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = time.perf_counter()


def compare(
    net: str,
    precision: str,
    accelerator: str,
    size: dict[str, int],
    budget_bytes: int | None = None,
    max_batch_size: int | None = None,
) -> dict[str, Any]:
    """Search and train twice with one cache, then train with the same size and no callback.

    Args:
        net: a key of `NETS`.
        precision: as Lightning has it.
        accelerator: `gpu` or `cpu`.
        size: the net's arguments.
        budget_bytes: the callback's `budget`.
        max_batch_size: the callback's.

    Returns:
        JSON values: the size, probes, failures and seconds; whether losses and weights are equal bit for bit; and, with
        a budget on a GPU, whether the size trains under it and whether one a tenth larger does.
    """
    options = {"precision": precision, "accelerator": accelerator}

    def search(cache: str) -> tuple[_Net, dict[str, Any]]:
        finder = BatchFinder(budget=budget_bytes, max_batch_size=max_batch_size, cache=cache)
        before, after = _Timestamp(), _Timestamp()
        module = _train(net, 2, size, [before, finder, after], options)
        (outcome,) = finder.results["fit"].values()
        return module, {
            "batch_size": finder.batch_size,
            "probes": len(outcome.trials),
            "out_of_memory": sum(not trial.fits for trial in outcome.trials),
            "seconds": round(after.seconds - before.seconds, 2),
            "tried": [
                [trial.batch_size, trial.measurement.verdict.name, trial.measurement.peak_reserved_bytes]
                for trial in outcome.trials
            ],
            "stopped_by": outcome.stop.name,
        }

    with tempfile.TemporaryDirectory(prefix="batchfinder-") as cache:
        first, answer = search(cache)
        again, second = search(cache)
    batch_size = answer["batch_size"]
    direct = _train(net, batch_size, size, [], options)
    answer["losses_equal"] = first.losses == again.losses == direct.losses and len(direct.losses) == _STEPS
    answer["weights_equal"] = same_weights(first, direct) and same_weights(again, direct)
    answer["second_start"] = {name: second[name] for name in ("batch_size", "probes", "seconds")}
    if accelerator == "gpu" and budget_bytes is not None:
        answer["answer_trains"] = _trains(net, size, options, batch_size, budget_bytes)
        answer["a_tenth_more_trains"] = _trains(net, size, options, math.ceil(1.1 * batch_size), budget_bytes)
    return answer


def _train(net: str, batch_size: int, size: dict[str, int], callbacks: list[Any], options: dict[str, Any]) -> _Net:
    pl.seed_everything(1, verbose=False)
    module = NETS[net](batch_size, **size)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        **{**quiet, "enable_model_summary": False, "devices": 1, "deterministic": True, **options},
        max_epochs=-1,
        max_steps=_STEPS,
        callbacks=callbacks,
    )
    try:
        trainer.fit(module)
    finally:
        torch.use_deterministic_algorithms(False)
    return module.cpu()


def _trains(net: str, size: dict[str, int], options: dict[str, Any], batch_size: int, limit_bytes: int) -> bool:
    """Whether a fit runs under a memory fraction."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_fraction(limit_bytes, total))
    try:
        _train(net, batch_size, size, [], options)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether the state dicts of two modules are equal bit for bit."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(a, b) for (name, a), (again, b) in pairs)
