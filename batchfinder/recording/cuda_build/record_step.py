"""A training step on PyTorch's CUDA build: recorded as a trace of the allocator's own events, or tried."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from batchfinder.cuda_stub.card import VARIABLE
from batchfinder.cuda_stub.launch import StubReport
from batchfinder.errors import InvalidValue, RecordingFailed
from batchfinder.recording import distributed
from batchfinder.recording.cuda_build import values
from batchfinder.recording.cuda_build.allocations import AllocationHistory
from batchfinder.recording.cuda_build.host_operators import RUNTIME
from batchfinder.recording.fake_device import move_module
from batchfinder.recording.labels import StepLabels
from batchfinder.recording.modules import ModuleTracker
from batchfinder.recording.sdpa import FLASH_NEEDS
from batchfinder.results import Measurement, Verdict
from batchfinder.simulator.steady_state import MORE_STEPS
from batchfinder.simulator.trace import Trace
from batchfinder.training.optimizers import OPTIMIZERS
from batchfinder.training.spec import OFFLOADED_OPTIMIZER, STRATEGIES, StepConfig
from batchfinder.training.step import Step, Workload

_CARD = torch.device("cuda", 0)
_INT8 = "Linear8bit", "Linear8bitLt"


def use_card(card: str) -> None:
    """Say what the stub's card is, as `StubCard.setting` has it, before CUDA is initialized, which reads it.

    Building a model may do that already, as bitsandbytes does when peft imports it. No other process shares the card's
    memory, as those do that share a folder. The host is ahead of the card until it waits for it, and no stream of the
    card's is behind the others: what was issued before what the host has waited for is done.
    """
    stub, _, _ = os.environ[VARIABLE].partition("|")
    alone = ";".join(each for each in stub.split(";") if not each.startswith("folder="))
    os.environ[VARIABLE] = f"{alone};events=in-order|{card}"


def record_step(
    workload: Workload,
    config: StepConfig,
    batch_size: int,
    seq_len: int | None,
    mode: FakeTensorMode,
    on_operator: Callable[[str], None] = lambda name: None,
) -> Trace:
    """Run the step on the stub's card and record what the caching allocator is asked for.

    The process must be on the stub, with the card that `use_card` has set: call this in a fork.

    Args:
        workload: what is trained; its model is left on the card.
        config: how the step is taken; on one of several GPUs, whose collectives bring nothing.
        batch_size: of a micro-batch, in samples.
        seq_len: tokens per sample; None for data of one fixed shape.
        mode: the fake mode that the workload's model was made in, and its batches are.
        on_operator: called with each operator's name before it runs.

    Returns:
        The trace, sizes in bytes as they were asked for.

    Raises:
        InvalidValue: flash attention was asked for, and the card has none for it.
        RecordingFailed: the step is one that only the fake device records.
    """
    _check(workload, config)
    tracker = ModuleTracker(workload.model)
    history = AllocationHistory(tracker.current, on_operator)
    step = Step(workload, config, _CARD, _move)
    labels = StepLabels(step, history)
    with history.watching(), tracker.tracking():
        history.mark(-1, "model")
        _put_on_card(step)
        labels.placed()
        with _attention(config), _nothing_of(mode):
            step.run(batch_size, seq_len, labels.begin, loading=lambda: mode)
        labels.end()
        structure, sizes, shapes = history.collect()
    flops = history.flops // (config.steps * config.micro_batches)
    return Trace(batch_size, seq_len, structure, sizes, _unmodelled(workload, config), shapes, flops=flops)


def try_step(
    workload: Workload, config: StepConfig, batch_size: int, seq_len: int | None, mode: FakeTensorMode
) -> tuple[Measurement, tuple[str, ...]]:
    """Take the steps, and one more, on the stub's card, whose memory is that of the GPU in question.

    Where the allocator releases its cache on the way, further steps follow until it does not: `MORE_STEPS` at most. For
    want of a workspace for cuDNN it does so in the first alone, for a step that catches the error itself in each.

    Args:
        workload: and the others: as for `record_step`, and so is what the process must be.

    Returns:
        What the allocator says of the size, and in words what that leaves out.

    Raises:
        InvalidValue: flash attention was asked for, and the card has none for it.
        RecordingFailed: the step is one that only the fake device records.
    """
    _check(workload, config)
    step = Step(workload, config, _CARD, _move)
    retries, further, settled = 0, 0, True

    def goes_on() -> bool:
        nonlocal retries, further, settled
        before, retries = retries, _count("num_alloc_retries")
        settled, further = retries == before, further + 1
        return further == 1 or not (settled or further > MORE_STEPS)

    message = ""
    try:
        _put_on_card(step)
        with _attention(config), _nothing_of(mode):
            step.run(batch_size, seq_len, more=goes_on, loading=lambda: mode)
    except torch.OutOfMemoryError as error:
        message = str(error)
    verdict = Verdict.FITS
    if message:
        verdict = Verdict.OUT_OF_MEMORY
    elif not settled:
        verdict, message = Verdict.THRASHING, Verdict.THRASHING.value
    peaks = torch.cuda.max_memory_allocated(_CARD), torch.cuda.max_memory_reserved(_CARD)
    return Measurement(verdict, *peaks, message=message), _unmodelled(workload, config)


@contextmanager
def _attention(config: StepConfig) -> Iterator[None]:
    """Have attention run as the kernel that was asked for.

    Raises:
        InvalidValue: PyTorch has no flash kernel for it on this card.
    """
    if not config.flash:
        yield
        return
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        try:
            yield
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            major, minor = torch.cuda.get_device_capability(_CARD)
            raise InvalidValue("attention", "flash", f"{FLASH_NEEDS}; this card has {major}.{minor}") from error


@contextmanager
def _nothing_of(mode: FakeTensorMode) -> Iterator[None]:
    """Take no operator of this mode's fake tensors, but for the batches that are made: what it gives is on no card.

    Those that torch.compile traces with are of modes of its own.

    Raises:
        RecordingFailed: code has kept one as it was built that is neither a parameter nor a buffer.
    """
    method, dispatch = FakeTensor.__dict__["__torch_dispatch__"], FakeTensor.__torch_dispatch__

    def checked(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        if any(isinstance(each, FakeTensor) and each.fake_mode is mode for each in given):
            raise RecordingFailed(
                f"{func} was given a tensor that was made as the model was built, and is neither a parameter nor a "
                "buffer: PyTorch's CUDA build does not record that. Make it a buffer, or ask for --recorder "
                "fake-device."
            )
        return dispatch(func, types, args, kwargs)

    FakeTensor.__torch_dispatch__ = classmethod(checked)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FakeTensor.__torch_dispatch__ = method  # type: ignore[method-assign]


def _count(what: str) -> int:
    return int(torch.cuda.memory_stats(_CARD)[what])


def _put_on_card(step: Step) -> None:
    """Put the model on the card, on one of several GPUs as that one has it."""
    model = step.workload.model
    move_module(model, _on_host, step.weights_dtype)
    if step.config.gpus == 1:
        model.to(_CARD)
    else:
        step.workload = replace(step.workload, model=distributed.spread(step.workload, step.config))


def _on_host(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A real tensor of the CPU's. What it stands for is not known; nobody writes it, so it takes no memory there."""
    if not isinstance(tensor, FakeTensor):
        return tensor if dtype in (None, tensor.dtype) else tensor.detach().to(dtype)
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")
    values.set_state(made, None)
    return made


