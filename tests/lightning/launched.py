"""A fit whose processes a launcher starts; what the caller's process knows of it, as JSON.

python -m tests.lightning.launched ddp_fork 2
"""

from __future__ import annotations

import json
import sys

import torch

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets


def main(strategy: str, devices: int) -> None:
    """Fit, and say what the finder holds here."""
    torch.set_num_threads(1)
    finder = BatchFinder(32, max_batch_size=8, cache=False)
    trainer = nets.trainer(callbacks=[finder], strategy=strategy, devices=devices, max_steps=1)
    trainer.fit(nets.ConvNet(2, rows=64, side=4, width=4))
    (found,) = finder.results["fit"].values()
    print(json.dumps([finder.batch_size, str(finder.plan), found.max_batch_size, trainer.accumulate_grad_batches]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
