"""peft's comparison of methods on Llama-3.2-3B and FLUX.2-klein: model, adapter and optimizer of each published run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
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
    """The rows of both tasks; those of the text task share one length."""
    return [_text_case(row) if row["task"] == "MetaMathQA" else _image_case(row) for row in read_rows(HERE)]


def _text_case(row: Mapping[str, str]) -> Case:
    technique = json.loads(row["peft_config"] or "{}").get("peft_type", "full")
    note = "the length was fitted on this row" if row["experiment"] == FITTED else ""
    return _case(row, "build", technique, BATCH_SIZE, LENGTH, note)


def _image_case(row: Mapping[str, str]) -> Case:
    note = f"diffusers {row['diffusers']}, torch {row['torch']}"
    return _case(row, "build_flux", "FLUX.2-klein", int(row["batch_size"]), None, note)


def _case(
    row: Mapping[str, str], builder: str, technique: str, batch_size: int, seq_len: int | None, note: str
) -> Case:
    return Case(
        name=row["experiment"],
        technique=technique,
        gpu="L40S",
        statistic=RESERVED,
        published_bytes=int(row["max_reserved_bytes"]),
        workload=WorkloadSpec(
            f"benchmarks.measured.peft.cases:{builder}",
            {
                "config": row["peft_config"],
                "optimizer": row["optimizer"],
                "autocast_adapter_dtype": row["autocast_adapter_dtype"] == "True",
            },
        ),
        step=StepConfig(precision="fp32"),  # all types are as the model was loaded, in bf16
        batch_size=batch_size,
        seq_len=seq_len,
        empties_cache=row["task"] == "image-gen",  # after the evaluation that follows each 100 steps
        note=note,
    )


def build(config: str, optimizer: str, autocast_adapter_dtype: bool) -> Workload:
    """Llama-3.2-3B in bf16 with one of peft's methods, as method_comparison/MetaMathQA/utils.py builds it."""
    from transformers import masking_utils

    # Batches of questions are padded, so that there is always a mask.
    masking_utils._ignore_causal_mask_sdpa = lambda *args, **kwargs: False
    workload = build_workload("llama-3.2-3b")
    model: Any = workload.model
    with allow_fake_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model.to(torch.bfloat16)
        model = _with_adapter(model, config, autocast_adapter_dtype)
    asked = json.loads(config or "{}")

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if optimizer == "lora-fa":
            from peft.optimizers import create_lorafa_optimizer

            made: Any = create_lorafa_optimizer(model, r=asked["r"], lora_alpha=asked["lora_alpha"], lr=1e-4)
            return made
        return ClippedAdamW(parameters, model, lr=1e-4, weight_decay=0.1)

    return Workload(model, workload.make_batch, optimizer=make_optimizer, max_seq_len=workload.max_seq_len)


def _with_adapter(model: Any, config: str, autocast_adapter_dtype: bool) -> Any:
    """The model with peft's method; itself where all of it is trained."""
    import peft

    asked = {name: value for name, value in json.loads(config or "{}").items() if name not in _TRAINED}
    if "peft_type" not in asked:
        return model
    if asked["peft_type"] == "ADALORA":
        asked.setdefault("total_step", _STEPS)
    if asked["peft_type"] == "OFT":
        asked["r"] = 0  # follows from the size of a block
    if asked.get("prompt_tuning_init") in ("TEXT", "SAMPLE_VOCAB"):
        asked["prompt_tuning_init"] = "RANDOM"  # the same tensors, without a tokenizer
    model = peft.get_peft_model(model, peft.get_peft_config(asked), autocast_adapter_dtype=autocast_adapter_dtype)
    for name, parameter in model.named_parameters():
        if "ranknum" in name:  # of AdaLoRA: no parameter that the runs trained, by their number, and one of peft 0.21's
            parameter.requires_grad_(False)
    return model


# Of FLUX.2-klein-base-4B: 5 blocks of two streams and 20 of one, 24 heads of 128, and text of three layers of Qwen3-4B.
_FLUX = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 3 * 2560,
    "guidance_embeds": False,
}
_IMAGES = 14  # that are trained on: 20 less two for validation and four for the test
_TEXT_TOKENS, _CHANNELS, _SIDE = 512, 128, 512 // 16


