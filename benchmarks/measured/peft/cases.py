"""peft's comparison of methods on Llama-3.2-3B: the model, the adapter and the optimizer of each published run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfinder.models.build import allow_fake_weights, build_workload
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.training.step import Workload
from benchmarks.measured.case import RESERVED, Case, read_rows

HERE = Path(__file__).parent
LENGTH = 704
"""Tokens of the longest batch, which was not published: fitted on the row in `FITTED`, and the same for every other."""

FITTED = "lora/llama-3.2-3B-rank32"
BATCH_SIZE = 4
_STEPS = 5000
_TRAINED = {"rank_pattern", "ranknum"}  # what AdaLoRA writes into its configuration as it trains


def cases() -> list[Case]:
    """The rows of the text task; the length is shared by all of them."""
    return [
        Case(
            name=row["experiment"],
            technique=json.loads(row["peft_config"] or "{}").get("peft_type", "full"),
            gpu="L40S",
            statistic=RESERVED,
            published_bytes=int(row["max_reserved_bytes"]),
            workload=WorkloadSpec(
                "benchmarks.measured.peft.cases:build",
                {
                    "config": row["peft_config"],
                    "optimizer": row["optimizer"],
                    "autocast_adapter_dtype": row["autocast_adapter_dtype"] == "True",
                },
            ),
            step=StepConfig(precision="fp32"),  # all types are as the model was loaded, in bf16
            batch_size=BATCH_SIZE,
            seq_len=LENGTH,
            note="the length was fitted on this row" if row["experiment"] == FITTED else "",
        )
        for row in read_rows(HERE)
        if row["task"] == "MetaMathQA"
    ]


def build(config: str, optimizer: str, autocast_adapter_dtype: bool) -> Workload:
    """Llama-3.2-3B in bf16 with one of peft's methods, as method_comparison/MetaMathQA/utils.py builds it."""
    import peft
    from transformers import masking_utils

    # Batches of questions are padded, so that there is always a mask.
    masking_utils._ignore_causal_mask_sdpa = lambda *args, **kwargs: False
    workload = build_workload("llama-3.2-3b")
    model: Any = workload.model
    with allow_fake_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model.to(torch.bfloat16)
        asked = {name: value for name, value in json.loads(config or "{}").items() if name not in _TRAINED}
        if "peft_type" in asked:
            if asked["peft_type"] == "ADALORA":
                asked["total_step"] = _STEPS
            if asked["peft_type"] == "OFT":
                asked["r"] = 0  # follows from the size of a block
            if asked.get("prompt_tuning_init") in ("TEXT", "SAMPLE_VOCAB"):
                asked["prompt_tuning_init"] = "RANDOM"  # the same tensors, without a tokenizer
            model = peft.get_peft_model(
                model, peft.get_peft_config(asked), autocast_adapter_dtype=autocast_adapter_dtype
            )

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if optimizer == "lora-fa":
            from peft.optimizers import create_lorafa_optimizer

            made: Any = create_lorafa_optimizer(model, r=asked["r"], lora_alpha=asked["lora_alpha"], lr=1e-4)
            return made
        return ClippedAdamW(parameters, lr=1e-4, weight_decay=0.1)

    return Workload(model, workload.make_batch, optimizer=make_optimizer, max_seq_len=workload.max_seq_len)


class ClippedAdamW(torch.optim.AdamW):
    """Clips the gradients to a norm of 1 before each step, as the run does."""

    def step(self, closure: Any = None) -> Any:
        """Clip, then step."""
        torch.nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1.0)
        return super().step(closure)
