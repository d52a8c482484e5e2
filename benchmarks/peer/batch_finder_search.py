"""batch-finder's find_max_minibatch: it makes model and batches itself, and takes no optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from benchmarks.peer.contract import Found, Peer
from benchmarks.peer.nets import NETS, VOCABULARY
from benchmarks.peer.state import changed
from benchmarks.peer.work import Work


class Counted(nn.Module):
    """The net, with its forwards counted."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net = work.model()
        self.work = work
        # As transformers' models have it: where batch-finder learns which token numbers there are.
        self.config = SimpleNamespace(vocab_size=VOCABULARY)


class CountedIds(Counted):
    """Of token numbers: batch-finder knows their type by the argument's name."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.work.loss(self.net, input_ids)


class CountedNumbers(Counted):
    """Of anything else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work.loss(self.net, x)


def _find(work: Work) -> Found:
    from batch_finder import find_max_minibatch

    net, training = NETS[work.net], work.training()
    before = training.state()
    found = find_max_minibatch(
        lambda: (CountedIds if net.integer else CountedNumbers)(work),
        input_shapes=(-1, *net.sample),
        device=torch.device(work.device),
        use_subprocess=False,
        delay=0.0 if work.card else None,
    )
    work.end()
    size = 0 if found is None else found[0]
    # It catches every error itself: what it tried above its answer are those that failed.
    counts = work.meter.counts
    counts.failed = [tried for tried in counts.tries if tried > size]
    return Found(size, tuple(changed(before, training.state())))


PEERS = (
    Peer(
        "batch-finder",
        "batch-finder",
        "loop",
        _find,
        "no cap; takes one forward and backward of a model of its own and no optimizer, so that what a second step "
        "takes is not seen, nor, on a real device, the optimizer's state; any error counts as a lack of memory; tried "
        "in this process, which its README offers for hosts short of memory",
    ),
)
