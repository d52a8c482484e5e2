"""torchtune's levers on Llama 3.2 3B: each published row that is the same compiled or not, from checkpointing on."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from batchfinder.models.build import allow_fake_weights, build_workload
from batchfinder.models.quantization import QUANTIZATIONS
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.training.step import Workload
from batchfinder.units import GIB
from benchmarks.measured.case import ALLOCATED, Case, read_rows

HERE = Path(__file__).parent
BATCH_SIZE, SEQ_LEN = 2, 4096
CHUNKS = 8
STASH = 5
"""Activations on their way to the CPU that are still on the device (torchtune's `max_fwd_stash_size`)."""

_RANK, _TARGETS = 64, ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_LEVERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "+ Packed Dataset": ("eager", {"checkpointing": False, "chunks": 1}, {"optimizer": "adamw-fused"}),
    "+ Activation Checkpointing": ("checkpointing", {}, {"optimizer": "adamw-fused"}),
    "+ Fuse optimizer step into backward": (
        "optimizer in backward",
        {},
        {"optimizer": "adamw-fused", "optimizer_in_backward": True},
    ),
    "+ Activation Offloading": (
        "offloading",
        {"offload": True},
        {"optimizer": "adamw-fused", "optimizer_in_backward": True},
    ),
    "+ 8-bit AdamW": ("8-bit AdamW", {"offload": True}, {"optimizer": "adamw-8bit", "optimizer_in_backward": True}),
    "LoRA": ("LoRA", {"offload": True, "rank": _RANK}, {"optimizer": "adamw-fused"}),
    "QLoRA": ("QLoRA", {"offload": True, "rank": _RANK, "quantized": True}, {"optimizer": "adamw-fused"}),
}


def cases() -> list[Case]:
    """The rows of `_LEVERS`."""
    found = []
    for row in read_rows(HERE):
        if row["technique"] in _LEVERS:
            technique, arguments, step = _LEVERS[row["technique"]]
            found.append(
                Case(
                    name=row["technique"],
                    technique=technique,
                    gpu="A100 80GB",
                    statistic=ALLOCATED,
                    published_bytes=int(float(row["peak_active_gib"]) * GIB),
                    workload=WorkloadSpec("benchmarks.measured.torchtune.cases:build", arguments),
                    step=StepConfig(precision="fp32", **step),  # all is bf16 as it was loaded
                    batch_size=BATCH_SIZE,
                    seq_len=SEQ_LEN,
                )
            )
    return found


def build(
    checkpointing: bool = True, chunks: int = CHUNKS, offload: bool = False, rank: int = 0, quantized: bool = False
) -> Workload:
    """Llama 3.2 3B in bf16, of transformers, with torchtune's loss, checkpointing, offloading and adapters in bf16."""
    workload = build_workload("llama-3.2-3b", gradient_checkpointing=checkpointing)
    model: Any = workload.model
    with allow_fake_weights():
        model.to(torch.bfloat16)
        if quantized:
            for name, module in list(model.model.named_modules()):
                if type(module) is nn.Linear:
                    kind = QUANTIZATIONS["nf4-double"]
                    features = module.in_features, module.out_features
                    model.model.set_submodule(name, kind.stand_in(module, features, torch.bfloat16))
        if rank:
            import peft

            config = peft.LoraConfig(r=rank, target_modules=_TARGETS)
            model = peft.get_peft_model(model, config, autocast_adapter_dtype=False).base_model.model
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.to(torch.bfloat16)
    return Workload(Tuned(model, chunks, offload), workload.make_batch, max_seq_len=workload.max_seq_len)


class Tuned(nn.Module):
    """A decoder with its loss over chunks of the sequence, whose logits are made first and all kept."""

    def __init__(self, model: Any, chunks: int, offload: bool) -> None:
        super().__init__()
        self.model, self.chunks, self.offload = model, chunks, offload

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        """The loss; `input_ids` and `labels` are (batch, tokens)."""
        with Offloaded() if self.offload else contextlib.nullcontext():
            hidden = self.model.model(input_ids=input_ids).last_hidden_state
        logits = [self.model.lm_head(chunk) for chunk in hidden.tensor_split(self.chunks, dim=1)]
        del hidden
        targets = labels.tensor_split(self.chunks, dim=1)
        losses: list[torch.Tensor] = []
        for each, target in zip(logits, targets, strict=True):
            rows, wanted = each.reshape(-1, each.size(-1)), target.reshape(-1)
            if self.chunks == 1:
                losses.append(functional.cross_entropy(rows.float(), wanted, reduction="sum"))
            else:
                losses.append(CompiledCrossEntropy.apply(rows, wanted))  # type: ignore[no-untyped-call]
        return torch.stack(losses).sum()


class CompiledCrossEntropy(torch.autograd.Function):
    """One chunk's loss in fp32 as Inductor fuses it: kept are the logits as they are and two numbers for each row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        largest, total = (torch.empty(logits.size(0), device=logits.device) for _ in range(2))
        ctx.save_for_backward(logits, targets, largest, total)
        return torch.empty((), device=logits.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """Saved activations wait on the CPU for the backward, but for the last few.

    Source: `OffloadActivations` in
    https://github.com/pytorch/torchtune/blob/bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1/torchtune/training/_activation_offloading.py.
    """

    def __init__(self) -> None:
        stash: deque[tuple[int, torch.Tensor]] = deque(maxlen=STASH)
        numbers = iter(range(1 << 30))

        def pack(tensor: torch.Tensor) -> Any:
            if isinstance(tensor, nn.Parameter) or tensor.device.type == "cpu" or tensor.nbytes < 1024:
                return tensor
            number = next(numbers)
            stash.append((number, tensor))
            return number, torch.empty_like(tensor, device="cpu"), tensor.device

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            number, on_cpu, device = packed
            for kept, tensor in list(stash):
                if kept == number:
                    stash.remove((kept, tensor))
                    return tensor
            return torch.empty_like(on_cpu, device=device)

        super().__init__(pack, unpack)
