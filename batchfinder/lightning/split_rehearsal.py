"""What splitting takes besides micro-batches: there while sizes are tried, so that a size that was found trains."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning.callbacks import Callback

from batchfinder.lightning.batch_start import BatchStart
from batchfinder.probing.atomic_update import AtomicUpdate
from batchfinder.splitting.by_length import sample_lengths
from batchfinder.splitting.samples import samples_in
from batchfinder.splitting.tree import tensors


class SplitRehearsal(Callback):  # type: ignore[misc, unused-ignore]
    """Takes part in the tries, each of which has two micro-batches of one size.

    In training the whole batch is on the device, and once more if it is sorted by length; and where a batch is to be
    run again after a failure, copies of buffers are there, and of the weights as they are updated.

    Args:
        samples: of a whole batch on this device; None where nobody can tell.
        recover: whether batches are run again.
        in_order: whether samples keep their order.
    """

    def __init__(self, samples: int | None, recover: bool, in_order: bool) -> None:
        self._samples = samples
        self._recover = recover
        self._in_order = in_order

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take as much, until the try's own loop is dropped."""
        held = vars(trainer.fit_loop).setdefault("_split_rehearsal", [])
        if not held and self._recover:
            held.extend(AtomicUpdate(optimizer) for optimizer in trainer.optimizers)
            held.append(BatchStart(pl_module))
        if batch_idx == 0:
            held.append(torch.ones(self._rest(batch), dtype=torch.uint8, device=trainer.strategy.root_device))

    def _rest(self, batch: Any) -> int:
        """Bytes of the whole batch that this part of it has not."""
        here = samples_in(batch)
        whole = max(here, self._samples or 0)
        if whole > here and not self._in_order and sample_lengths(batch) is not None:
            whole += whole
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(batch))
        return (whole - here) * nbytes // here
