"""PyTorch's own CUDA build on a machine without a GPU: stub libraries that stand in for CUDA's.

Memory is accounted for and refused past a card's size; kernels compute nothing. On them PyTorch's host code runs as it
is: the caching allocator and its errors, every operator's outputs and scratch, autograd, autocast, the optimizers, DDP,
FSDP, Inductor. It runs in child processes alone, and never meets a real driver. Nothing here imports torch but what
child/ holds, which runs in those processes.
"""

from batchfinder.cuda_stub.builds import CudaBuild, find_build, install, installed_builds, uninstall
from batchfinder.cuda_stub.card import StubCard
from batchfinder.cuda_stub.errors import StubUnavailable
from batchfinder.cuda_stub.launch import StubReport, StubSession

__all__ = [
    "CudaBuild",
    "StubCard",
    "StubReport",
    "StubSession",
    "StubUnavailable",
    "find_build",
    "install",
    "installed_builds",
    "uninstall",
]
