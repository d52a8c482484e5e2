"""Training loops drawn at random, in processes of their own under a real limit, started through `tests/forks.py`."""

from __future__ import annotations

import random
import resource
from dataclasses import asdict, dataclass
from typing import Any

from tests.forks import lift_limit, limit_growth, ready_to_search, verdict_of

STEPS = 3
LEFT: list[Any] = []  # what a leaking step leaves behind where a search cannot reach it


@dataclass(frozen=True)
class Loop:
    """A training loop and the limit it runs under.

    Attributes:
        norm: `layer`, or `batch`, which needs two samples: nobody tells the search.
        group: the samples that its loss compares, of which every batch is a multiple: 1 for a loss without groups.
        swallows: whether a step that fails returns instead of raising, as `except RuntimeError: return None` does.
        leaks: `no`, `state` (into a list that the model holds) or `module` (into one that only the module names).
        under: `RLIMIT_AS` or `budget`.
        limit_mib: by how much the process may grow.
    """

    norm: str
    group: int
    swallows: bool
    leaks: str
    under: str
    limit_mib: int
    tolerance: float
    width: int
    tokens: int
    depth: int
    optimizer: str

    @property
    def smallest(self) -> int:
        """The smallest size it can train at."""
        return max(self.group, 2 if self.norm == "batch" else 1)


def draw(seed: int) -> Loop:
    """A loop, the same for the same seed."""
    chance = random.Random(seed)
    return Loop(
        norm=chance.choice(("layer", "batch")),
        group=chance.choice((1, 1, 2, 3, 8)),
        swallows=chance.random() < 0.3,
        leaks=chance.choice(("no", "no", "state", "module")),
        under=chance.choice(("RLIMIT_AS", "budget")),
        limit_mib=chance.randrange(512, 768),
        tolerance=chance.choice((0.03, 0.05)),
        width=chance.choice((16, 32, 48)),
        tokens=chance.randrange(300, 900),
        depth=chance.randrange(1, 4),
        optimizer=chance.choice(("SGD", "AdamW")),
    )


def prepare() -> None:
    """Import what a loop does."""
    from torch import nn

    import batchfinder

    ready_to_search(nn.Linear(2, 2))
    assert callable(batchfinder.tune_batch_size)


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Search, or train at a size, in a process that ends afterwards.

    Args:
        request: `loop`, and the `batch_size` to train at; None to search.

    Returns:
        What happened, as JSON values. A size trained if the optimizer took all steps, within a budget if there is one.
    """
    import torch
    from torch import nn

    from batchfinder import tune_batch_size
    from batchfinder.measure.host_limits import reset_resident_peak, status

    loop, batch_size = Loop(**request["loop"]), request["batch_size"]
    torch.set_num_threads(1)
    torch.manual_seed(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.LayerNorm if loop.norm == "layer" else nn.BatchNorm1d
            layers = [nn.Sequential(nn.Linear(loop.width, loop.width), nn.ReLU()) for _ in range(loop.depth)]
            self.layers = nn.Sequential(*layers)
            self.norm = norm(loop.width)
            self.history: list[torch.Tensor] = []

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            embedded = self.norm(self.layers(tokens).mean(1))
            groups = embedded.view(-1, loop.group, loop.width)
            return (groups - groups.mean(1, keepdim=True)).square().mean() + embedded.square().mean()

    model = Model()
    optimizer = getattr(torch.optim, loop.optimizer)(model.parameters(), lr=1e-3)

    calls: list[int] = []

    def train_step(batch: torch.Tensor) -> None:
        try:
            model(batch).backward()
            optimizer.step()
        except RuntimeError:
            if not loop.swallows:
                raise
        optimizer.zero_grad()
        calls.append(1)
        if loop.leaks != "no" and len(calls) % 8 == 1:
            kept = model.history if loop.leaks == "state" else LEFT
            # 128 KiB, mapped by itself: a small one could keep a hole in the heap as large as a batch.
            kept.append(torch.ones(1 << 15))

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.randn(batch_size, loop.tokens, loop.width)

    (torch.ones(4, requires_grad=True) * 2).sum().backward()  # the engine's threads exist before the limit does
    reset_resident_peak()
    held = status("VmRSS")
    assert held is not None
    budget = held + (loop.limit_mib << 20) if loop.under == "budget" else None
    limit = limit_growth(loop.limit_mib if budget is None else 4 * loop.limit_mib)
    try:
        if batch_size is None:
            found = tune_batch_size(
                train_step,
                make_batch,
                [model, optimizer],
                tolerance=loop.tolerance,
                budget=budget,
                multiple_of=loop.group,
                cache=False,
            ).smallest
            assert budget is not None or resource.getrlimit(resource.RLIMIT_AS)[0] == limit
            trials = [[trial.batch_size, trial.measurement.verdict.name] for trial in found.result.trials]
            return {"answer": found.result.max_batch_size, "trials": trials, "summary": str(found)}
        stepped: list[int] = []
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        verdict = None
        try:
            for _ in range(STEPS):
                train_step(make_batch(batch_size, None))
        except RuntimeError as error:
            verdict = verdict_of(error)
        peak = status("VmHWM")
        assert peak is not None
        within = budget is None or peak <= budget
        trained = len(stepped) == STEPS and within
        return {"trained": trained, "steps": len(stepped), "verdict": verdict, "peak_mib": (peak - held) >> 20}
    finally:
        lift_limit()


def searching(loop: Loop) -> dict[str, Any]:
    """The request to search."""
    return {"loop": asdict(loop), "batch_size": None}


def training(loop: Loop, batch_size: int) -> dict[str, Any]:
    """The request to train at a size."""
    return {"loop": asdict(loop), "batch_size": batch_size}
