"""The fake device beside PyTorch's CUDA build: one operation after another, allocation by allocation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from batchfinder.devices import device_for, find_gpu
from batchfinder.recording.sdpa import AttentionCall, choose_kernel
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Shape
from batchfinder.simulator.trace import Trace
from batchfinder.testing import CudaStubFixture
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE, StepConfig, WorkloadSpec
from tests.builders.one_operator import OPERATIONS

pytestmark = pytest.mark.cuda_build
BATCH_SIZE = 8
# PyTorch makes small tensors of integers besides, or puts these on the host.
SMALL_BYTES = 16


def spec(operation: str) -> WorkloadSpec:
    """How to build it in the recording process."""
    return WorkloadSpec("tests.builders.one_operator:build", {"operation": operation})


@pytest.fixture(scope="module")
def recorders() -> Iterator[tuple[Simulation, ...]]:
    """A process of each."""
    first = spec("mean")
    with Simulation(first, StepConfig(), CUDA_BUILD) as real, Simulation(first, StepConfig()) as fake:
        assert (real.recorder, fake.recorder) == (CUDA_BUILD, FAKE_DEVICE)
        yield real, fake


def allocated(trace: Trace) -> list[int]:
    """Bytes asked for, in order, in two steps."""
    return [trace.sizes[event] for event in trace.structure.order if event >= 0 and trace.sizes[event] > SMALL_BYTES]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "16-mixed"])
def test_the_same_allocations_in_the_same_order(recorders: tuple[Simulation, ...], precision: str) -> None:
    """Of forward, loss, backward and optimizer, for each operation; an A100's reductions among them."""
    config, device = StepConfig(precision=precision, optimizer="sgd"), device_for(find_gpu("A100 80GB"))
    probes = {
        operation: [each.with_spec(spec(operation), config).probe(device, [None]) for each in recorders]
        for operation in OPERATIONS
    }
    for both in probes.values():
        for probe in both:
            probe.traces.ask(BATCH_SIZE, None)
    different = []
    for operation, both in probes.items():
        real, fake = (allocated(probe.trace(BATCH_SIZE, Shape(), exact=True)) for probe in both)
        if real != fake:
            different.append((operation, real, fake))
    assert not different


KERNELS = {"MATH": "math", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "CUDNN_ATTENTION": "cudnn"}
CALLS = tuple(
    product(
        ("float32", "float16", "bfloat16"),
        (60, 64, 128, 136, 192, 256, 264),  # the head size
        (False, True),  # whether there is a mask
        (False, True),  # whether gradients are asked for
        (False, True),  # whether it is causal
        (4, 2),  # key heads
        (0.0, 0.1),  # dropout
    )
)


def call(
    device: str, dtype: str, head: int, masked: bool, grad: bool, causal: bool, key_heads: int, dropout: float
) -> AttentionCall:
    """Of two samples, four heads and 128 tokens."""

    def empty(*shape: int, requires_grad: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device, requires_grad=requires_grad)

    query, *both = (empty(2, heads, 128, head, requires_grad=grad) for heads in (4, key_heads, key_heads))
    mask = empty(2, 1, 128, 128) if masked else None
    return AttentionCall(query, *both, mask, dropout, causal, grouped=key_heads != 4)


def chosen() -> list[str]:
    """Which kernel PyTorch takes for each call on the card of this process."""
    from torch.nn.attention import SDPBackend

    names = {int(kernel): name for name, kernel in SDPBackend.__members__.items()}
    found = []
    for arguments in CALLS:
        asked = call("cuda", *arguments)
        three, how = (asked.query, asked.key, asked.value), {"enable_gqa": asked.grouped}
        kernel = torch._fused_sdp_choice(*three, asked.mask, asked.dropout, asked.is_causal, **how)
        found.append(KERNELS[names[kernel]])
    return found


@pytest.mark.parametrize("gpu", ["T4", "A100 80GB", "RTX 4090", "H100 80GB", "B200"])
def test_attention_runs_as_the_kernel_that_pytorch_takes(cuda_stub: CudaStubFixture, gpu: str) -> None:
    """By type, head size, mask, gradients, shared heads and dropout: what PyTorch says on such a card."""
    capability = device_for(find_gpu(gpu)).compute_capability
    theirs = cuda_stub(gpu=gpu).run(chosen).result
    ours = [choose_kernel(capability, call("meta", *arguments)) for arguments in CALLS]
    assert [each for each in zip(CALLS, theirs, ours, strict=True) if each[1] != each[2]] == []
