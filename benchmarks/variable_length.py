"""Text of lengths 16 to 512 under a memory limit: a micro-batch size for each length against the best single one.

Both ways train the same net on the same samples in the same order, 120 of them for each optimizer step. The first uses
the largest batch size that the longest samples allow, and accumulates. The second is `BatchFinder(split_batches=True)`.
Each run is a process of its own under a real limit of its address space, and the ways take turns. Searches are timed
apart from training.

Run: `python benchmarks/variable_length.py [--rounds 3] [--steps 6] [--limit-mib 60]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from batchfinder.versions import installed

RESULTS = Path(__file__).parent / "results"
WAYS = ("one size", "a size for each length")
EFFECTIVE, SHORTEST, LONGEST, WORDS, WIDTH = 120, 16, 512, 250, 48
MALLOC = {  # freed memory is returned to the system at once, so that the limit is the same for each size
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def train(way: str, steps: int, limit_mib: int) -> dict[str, Any]:
    """Train one way in this process, which may grow by the limit from here on."""
    import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from batchfinder import BatchFinder

    class Net(pl.LightningModule):
        """Two encoder layers, and a label for each sequence."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, WORDS)
            self.micro_batches, self.tokens, self.padded, self.losses = 0, 0, 0, []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            self.micro_batches += 1
            self.tokens += int(mask.sum())
            self.padded += mask.numel()
            x = self.embed(ids) + self.place(torch.arange(ids.size(1)))
            logits = self.head(self.encoder(x, src_key_padding_mask=mask == 0))
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
            return (losses.sum(1) / mask.sum(1)).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_start(self) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

    draw = random.Random(0)
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** draw.random()) for _ in range(EFFECTIVE * steps - 1)]
    text = [[draw.randrange(WORDS) for _ in range(length)] for length in [*lengths, LONGEST]]

    def collate(rows: list[list[int]]) -> dict[str, Tensor]:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.roll(-1, 1).masked_fill(mask == 0, -100)}

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    # The autograd engine's threads must exist before the limit does.
    (torch.ones(4, requires_grad=True) * 2).sum().backward()
    pl.seed_everything(1, verbose=False)
    net = Net()
    loader = DataLoader(text, 1, shuffle=True, generator=torch.Generator().manual_seed(2), collate_fn=collate)
    finder = BatchFinder(EFFECTIVE, split_batches=way == WAYS[1], cache=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[finder], **quiet)  # type: ignore[arg-type]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (limit_mib << 20), resource.RLIM_INFINITY))
    error, began = "", time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(net, loader)
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
    ended = time.perf_counter()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said = [str(warning.message) for warning in caught if "BatchFinder" in str(warning.message)]
    started = getattr(net, "started", ended)
    sizes = finder.micro_batch_sizes or {None: finder.batch_size or 0}
    return {
        "error": error,
        "optimizer_steps": trainer.global_step,
        "sizes": {str(length): size for length, size in sizes.items()},
        "micro_batches": net.micro_batches,
        "tokens": net.tokens,
        "share_of_padding": round(1 - net.tokens / max(1, net.padded), 3),
        "search_seconds": round(started - began, 2),
        "training_seconds": round(ended - started, 2),
        "ran_out_of_memory_in_training": sum("ran out of memory" in words for words in said),
        "warnings": said,
        "norm_of_weights": round(sum(float(parameter.detach().norm()) for parameter in net.parameters()), 4),
    }


def in_a_process(way: str, steps: int, limit_mib: int) -> dict[str, Any]:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--way", way, "--steps", str(steps), "--limit-mib", str(limit_mib)],
            env={**os.environ, **MALLOC, "BATCHFINDER_CACHE": cache},
            capture_output=True,
            text=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"the run with {way} exited with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """How the second way compares to the first."""
    one, other = (runs[way] for way in WAYS)

    def speed(run: dict[str, Any]) -> float:
        return float(run["tokens"] / run["training_seconds"])

    fewer = (one[0]["micro_batches"] / one[0]["optimizer_steps"]) / (
        other[0]["micro_batches"] / other[0]["optimizer_steps"]
    )
    faster = statistics.median(speed(b) / speed(a) for a, b in zip(one, other, strict=True))
    return {"times_fewer_micro_batches": round(fewer, 2), "times_the_tokens_per_second": round(faster, 2)}


def main() -> None:
    """Measure, print both ways, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each run")
    parser.add_argument("--limit-mib", type=int, default=60, help="by how much each process may grow")
    parser.add_argument("--way", choices=WAYS, help="train one way in this process, and print its result as JSON")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(train(arguments.way, arguments.steps, arguments.limit_mib)))
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            run = in_a_process(way, arguments.steps, arguments.limit_mib)
            runs[way].append(run)
            each = run["micro_batches"] / max(1, run["optimizer_steps"])
            speed = run["tokens"] / max(1e-9, run["training_seconds"])
            print(
                f"{way}: {run['sizes']}; {each:.1f} micro-batches per optimizer step, {speed:.0f} tokens/s, "
                f"{run['share_of_padding']:.0%} padding, {run['search_seconds']} s of search {run['error']}"
            )
    if any(run["error"] for way in WAYS for run in runs[way]):
        sys.exit("a run failed; no result is written")
    result = {
        "benchmark": "variable_length",
        "command": f"python benchmarks/variable_length.py --rounds {arguments.rounds} --steps {arguments.steps} "
        f"--limit-mib {arguments.limit_mib}",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": len(os.sched_getaffinity(0)), "gpu": None},
        "versions": installed("torch", "pytorch-lightning"),
        "python": platform.python_version(),
        "lengths": [SHORTEST, LONGEST],
        "effective_batch_size": EFFECTIVE,
        "limit_mib": arguments.limit_mib,
        **compared(runs),
        "runs": runs,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"variable_length-{len(os.sched_getaffinity(0))}-cores.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{compared(runs)}; written to {path}")


if __name__ == "__main__":
    main()