def _move(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=_CARD)
    return tensor.detach().to(_CARD, dtype)


def _unmodelled(workload: Workload, config: StepConfig) -> tuple[str, ...]:
    named = config.mode == "train" and workload.optimizer is None
    assumed = [each for each in [OPTIMIZERS[config.optimizer].assumed if named else ""] if each]
    met = StubReport(assumed=_told("assumed"), unwritten=_told("unwritten"))
    return (*workload.assumptions, *assumed, *distributed.assumptions(config), *values.reads.words(), *met.words())


def _told(kind: str) -> tuple[str, ...]:
    """What the stub has met in this process, of a kind of `StubSession.report`'s."""
    RUNTIME.stub_told.restype = ctypes.c_char_p
    texts = (RUNTIME.stub_told(kind.encode(), ctypes.c_size_t(index)) for index in itertools.count())
    return tuple(text.decode() for text in itertools.takewhile(lambda text: text is not None, texts))


def _check(workload: Workload, config: StepConfig) -> None:
    if what := _not_recorded(workload, config):
        raise RecordingFailed(f"{what}: PyTorch's CUDA build does not record that. Ask for --recorder fake-device.")


def _not_recorded(workload: Workload, config: StepConfig) -> str:
    """What of a step is not recorded here; empty where all of it is."""
    if config.strategy is not None and (why := STRATEGIES[config.strategy].not_on_cuda_build):
        return f"{STRATEGIES[config.strategy].words} ({why})"
    if config.mode == "train" and workload.optimizer is None and config.optimizer == OFFLOADED_OPTIMIZER:
        return f"the optimizer {config.optimizer}, which would compute on this machine's CPU"
    if any(type(module).__name__ in _INT8 for module in workload.model.modules()):
        return "weights in int8, whose products read which columns have outliers"
    return "gradients summed in place" if workload.sums_in_place else ""
