"""The BERTs of the Titan X table, with an optimizer that PyTorch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from batchfinder.step.workload import Workload
from batchfinder.zoo import build_workload

_BLOCK, _LEAST_NUMBERS = 256, 4096


class AdamW8bitStates(torch.optim.Optimizer):
    """What bitsandbytes' AdamW8bit holds, and nothing else: there is no arithmetic on a pretend GPU.

    Two states of one byte per number, and one fp32 scale per block of 256 for each; parameters under 4096 numbers keep
    fp32 states (`Optimizer2State.init_state`,
    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/optim/optimizer.py). Its kernel works
    in registers, so that a step takes no more.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make the states of parameters that have none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = _states(parameter)


def _states(parameter: torch.Tensor) -> dict[str, Any]:
    if parameter.numel() < _LEAST_NUMBERS:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    blocks = -(-parameter.numel() // _BLOCK)
    states = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
    return states | {
        name: torch.zeros(blocks, dtype=torch.float32, device=parameter.device) for name in ("absmax1", "absmax2")
    }


def build(spec: str, attention: str, gradient_checkpointing: bool = False) -> Workload:
    """A named model with the states of 8-bit AdamW.

    Args:
        spec: its name in the zoo.
        attention: `eager` or `sdpa`.
        gradient_checkpointing: whether activations are recomputed.
    """
    workload = build_workload(spec, attention=attention, gradient_checkpointing=gradient_checkpointing)
    return Workload(
        workload.model,
        workload.make_batch,
        workload.loss,
        AdamW8bitStates,
        workload.max_seq_len,
        workload.seq_len_unit,
        workload.zero_grad_after_loss,
    )
