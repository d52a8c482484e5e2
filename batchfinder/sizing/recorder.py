"""What takes a simulated step where no recorder is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TypeVar

from batchfinder.cuda_stub import StubUnavailable, find_build
from batchfinder.cuda_stub.compile import compiled_stub
from batchfinder.devices import Card
from batchfinder.errors import BatchFinderError, InvalidValue, UserCodeFailed
from batchfinder.report.terminal import last_line_of
from batchfinder.training.spec import (
    AUTO,
    CUDA_BUILD,
    FAKE_DEVICE,
    OFFLOADED_OPTIMIZER,
    STRATEGIES,
    StepOptions,
    named_recorder,
)

_T = TypeVar("_T")
_MOST_CARDS = 4
"""For more, whose sizes would each be tried, the recordings of the fake device are several times faster."""


def choose_recorder(options: StepOptions, cards: Sequence[Card]) -> str:
    """PyTorch's CUDA build where it is here, and takes the step; else the fake device.

    It takes steps on NVIDIA's GPUs, and is chosen for up to four cards. What it takes by Triton or bitsandbytes needs
    these here.
    """
    spreads = options.strategy is None or not STRATEGIES[options.strategy].not_on_cuda_build
    needed = {"triton": options.compile is not None, "bitsandbytes": options.quantization is not None}
    takes = options.quantization != "int8" and options.optimizer != OFFLOADED_OPTIMIZER
    takes &= all(find_spec(library) is not None for library, is_needed in needed.items() if is_needed)
    of_nvidia = not any(card.device.assumed_capability for card in cards)
    if spreads and takes and of_nvidia and len(cards) <= _MOST_CARDS:
        with suppress(StubUnavailable):
            compiled_stub(find_build())
            return CUDA_BUILD
    return FAKE_DEVICE


def take_with_recorder(
    asked: str, options: StepOptions, cards: Sequence[Card], take: Callable[[str], _T]
) -> tuple[_T, str]:
    """What `take` returns, given the recorder that is asked for or chosen.

    Args:
        asked: one of `RECORDERS`, or `auto` to choose one. Where the CUDA build was chosen and does not take the step,
            the fake device does.

    Returns:
        That, and in words why the fake device took the step; empty where it was no other's to take.

    Raises:
        InvalidValue: there is no such recorder.
        BatchFinderError: whatever `take` raises with the last recorder.
    """
    named = named_recorder(asked)
    recorder = choose_recorder(options, cards) if named == AUTO else named
    try:
        return take(recorder), ""
    except BatchFinderError as error:
        if named != AUTO or recorder == FAKE_DEVICE or isinstance(error, InvalidValue):
            raise
        return take(FAKE_DEVICE), instead_of_cuda_build(error)


def instead_of_cuda_build(error: BatchFinderError) -> str:
    """Why the fake device took a step for which the CUDA build was chosen, in words."""
    why = last_line_of(error) if isinstance(error, UserCodeFailed) else str(error).partition("\n")[0]
    return f"PyTorch's CUDA build did not take the step, and the fake device did: {why}"
