"""What a search takes on the CPU, in training steps at the size it found: the callback and the plain loop, two nets.

Each search is a process of its own, with a budget of 150 MiB more than it held, and takes ten steps at its answer. A
second process asks the same question. One thread, so that other work on the machine changes the ratios less.

Run: `python benchmarks/search_cost.py [--rounds 3]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from batchfinder.versions import installed

RESULTS = Path(__file__).parent / "results"
MORE_BYTES = 150 << 20
NETS, WAYS = ("bert", "conv"), ("loop", "callback")
STEPS = 10
FIGURES = ("batch_size", "trials")


def search(net: str, way: str, cache: str, budget: int | None) -> dict[str, Any]:
    """In a process of its own: look the answer up or search, and train at it.

    Returns:
        The budget, the answer, sizes tried and failed, and the seconds that took and that each step took.
    """
    import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader
    from transformers import BertConfig, BertForSequenceClassification

    from batchfinder import BatchFinder, tune_batch_size
    from batchfinder.measure.host_limits import status

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if net == "bert":
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
        model: nn.Module = BertForSequenceClassification(BertConfig(**sizes))
        shape: tuple[int, ...] = (128,)
    else:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
        shape = (3, 32, 32)

    def make_batch(batch_size: int, seq_len: int | None) -> tuple[Tensor, Tensor]:
        inputs = torch.randint(0, 30_000, (batch_size, *shape)) if net == "bert" else torch.randn(batch_size, *shape)
        return inputs, torch.randint(0, 2, (batch_size,))

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        logits = model(input_ids=inputs).logits if net == "bert" else model(inputs)
        return nn.functional.cross_entropy(logits, labels)

    def timed(doing: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        done = doing()
        return time.perf_counter() - start, done

    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: tuple[Tensor, Tensor]) -> None:
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step(make_batch(2, None))
    optimizer.state.clear()
    budget = budget or (status("VmRSS") or 0) + MORE_BYTES
    steps = []
    if way == "loop":
        state = [model, optimizer]
        taken, tuned = timed(lambda: tune_batch_size(train_step, make_batch, state, budget=budget, cache=cache))
        result = tuned.result
        for _ in range(STEPS):
            batch = make_batch(result.max_batch_size, None)
            steps.append(timed(partial(train_step, batch))[0])
    else:

        class Lit(pl.LightningModule):
            """The same step; its samples, of which there are as many as are asked for."""

            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
                return loss_of(batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

        inputs, labels = make_batch(4_096, None)
        data = torch.utils.data.TensorDataset(inputs, labels)
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        quiet: dict[str, Any] = {**dict.fromkeys(off, False), "accelerator": "cpu"}

        finder = BatchFinder(budget=budget, cache=cache)
        trainer = pl.Trainer(**quiet, max_steps=1)
        taken, _ = timed(lambda: finder.find(trainer, Lit(), DataLoader(data, 2)))
        (result,) = finder.results["fit"].values()
        ends: list[float] = []

        class Clock(pl.Callback):
            """Notes when each batch ends."""

            def on_train_batch_end(self, *arguments: Any) -> None:
                ends.append(time.perf_counter())

        trainer = pl.Trainer(**quiet, max_steps=STEPS + 1, callbacks=[Clock()])
        trainer.fit(Lit(), DataLoader(data, result.max_batch_size))
        steps += [end - start for start, end in pairwise(ends)]
    return {
        "net": net,
        "way": way,
        "budget": budget,
        "batch_size": result.max_batch_size,
        "source": result.source,
        "trials": len(result.trials),
        "failed": sum(not trial.fits for trial in result.trials),
        "seconds": round(taken, 3),
        "step_seconds": [round(seconds, 4) for seconds in steps],
    }


def main() -> None:
    """Measure, print a Markdown table of medians, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        net, way, cache, budget = arguments.case
        print(json.dumps(search(net, way, cache, int(budget))))
        return
    rows: list[dict[str, Any]] = []
    for net, way in product(NETS * arguments.rounds, WAYS):
        budget = 0
        with tempfile.TemporaryDirectory() as cache:
            for _ in ("search", "second start"):
                command = [sys.executable, __file__, "--case", net, way, cache, str(budget)]
                rows.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
                budget = rows[-1]["budget"]
    result = {
        "benchmark": "search_cost",
        "command": "python benchmarks/search_cost.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": installed("torch", "pytorch-lightning"),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"search_cost-{os.cpu_count()}-cores.json").write_text(json.dumps(result, indent=1) + "\n")
    print("| net | through | a step | batch size | sizes tried | a search | a second start |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for net, way in product(NETS, WAYS):
        of = [row for row in rows if (row["net"], row["way"]) == (net, way)]
        step = statistics.median(seconds for row in of for seconds in row["step_seconds"])
        searches, starts = ([row for row in of if (row["source"] == "cache") is cached] for cached in (False, True))
        figures = [" to ".join(str(each) for each in span(row[name] for row in searches)) for name in FIGURES]
        for rows_of in (searches, starts):
            spent = span(round(row["seconds"] / statistics.median(row["step_seconds"])) for row in rows_of)
            figures.append(" to ".join(str(each) for each in spent) + " steps")
        print(f"| {net} | {way} | {step:.2f} s | {' | '.join(figures)} |")


def span(values: Iterable[int]) -> list[int]:
    """The least and the most of some numbers, once where they are the same."""
    found = list(values)
    return sorted({min(found), max(found)}) if found else []


if __name__ == "__main__":
    main()
