"""In a process of its own: the buckets that PyTorch's DistributedDataParallel makes, and the gradients for them.

Prints two lines of JSON: the buckets' bytes, and the gradients' in the order in which the backward makes them.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 512


def main() -> None:
    """Train a stack of layers for three steps. The second begins with new buckets, the third writes them down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(60)), nn.Linear(WIDTH, 3, bias=False))
    made: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: made.append(gradient.nbytes))
    trained = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        trained(torch.zeros(2, WIDTH)).sum().backward()
    sizes = trained._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    print(json.dumps([int(size) for size in sizes.split(",")]))
    print(json.dumps(made[: len(made) // 3]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
