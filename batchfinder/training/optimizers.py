"""The optimizers that can be asked for by name, and a step that is taken inside the backward.

PyTorch's own run as they are, on the fake GPU too. Of other libraries' the fake GPU runs a stand-in that makes the same
states and temporaries, since their kernels need a real device; so a simulation needs none of these libraries. A real
device takes the library's own.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode

from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.training.spec import OFFLOADED_OPTIMIZER

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that has a name on the command line.

    Attributes:
        make: makes it of parameters.
        on_fake_gpu: makes its stand-in for the fake GPU; None where the optimizer itself runs there.
        matrices_only: whether it is for the weight matrices of hidden layers; AdamW takes all other parameters.
        assumed: what a recording of it leaves out, in words; empty for nothing.
    """

    make: OptimizerFactory
    on_fake_gpu: OptimizerFactory | None = None
    matrices_only: bool = False
    assumed: str = ""


class _StandIn(torch.optim.Optimizer, ABC):
    """Makes the states and temporaries of a step one parameter after the other, without the arithmetic."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter)
                self.update(parameter, parameter.grad, self.state[parameter])

    @abstractmethod
    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of a parameter that is stepped for the first time."""

    def update(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """What the update allocates; nothing where one kernel does it all."""


class AdamW8bitStates(_StandIn):
    """bitsandbytes' AdamW8bit: two states of one byte per element, and one fp32 scale per block of 256 for each.

    Parameters of fewer than 4096 elements keep fp32 states. Two tables of 256 codes are on the device once. The kernel
    works in registers, so that a step takes no more.

    Source: `Optimizer8bit` and `Optimizer2State.init_state` in
    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/optimizer.py.
    """

    block, least_elements, codes = 256, 4096, 256
    most_resident_elements: float = float("inf")

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.tables: list[torch.Tensor] = []

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Two states, and two rows of scales where the states are of 8 bits."""
        names = ("state1", "state2")
        elements, device = parameter.numel(), parameter.device
        small = elements < self.least_elements
        state = {}
        if not small and not self.tables:
            self.tables = [torch.empty(self.codes, device=device) for _ in names]
        if elements < self.most_resident_elements:
            dtype = torch.float32 if small else torch.uint8
            state = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
        if not small:
            for name in names:
                state[f"{name}.absmax"] = torch.zeros(-(-elements // self.block), dtype=torch.float32, device=device)
        return state


class PagedAdamW8bitStates(AdamW8bitStates):
    """bitsandbytes' PagedAdamW8bit: states of 100,000 elements or more lie in CUDA's managed memory.

    That memory is no part of the caching allocator's; the driver moves its pages to the CPU when the card is full.

    Source: `Optimizer8bit.get_state_buffer`, in the file of `AdamW8bitStates`.
    """

    most_resident_elements = 1e5


class AdamW4bitStates(_StandIn):
    """torchao's AdamW4bit: two states of half a byte per element, an fp32 scale per block of 128 and 16 codes for each.

    Parameters of fewer than 4096 elements, or not of whole blocks, keep states of their own type. The update is one
    function of a parameter, compiled; its temporaries are those of the code that PyTorch 2.13's Inductor makes of it.

    Source: https://github.com/pytorch/ao/blob/v0.18.0/torchao/optim/adam.py (`_new_buffer`, `single_param_adam`) and
    https://github.com/pytorch/ao/blob/v0.18.0/torchao/optim/subclass_4bit.py (`OptimState4bit.zeros`).
    """

    block, least_elements, codes = 128, 4096, 16

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Codes, scales and a table of codes for each of two states; or two states like the parameter."""
        names = ("exp_avg", "exp_avg_sq")
        elements, device = parameter.numel(), parameter.device
        if elements < self.least_elements or elements % self.block:
            return {name: torch.zeros_like(parameter) for name in names}
        state = {}
        for name in names:
            state[name] = torch.zeros(elements // 2, dtype=torch.uint8, device=device)
            state[f"{name}.scale"] = torch.zeros(elements // self.block, device=device)
            state[f"{name}.qmap"] = torch.empty(self.codes, device=device)
        return state

    def update(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """New scales, the new states in fp32, and their codes in int64, before two of them make a byte."""
        if "exp_avg.scale" not in state:
            return
        scales = [torch.empty_like(state["exp_avg.scale"]) for _ in range(2)]
        states = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
        codes = [torch.empty_like(parameter, dtype=torch.int64) for _ in range(2)]
        while states:  # the first state is done with before the second
            del states[0], codes[0], scales[0]


class LionStates(_StandIn):
    """lion_pytorch's Lion: one state like the parameter, and two temporaries of its size in a step.

    Source: `update_fn` in https://github.com/lucidrains/lion-pytorch/blob/0.2.5/lion_pytorch/lion_pytorch.py.
    """

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The moving average of the gradient."""
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """A copy of the average, and its sum with the gradient."""
        copied = torch.empty_like(state["exp_avg"])
        torch.add(copied, grad)


class ScheduleFreeStates(_StandIn):
    """schedulefree's AdamWScheduleFree: two states like the parameters, and the denominators of all of them in a step.

    Source: `step` in
    https://github.com/facebookresearch/schedule_free/blob/main/schedulefree/adamw_schedulefree.py (1.4.1).
    """

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The sequence z, which starts as a copy of the parameter, and the average of squared gradients."""
        return {"z": torch.clone(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make missing states, and then all denominators at once, as foreach operators do."""
        super().step()
        squares = [state["exp_avg_sq"] for state in self.state.values()]
        if squares:
            torch._foreach_div(squares, 1.0)


class OffloadedStates(torch.optim.Optimizer):
    """torchao's CPUOffloadOptimizer of AdamW: parameters of 4096 elements or more are stepped on the CPU.

    Of them nothing but the gradients is on the GPU, which stay until `zero_grad` has them go: each backward copies them
    to the host's memory, and a step copies the parameters back, both without a temporary. All others have fused AdamW
    on the GPU. On the host are a copy of the parameters and of the gradients, and the two states.

    Source: https://github.com/pytorch/ao/blob/v0.18.0/torchao/optim/cpu_offload.py.
    """

    least_elements = 4096
    host_copies = 4

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        everything = list(parameters)
        super().__init__(everything, {})
        small = [each for each in everything if each.numel() < self.least_elements]
        self.on_gpu = torch.optim.AdamW(small, lr=_LEARNING_RATE, fused=True) if small else None
        if self.on_gpu is not None:
            self.state = self.on_gpu.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Of the small parameters; the others' takes no memory of the GPU."""
        if self.on_gpu is not None:
            self.on_gpu.step()


def _offloaded(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        return _of_library("torchao.optim", "CPUOffloadOptimizer", "optimizers", parameters)
    except AssertionError as error:
        raise InvalidValue("optimizer", OFFLOADED_OPTIMIZER, f"another on this device ({error})") from error


def _of_library(module: str, name: str, extra: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    package = module.partition(".")[0]
    try:
        made = getattr(importlib.import_module(module), name)(list(parameters), lr=_LEARNING_RATE)
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) and error.name == package else str(error)
        raise MissingExtra(package.replace("_", "-"), extra, f"{name} on a real device", reason) from error
    if hasattr(made, "train"):  # schedulefree's refuse to step until they are told that training has begun
        made.train()
    optimizer: torch.optim.Optimizer = made
    return optimizer


def _muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise InvalidValue("optimizer", "muon", f"one that PyTorch {torch.__version__} has; Muon is in 2.9 and later")
    return torch.optim.Muon(parameters, lr=_LEARNING_RATE)


_PAGED = "states of a paged optimizer lie in CUDA's managed memory, whose pages on the card are not counted"
_COMPILED = "torchao's compiled update of 4-bit states is taken to be what PyTorch 2.13 compiles for large parameters"

OPTIMIZERS: dict[str, NamedOptimizer] = {
    "adamw": NamedOptimizer(partial(torch.optim.AdamW, lr=_LEARNING_RATE)),
    "adamw-fused": NamedOptimizer(partial(torch.optim.AdamW, lr=_LEARNING_RATE, fused=True)),
    "adam": NamedOptimizer(partial(torch.optim.Adam, lr=_LEARNING_RATE)),
    "sgd": NamedOptimizer(partial(torch.optim.SGD, lr=_LEARNING_RATE)),
    "sgd-momentum": NamedOptimizer(partial(torch.optim.SGD, lr=_LEARNING_RATE, momentum=0.9)),
    "adafactor": NamedOptimizer(partial(torch.optim.Adafactor, lr=_LEARNING_RATE)),
    OFFLOADED_OPTIMIZER: NamedOptimizer(_offloaded, OffloadedStates),
    "adamw-8bit": NamedOptimizer(
        partial(_of_library, "bitsandbytes.optim", "AdamW8bit", "quantization"), AdamW8bitStates
    ),
    "paged-adamw-8bit": NamedOptimizer(
        partial(_of_library, "bitsandbytes.optim", "PagedAdamW8bit", "quantization"),
        PagedAdamW8bitStates,
        assumed=_PAGED,
    ),
    "adamw-4bit": NamedOptimizer(
        partial(_of_library, "torchao.optim", "AdamW4bit", "optimizers"), AdamW4bitStates, assumed=_COMPILED
    ),
    "lion": NamedOptimizer(partial(_of_library, "lion_pytorch", "Lion", "optimizers"), LionStates),
    "muon": NamedOptimizer(_muon, matrices_only=True),
    "schedule-free": NamedOptimizer(
        partial(_of_library, "schedulefree", "AdamWScheduleFree", "optimizers"), ScheduleFreeStates
    ),
}
"""By the names in `spec.OPTIMIZER_NAMES`."""


def make_optimizer(
    optimizer: str | OptimizerFactory,
    model: nn.Module,
    in_backward: bool = False,
    spread: Callable[[OptimizerFactory, list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer of the parameters of a model that train.

    Args:
        optimizer: one of `spec.OPTIMIZER_NAMES`, or what makes one of parameters.
        model: on the device it is trained on.
        in_backward: whether the backward is to take its steps, as in `InBackward`.
        spread: makes one that is spread over several GPUs of what makes one and its parameters.

    Raises:
        MissingExtra: it is another library's, which a real device needs, and which is not installed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts: list[tuple[OptimizerFactory, list[nn.Parameter]]]
    if isinstance(optimizer, str):
        named = OPTIMIZERS[optimizer]
        fake = active_fake_mode() is not None
        make = named.on_fake_gpu if fake and named.on_fake_gpu is not None else named.make
        parts = [(make, parameters)]
        if named.matrices_only:
            matrices = _hidden_matrices(model, parameters)
            chosen = {id(each) for each in matrices}
            parts = [
                (make, matrices),
                (OPTIMIZERS["adamw"].make, [each for each in parameters if id(each) not in chosen]),
            ]
            parts = [part for part in parts if part[1]]
    else:
        parts = [(optimizer, parameters)]
    if in_backward:
        return InBackward([(make, each) for make, those in parts for each in those])
    members = [make(those) if spread is None else spread(make, those) for make, those in parts]
    return members[0] if len(members) == 1 else Several(members)


def _hidden_matrices(model: nn.Module, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    # Embeddings and the output head are matrices too, but not what such an optimizer is for:
    # https://docs.pytorch.org/docs/2.13/generated/torch.optim.Muon.html.
    outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outside.add(id(getattr(head, "weight", None)))
    return [each for each in parameters if each.dim() == 2 and id(each) not in outside]


class Several(torch.optim.Optimizer):
    """Optimizers of different parameters that step together; their state is one mapping."""

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        groups = [group for member in members for group in member.param_groups]
        super().__init__([each for group in groups for each in group["params"]], {})
        self.members = members
        for member in members:
            member.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let each of them step."""
        for member in self.members:
            member.step()


class InBackward(Several):
    """One optimizer for each parameter, which steps and frees the gradient as soon as the backward has made it.

    So no more than a few gradients exist at a time, and none is left for an accumulation or for clipping.

    Args:
        parts: each parameter, and what makes its optimizer.
    """

    def __init__(self, parts: Iterable[tuple[OptimizerFactory, nn.Parameter]]) -> None:
        parts = list(parts)
        super().__init__([make([parameter]) for make, parameter in parts])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._step_one, member))
            for (_, parameter), member in zip(parts, self.members, strict=True)
        ]

    @staticmethod
    def _step_one(member: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        member.step()
        member.zero_grad()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the backward has done it."""

    def remove(self) -> None:
        """Let backwards leave the parameters alone again."""
        for hook in self._hooks:
            hook.remove()


def states_of(optimizer: torch.optim.Optimizer) -> Iterable[tuple[Any, list[torch.Tensor]]]:
    """Each parameter with the tensors of its state on its device; tables that belong to no parameter come with None."""
    if hasattr(optimizer, "d_opt"):  # of torchao's CPUOffloadOptimizer: of small parameters, where there are any
        optimizer = optimizer.d_opt
        if optimizer is None:
            return
    for parameter, state in optimizer.state.items():
        yield parameter, [value for value in state.values() if isinstance(value, torch.Tensor)]
    for each in getattr(optimizer, "members", [optimizer]):
        if hasattr(each, "optim"):  # of ZeroRedundancyOptimizer: this rank's
            yield from states_of(each.optim)
        yield None, getattr(each, "tables", [])
