"""One search under a CPU budget in a process of its own: `python -m tests.loop.budgeted <MiB>` prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from batchfinder import tune_batch_size
from batchfinder.measure.host_limits import reset_resident_peak, status
from batchfinder.units import MIB


def bert() -> tuple[nn.Module, Any, Any]:
    """A classifier of two layers, its batches of 32 tokens, and its loss."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(vocab_size=3000, **sizes))

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(0, 3000, (batch_size, 32)), "labels": torch.randint(0, 2, (batch_size,))}

    return model, make_batch, lambda batch: model(**batch).loss


def main(more_mib: int) -> dict[str, Any]:
    """Search under a budget of what the process holds and `more_mib`, and take ten steps at the answer.

    Returns:
        The answer, its peak and the limit, and the most that was resident in the ten steps, in bytes.
    """
    torch.manual_seed(0)
    model, make_batch, loss_of = bert()
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: Any) -> None:
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step(make_batch(2, None))
    budget = (status("VmRSS") or 0) + more_mib * MIB
    found = tune_batch_size(train_step, make_batch, [model, optimizer], budget=budget, cache=False)
    reset_resident_peak()
    for _ in range(10):
        train_step(make_batch(found.batch_size, None))
    measured = found.result.measurement
    peak = None if measured is None else measured.peak_reserved_bytes
    return {"answer": found.batch_size, "peak": peak, "limit": budget, "trained": status("VmHWM"), "text": str(found)}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
