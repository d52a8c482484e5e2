"""Plain loops in processes of their own, under a real RLIMIT_AS: what the tests start through `tests/forks.py`."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

from tests.forks import lift_limit, limit_growth, ready_to_search, verdict_of

STEPS = 3


def prepare() -> None:
    """Import what a loop does."""
    import batchfinder
    from tests.loop import loops

    ready_to_search(loops.Transformer())
    assert callable(batchfinder.tune_batch_size)


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """`train` with a request's entries, or `search_lengths` where it has lengths."""
    return search_lengths(**request) if "seq_lens" in request else train(**request)


def loop() -> tuple[Callable[[Any], None], Callable[[int, int | None], Any], list[Any]]:
    """A step, what makes its batches, and its state."""
    import torch
    from torch import nn

    from tests.loop.loops import WORDS, Transformer, tokens

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Transformer(width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(batch: Any) -> None:
        text, labels = batch
        nn.functional.cross_entropy(model(text).view(-1, WORDS), labels.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train_step, lambda batch_size, seq_len: tokens(batch_size, seq_len or 128), [model, optimizer]


def train(
    limit_mib: int, tune: dict[str, Any] | None = None, more: float | None = None, batch_size: int = 0
) -> dict[str, Any]:
    """Tune and train under a limit, in a process that ends afterwards.

    Args:
        limit_mib: by how much the process may grow.
        tune: further arguments of `tune_batch_size`; None to train at `batch_size` without a search.
        more: share of the size found by which to go beyond it afterwards.

    Returns:
        What happened, as JSON values.
    """
    import torch

    from batchfinder import tune_batch_size

    train_step, make_batch, state = loop()

    def trained(batch_size: int) -> dict[str, Any]:
        steps, verdict = 0, None
        try:
            for _ in range(STEPS):
                train_step(make_batch(batch_size, None))
                steps += 1
        except RuntimeError as error:
            verdict = verdict_of(error)
        return {"steps": steps, "verdict": verdict}

    (torch.ones(4, requires_grad=True) * 2).sum().backward()  # the engine's threads exist before the limit does
    limit = limit_growth(limit_mib)
    if tune is None:
        answer: dict[str, Any] = {"at": trained(batch_size)}
        lift_limit()
        return answer
    found = tune_batch_size(train_step, make_batch, state, **tune).smallest
    size = found.result.max_batch_size
    answer = {
        "largest": size,
        "source": found.result.source,
        "trials": [[trial.batch_size, trial.fits] for trial in found.result.trials],
        "limit_unchanged": resource.getrlimit(resource.RLIMIT_AS)[0] == limit,
        "at": trained(size),
        "beyond": None if more is None else trained(int((1 + more) * size) + 1),
    }
    lift_limit()
    return answer


def search_lengths(more_mib: int, seq_lens: list[int]) -> dict[str, int]:
    """The batch size for each length, in the order given, under a budget of what the process holds and `more_mib`."""
    from batchfinder import tune_batch_size
    from batchfinder.measure.host_limits import status

    train_step, make_batch, state = loop()
    train_step(make_batch(2, None))
    budget = (status("VmRSS") or 0) + (more_mib << 20)
    found = tune_batch_size(train_step, make_batch, state, budget=budget, cache=False, seq_lens=seq_lens)
    return {str(seq_len): found[seq_len].batch_size for seq_len in seq_lens}
