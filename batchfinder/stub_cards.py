"""Cards of the catalogue as the CUDA stub's, and sessions on them with errors of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchfinder.cuda_stub import CudaBuild, StubCard, StubSession, StubUnavailable, find_build
from batchfinder.devices import Device, Gpu, find_gpu
from batchfinder.errors import CudaStubUnavailable, InvalidValue, UnknownName
from batchfinder.units import MIB, format_bytes

# From NVIDIA's architecture whitepapers, of each generation's largest chip. cuDNN asks for it; no convolution was found
# whose workspace depends on it.
_L2_MIB = {
    (3, 7): 1.5, (5, 2): 3, (6, 0): 4, (6, 1): 3, (7, 0): 6, (7, 5): 6, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50,
    (10, 0): 126, (10, 3): 126, (12, 0): 96,
}  # fmt: skip

_UNLIMITED_BYTES = 1 << 40


def stub_card(
    gpu: str | Gpu | None = None,
    memory_bytes: int | None = None,
    held_bytes: int = 0,
    context_bytes: int | None = None,
) -> StubCard:
    """A card for the stub.

    Args:
        gpu: of the catalogue, or its name; None for an A100 as far as kernels are concerned.
        memory_bytes: in all; None for what the named card has, or 80 GiB.
        held_bytes: what something else holds of it.
        context_bytes: what the context of each process takes; None for what the catalogue says of a whole card, and
            nothing where `memory_bytes` is given.

    Raises:
        UnknownName: no such GPU.
        InvalidValue: it is no NVIDIA GPU, or what is held does not leave anything.
    """
    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if found is not None and found.compute_capability is None:
        raise InvalidValue("gpu", found.name, "an NVIDIA GPU, which PyTorch's CUDA build runs on")
    if context_bytes is None:
        context_bytes = found.context_bytes if found is not None and memory_bytes is None else 0
    if memory_bytes is None:
        memory_bytes = found.memory_bytes if found is not None else 80 << 30
    if held_bytes + context_bytes >= memory_bytes:
        raise InvalidValue("held", format_bytes(held_bytes), f"less than the {format_bytes(memory_bytes)} of the card")
    if found is None:
        return StubCard(total_bytes=memory_bytes, held_bytes=held_bytes, context_bytes=context_bytes)
    assert found.compute_capability is not None
    return StubCard(
        f"NVIDIA {found.name}",
        memory_bytes,
        context_bytes,
        held_bytes,
        found.compute_capability,
        found.multiprocessors,
        int(_L2_MIB.get(found.compute_capability, 40) * MIB),
    )


def card_of_device(device: Device) -> StubCard:
    """The card for a device of a sweep: of its memory the allocator gets what is usable.

    Its kind is the catalogue's, where it has the name up to a comma; a budget or a context may stand after that.
    """
    try:
        kind = stub_card(device.name.partition(",")[0])
    except (UnknownName, InvalidValue):
        kind = StubCard()
    context_bytes = device.total_bytes - device.usable_bytes
    return replace(
        kind,
        total_bytes=device.total_bytes,
        context_bytes=context_bytes,
        compute_capability=device.compute_capability,
    )


def recording_card(device: Device) -> str:
    """Of a device's kind, with more memory than any step takes: what a step is recorded on, as `StubCard.setting`."""
    whole = replace(card_of_device(device), name="", total_bytes=_UNLIMITED_BYTES, context_bytes=0, held_bytes=0)
    return whole.setting


def find_cuda_build(torch_version: str | None = None) -> CudaBuild:
    """PyTorch's CUDA build that commands are to be run on.

    Raises:
        CudaStubUnavailable: no CUDA build of that version is installed, or this machine cannot run the stub.
    """
    try:
        return find_build(torch_version)
    except StubUnavailable as error:
        raise CudaStubUnavailable(str(error)) from error


def open_session(cards: Sequence[StubCard], **settings: Any) -> StubSession:
    """A session on these cards, with the settings of `StubSession`.

    Raises:
        CudaStubUnavailable: the stub cannot be had here.
    """
    try:
        return StubSession(cards, **settings)
    except StubUnavailable as error:
        raise CudaStubUnavailable(str(error)) from error
