"""The pretend GPU: a device with no memory and no arithmetic, on which shapes and lifetimes are real.

It is a PrivateUse1 backend made of fake tensors. PyTorch treats that backend like CUDA in most places (bool dropout
masks, foreach optimizers, the autograd engine's device threads), works with CPU-only and CUDA builds alike, and, unlike
`FakeTensorMode` on "cuda", runs a backward without a GPU. Registering it makes it the accelerator of the whole
process and cannot be undone, so it belongs in a child process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE_TYPE = "pretend"


class _DeviceModule:
    """What `torch.pretend` must answer. Autocast and activation checkpointing ask for the supported types."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing is random here."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]


class FakeDeviceMode(FakeTensorMode):
    """Fake tensors that never ask a real accelerator to wake up."""

    @property
    def avoid_device_init(self) -> bool:
        return True


@functools.cache
def register() -> torch.device:
    """Make the pretend GPU this process's accelerator. Once done it stays.

    Returns:
        The device to put models and batches on.
    """
    _setup_privateuseone_for_python_backend(rename=DEVICE_TYPE, backend_module=_DeviceModule())
    _pass_for_ordinary_tensors()
    return torch.device(DEVICE_TYPE, 0)


def _pass_for_ordinary_tensors() -> None:
    """Let code that treats fake tensors specially take the path it would take on a GPU.

    Optimizers choose their foreach variants by the exact type of the parameters, and transformers builds attention
    masks that it would skip on a GPU when it believes that it is being traced.
    """
    for types in (_foreach_utils._foreach_supported_types, torch_optimizer._foreach_supported_types):
        if FakeTensor not in types:
            types.append(FakeTensor)


def hide_from_transformers() -> None:
    """Tell transformers, if it is loaded, that no tensor is fake (see `_pass_for_ordinary_tensors`)."""
    module = sys.modules.get("transformers.utils.import_utils")
    if module is not None and hasattr(module, "is_fake_tensor"):
        setattr(module, "is_fake_tensor", lambda tensor: False)  # noqa: B010


def pretend_copy(
    tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of the same shape and strides on the pretend device, sharing nothing with `tensor`.

    Args:
        tensor: any shape; real or fake, on any device.
        device: the pretend device.
        mode: the fake mode that is active.
        dtype: the copy's type; the tensor's own by default.
    """
    if not isinstance(tensor, FakeTensor):
        tensor = mode.from_tensor(tensor)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=device)


def move_module(
    module: nn.Module,
    device: torch.device,
    mode: FakeTensorMode,
    dtype: torch.dtype | None = None,
    settle: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """What `module.to(device, dtype)` does, in the same order, for modules of real or fake CPU tensors.

    A `dtype` is for floating-point tensors only. Tied parameters and shared buffers stay shared. Order (children
    first, then parameters, then buffers) as in
    `torch.nn.Module._apply`, https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py. `settle` is
    called with each module whose tensors have been moved.
    """
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            copy = pretend_copy(tensor.detach(), device, mode, dtype if tensor.is_floating_point() else None)
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = copy
        return moved[id(tensor)]

    def visit(current: nn.Module) -> None:
        for child in current.children():
            visit(child)
        for store in (current._parameters, current._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = move(tensor)  # type: ignore[assignment]
        settle(current)

    visit(module)
