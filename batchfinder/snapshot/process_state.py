"""State of the process rather than of an object: random numbers, settings, hooks on all modules."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

ReadWrite = tuple[Callable[[], Any], Callable[[Any], Any]]
_ACCELERATORS = ("cuda", "xpu")  # the devices that have generators of their own and start when first used


class ProcessState:
    """Random numbers and settings of the process. Nothing is initialised to read them.

    A device that was not started when the state was captured and is when it is restored gets the generators that it
    started with: their seed, from the beginning.
    """

    def __init__(self) -> None:
        self._settings = [(setting, setting[0]()) for setting in _settings()]
        generators: list[ReadWrite] = [(random.getstate, random.setstate), (torch.get_rng_state, torch.set_rng_state)]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            generators.append((partial(numpy.random.get_state, legacy=False), numpy.random.set_state))
        for name in _ACCELERATORS:
            device = getattr(torch, name)
            if device.is_initialized():
                for index in range(device.device_count()):
                    generators.append(
                        (partial(device.get_rng_state, index), partial(device.set_rng_state, device=index))
                    )
        if torch.backends.mps.is_available():
            generators.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
        self._random = [(write, read()) for read, write in generators]
        self._started = [name for name in _ACCELERATORS if getattr(torch, name).is_initialized()]

    def restore(self) -> None:
        """Put them back; a setting that has not changed is not written."""
        for (read, write), value in self._settings:
            if value is not None and read() != value:  # None: torch refused to read it
                write(value)
        for write, value in self._random:
            write(value)
        for name in _ACCELERATORS:
            if name not in self._started and getattr(torch, name).is_initialized():
                for generator in getattr(torch, name).default_generators:
                    generator.manual_seed(generator.initial_seed())
        # A weight that autocast has cast stays in its cache while the outermost autocast lasts.
        torch.clear_autocast_cache()


def shared_hooks() -> list[Any]:
    """The dictionaries of hooks that are called for every module and every optimizer."""
    owners = (modules, optimizers)
    return [
        value
        for owner in owners
        for name, value in vars(owner).items()
        if name.startswith("_global_") and value is not None
    ]


def _settings() -> Iterator[ReadWrite]:
    """How to read and write every setting of the process that a step may change."""
    c: Any = torch._C
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.is_grad_enabled, c._set_grad_enabled
    yield torch.get_num_threads, torch.set_num_threads
    yield c._is_multithreading_enabled, c._set_multithreading_enabled
    yield (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    yield (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    for name in ("enabled", "benchmark", "deterministic"):
        yield getattr(c, f"_get_cudnn_{name}"), getattr(c, f"_set_cudnn_{name}")
    for name in ("flash", "math", "mem_efficient", "cudnn"):
        yield getattr(c, f"_get_{name}_sdp_enabled"), getattr(c, f"_set_sdp_use_{name}")
    # Two older settings, which set some of those below as well. Neither can be read while the new ones say otherwise.
    yield partial(_unless_mixed, torch.get_float32_matmul_precision), torch.set_float32_matmul_precision
    yield partial(_unless_mixed, c._get_cudnn_allow_tf32), c._set_cudnn_allow_tf32
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        matmul = torch.backends.cuda.matmul
        yield partial(getattr, matmul, name), partial(setattr, matmul, name)
    for backend, operator in _FLOAT32_PRECISIONS:
        yield (
            partial(c._get_fp32_precision_getter, backend, operator),
            partial(c._set_fp32_precision_setter, backend, operator),
        )
    for device in ("cpu", "cuda", "xpu", "mps"):
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.geterr, lambda value: numpy.seterr(**value)


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """An older setting of float32 precision; None where torch refuses to read it."""
    try:
        return read()
    except RuntimeError:
        return None


# From the general to the particular, as setting one sets those below it.
_FLOAT32_PRECISIONS = (
    ("generic", "all"),
    *(("cuda", operator) for operator in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operator) for operator in ("all", "matmul", "conv", "rnn")),
)