def build_flux(config: str, optimizer: str, autocast_adapter_dtype: bool) -> Workload:
    """FLUX.2-klein-base-4B in bf16 with one of peft's methods, as method_comparison/image-gen has it on the card.

    Raises:
        ModuleNotFoundError: diffusers is not installed.
    """
    from diffusers import Flux2Transformer2DModel

    with allow_fake_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer: Any = Flux2Transformer2DModel(**_FLUX).to(torch.bfloat16)
        transformer.enable_gradient_checkpointing()
        transformer = _with_adapter(transformer, config, autocast_adapter_dtype)
        model = FluxTraining(transformer)

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.arange(batch_size, device="cpu")

    return Workload(
        model,
        make_batch,
        optimizer=lambda parameters: ClippedAdamW(
            model.transformer.parameters(), transformer, lr=1e-4, weight_decay=1e-4
        ),
        seq_len_unit="none",
        zero_grad_after_loss=True,
    )


class FluxTraining(nn.Module):
    """What is on the card while run.py trains: the encoder of the evaluation, all texts and images, the transformer.

    The text encoder is gone by then, and the VAE is on the CPU.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        from transformers import Dinov2Config, Dinov2Model

        self.dino = Dinov2Model(Dinov2Config(image_size=518)).requires_grad_(False)  # facebook/dinov2-base, in fp32
        self.data = nn.Module()
        shapes = {
            "prompts": ((_IMAGES, _TEXT_TOKENS, 3 * 2560), torch.bfloat16),
            "text_ids": ((_IMAGES, _TEXT_TOKENS, 4), torch.int64),
            "latents": ((_IMAGES, _CHANNELS, _SIDE, _SIDE), torch.bfloat16),
        }
        for name, (shape, dtype) in shapes.items():
            self.data.register_buffer(name, torch.zeros(shape, dtype=dtype))
        self.transformer = transformer
        self.locals: tuple[torch.Tensor, ...] = ()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """The loss of the images at `indices`, (batch,); what the loop's variables hold lives to the next step.

        Patches are packed into tokens and scattered back by their positions, as diffusers' Flux2KleinPipeline does.
        """
        data: Any = self.data
        steps = [torch.arange(number, device="cpu") for number in (1, _SIDE, _SIDE, 1)]
        latents = data.latents.index_select(0, indices)
        prompts = data.prompts.index_select(0, indices)
        text_ids = data.text_ids.index_select(0, indices)
        image_ids = torch.cartesian_prod(*steps).expand(len(indices), -1, -1).to(latents.device)
        noise = torch.randn_like(latents)
        timesteps = torch.ones(len(indices)).to(latents.device)
        sigmas = torch.ones(len(indices), 1, 1, 1, dtype=latents.dtype).to(latents.device)
        packed = ((1.0 - sigmas) * latents + sigmas * noise).flatten(2).permute(0, 2, 1)
        self.transformer.zero_grad()  # run.py does it here: the new inputs are there before the old gradients go
        predicted = self.transformer(
            hidden_states=packed,
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=prompts,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        predicted = torch.stack(
            [_unpacked(*one) for one in zip(predicted[:, : packed.size(1)], image_ids, strict=True)]
        )
        weighting = torch.ones_like(sigmas)
        target = noise - latents
        each = weighting.float() * (predicted.float() - target.float()) ** 2
        self.locals = (latents, prompts, text_ids, image_ids, noise, packed, predicted, target)
        return torch.mean(each.reshape(len(indices), -1), 1).mean()


def _unpacked(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    places = ids[:, 1] * _SIDE + ids[:, 2]
    image = torch.zeros((_SIDE * _SIDE, tokens.size(1)), device=tokens.device, dtype=tokens.dtype)
    image = image.scatter(0, places.unsqueeze(1).expand(-1, tokens.size(1)), tokens)
    return image.view(_SIDE, _SIDE, -1).permute(2, 0, 1)


class ClippedAdamW(torch.optim.AdamW):
    """Clips the gradients to a norm of 1 before each step, as the run does, and lets AdaLoRA weigh its ranks after."""

    def __init__(self, parameters: Iterable[nn.Parameter], model: Any, **settings: float) -> None:
        super().__init__(parameters, **settings)
        self._weigh_ranks = getattr(model, "update_and_allocate", None)

    def step(self, closure: Any = None) -> Any:
        """Clip, step, weigh; the first of the run's steps, in which no rank is taken away yet."""
        torch.nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1.0)
        result = super().step()
        if self._weigh_ranks is not None:
            self._weigh_ranks(1)
        return result
