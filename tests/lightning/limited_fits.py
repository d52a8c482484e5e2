"""Fits in processes of their own, under a real limit: what the callback's tests start, through `tests/forks.py`."""

from __future__ import annotations

import resource
import threading
from typing import Any

from tests.forks import lift_limit, limit_growth


def prepare() -> None:
    """Import what a fit does, in one fit without a step: its optimizer's imports take seconds."""
    import torch

    import batchfinder.lightning.callback
    import batchfinder.measure.oom  # noqa: F401
    from tests.lightning import nets

    torch.set_num_threads(1)
    # A search leaves the stack of one thread behind, 8 MiB by default: a tenth of the limits that tests can afford.
    threading.stack_size(1 << 20)
    module = nets.Transformer()
    nets.trainer(limit_train_batches=0).fit(module)
    torch.optim.AdamW(module.parameters()).step()


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """`fit` with a request's entries."""
    return fit(**request)


def fit(
    net: str,
    options: dict[str, Any] | None = None,
    finder: dict[str, Any] | None = None,
    batch_size: int = 2,
    steps: int = 50,
    limit_mib: int | None = None,
    more: float | None = None,
) -> dict[str, Any]:
    """Fit under a limit, in a process that ends afterwards.

    Args:
        net: one of `nets`.
        options: its arguments beside the batch size.
        finder: the callback's arguments; None for a fit without it.
        batch_size: the loader's, before the callback changes it.
        steps: how many to take.
        limit_mib: by how much the process may grow; None for as much as there is.
        more: share of the size found by which to go beyond it afterwards, in a second fit in this process.

    Returns:
        What happened, as JSON values.
    """
    import pytorch_lightning as pl
    import torch

    from batchfinder.lightning.callback import BatchFinder
    from batchfinder.measure.oom import classify
    from tests.lightning import nets

    torch.set_num_threads(1)
    (torch.ones(4, requires_grad=True) * 2).sum().backward()  # the engine's threads exist before the limit does
    pl.seed_everything(1)
    module = getattr(nets, net)(batch_size=batch_size, **(options or {}))
    callback = None if finder is None else BatchFinder(**finder)
    trainer = nets.trainer(callbacks=[] if callback is None else [callback], max_epochs=-1, max_steps=steps)
    limit = None if limit_mib is None else limit_growth(limit_mib)

    def fitted(trainer: Any, module: Any) -> dict[str, Any]:
        error, verdict = None, None
        try:
            trainer.fit(module)
        except Exception as raised:
            verdict = classify(raised, device="cpu")
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
        return {"error": error, "verdict": None if verdict is None else verdict.name, "steps": trainer.global_step}

    seen = fitted(trainer, module)
    unchanged = limit is None or resource.getrlimit(resource.RLIMIT_AS)[0] == limit
    beyond = None
    if more is not None and callback is not None:
        larger = int((1 + more) * callback.batch_size) + 1
        module = getattr(nets, net)(batch_size=larger, **(options or {}))
        beyond = fitted(nets.trainer(max_epochs=-1, max_steps=2), module)
    lift_limit()
    outcomes = {} if callback is None else callback.results.get("fit", {})
    return {
        **seen,
        "beyond": beyond,
        "batch_size": None if callback is None else callback.batch_size,
        "trials": [
            [t.batch_size, t.fits, t.measurement.peak_reserved_bytes] for o in outcomes.values() for t in o.trials
        ],
        "sources": [outcome.source for outcome in outcomes.values()],
        "limit_unchanged": unchanged,
    }
