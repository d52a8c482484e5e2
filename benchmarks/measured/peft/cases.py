"""peft's comparison of methods on Llama-3.2-3B and FLUX.2-klein: model, adapter and optimizer of each published run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfinder.models.build import allow_fake_weights, build_workload
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.training.step import Workload
from benchmarks.measured.case import RESERVED, Case, read_rows

HERE = Path(__file__).parent
LENGTH = 705
"""Tokens of the longest batch, which was not published: fitted on the row in `FITTED`, and the same for every other."""

FITTED = "lora/llama-3.2-3B-rank32"
BATCH_SIZE = 4
_STEPS = 5000
_EVALUATIONS = 7  # of FLUX.2-klein, one after each 100 of 750 steps; each empties the cache at its end
_FULL = "hra/flux2-klein-default"
_LEFT_BYTES = 342_884_352
"""What the run in `_FULL` reserved leaves of the card's 47,704,965,120 bytes: the CUDA context took no more."""

_WHY = {
    "fourierft": "right after the first 100 steps; in them the run took 0.5 GB more, most of it in the 7th or so",
    "lily": "right after the first 100 steps; in them the run took 0.3 GB more, as with other addresses of segments",
    "glora": "-0.4 % with rising addresses of segments",
    "waveft": "-0.1 % with rising addresses of segments; the run has two levels, of which this is the lower",
    "hra": "the card was full: ours runs with a CUDA context of up to 365 MB, and the catalogue says 440 MB",
}

_TRAINED = {"rank_pattern", "ranknum"}  # what AdaLoRA writes into its configuration as it trains


def cases() -> list[Case]:
    """The rows of both tasks; those of the text task share one length."""
    return [_text_case(row) if row["task"] == "MetaMathQA" else _image_case(row) for row in read_rows(HERE)]


def _text_case(row: Mapping[str, str]) -> Case:
    technique = json.loads(row["peft_config"] or "{}").get("peft_type", "full")
    note = "the length was fitted on this row" if row["experiment"] == FITTED else ""
    if row["experiment"].startswith("fourierft"):
        note = "+0.5 % with one token less: a tensor of the MLP is 44 MiB then, and takes 46 here"
    return _case(row, "cases:build", technique, BATCH_SIZE, LENGTH, note)


def _image_case(row: Mapping[str, str]) -> Case:
    note = _WHY.get(row["experiment"].partition("/")[0], f"diffusers {row['diffusers']}, torch {row['torch']}")
    return _case(row, "flux:build", "FLUX.2-klein", int(row["batch_size"]), None, note)


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
            f"benchmarks.measured.peft.{builder}",
            {
                "config": row["peft_config"],
                "optimizer": row["optimizer"],
                "autocast_adapter_dtype": row["autocast_adapter_dtype"] == "True",
            },
        ),
        step=StepConfig(precision="fp32"),  # all types are as the model was loaded, in bf16
        batch_size=batch_size,
        seq_len=seq_len,
        empties_cache=_EVALUATIONS if row["task"] == "image-gen" else 1,
        comes_later=row["task"] != "image-gen",
        other_contexts=(_LEFT_BYTES,) if row["experiment"] == _FULL else (),
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
        model = with_adapter(model, config, autocast_adapter_dtype)
    asked = json.loads(config or "{}")

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made: Any
        if optimizer == "lora-fa":
            from peft.optimizers import create_lorafa_optimizer

            made = create_lorafa_optimizer(model, r=asked["r"], lora_alpha=asked["lora_alpha"], lr=1e-4)
        else:
            made = ClippedAdamW(parameters, model, lr=1e-4, weight_decay=0.1)
        if asked:
            # run.py asks for the loss without the adapter before it trains. What peft turns on again after that is all
            # of the adapter, also what LoRA-FA's optimizer has frozen.
            with model.disable_adapter():
                pass
        for module in model.modules():
            _as_built_on_the_card(module)
        return made

    return Workload(model, workload.make_batch, optimizer=make_optimizer, max_seq_len=workload.max_seq_len)


def _as_built_on_the_card(module: Any) -> None:
    """Put right where an adapter's tensors lie, since peft makes it on the card there, and on the CPU here.

    The first rows of PSoft's singular vectors keep all of them: on CUDA they lie row by row, so that `contiguous()` of
    some copies nothing, on a CPU by columns (`_linalg_svd_meta` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_meta_registrations.py). BOFT's permutations, and FRoD's
    factors and places, are made on the CPU and nothing moves them, so that each layer copies FRoD's in each forward.
    """
    for name, mode in getattr(module, "psoft_svd", {}).items():
        rows = module._psoft_A_cache[name]
        if mode == "full":
            whole = torch.empty(min(module.in_features, module.out_features), rows.size(1), device=rows.device)
            module._psoft_A_cache[name] = whole[: rows.size(0)]
    if hasattr(module, "boft_P"):
        module.boft_P = torch.empty_like(module.boft_P, device="cpu")
    if hasattr(module, "frod_U"):
        for factors in (module.frod_U, module.frod_V, module.frod_s_indices):
            for name, factor in factors.items():
                factors[name] = torch.empty_like(factor, device="cpu")


def offload_replaced_weights(model: nn.Module) -> None:
    """Leave the weights that FRoD's own replace on the CPU, if it is asked to, for a model that is on the card.

    FRoD does it by assigning to a weight's `data`, which cannot be a fake tensor of another device.
    """
    for module in model.modules():
        if any(getattr(module, "runtime_offload_base_weight", {}).values()):
            _offload(module)


def _offload(layer: Any) -> None:
    weight = layer.base_layer.weight
    if weight.device.type != "cpu":
        layer.base_layer.weight = nn.Parameter(torch.empty(weight.shape, device="cpu"), requires_grad=False)


def with_adapter(model: Any, config: str, autocast_adapter_dtype: bool) -> Any:
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
    from peft.tuners.frod.layer import Linear as FrodLinear

    settings: Any = peft.get_peft_config(asked)
    if asked["peft_type"] == "SHIRA":
        settings.mask_fn = None  # which would choose places by values
    with _without_values():
        model = peft.get_peft_model(model, settings, autocast_adapter_dtype=autocast_adapter_dtype)
    FrodLinear._offload_base_weight_to_cpu = _offload
    for module in model.modules() if asked["peft_type"] == "SHIRA" else ():
        for name, weight in getattr(module, "shira_weight", {}).items():
            module.shira_indices[name] = torch.zeros(2, weight.numel(), dtype=torch.int32)
    for name, parameter in model.named_parameters():
        if "ranknum" in name:  # of AdaLoRA: no parameter that the runs trained, by their number, and one of peft 0.21's
            parameter.requires_grad_(False)
    return model


@contextmanager
def _without_values() -> Iterator[None]:
    """Let methods of peft 0.21 be built that read weights, or fill matrices by element: shapes are all that counts."""
    from peft.tuners._buffer_dict import BufferDict
    from peft.tuners.boft import layer as boft
    from peft.tuners.frod.layer import FrodLayer
    from peft.tuners.frod.layer import Linear as FrodLinear
    from peft.tuners.frod.model import FrodModel, _category_from_key

    def make_projections(model: Any, config: Any, adapter: str) -> None:
        """For each kind of layer a square matrix and the places of a sparse one; as `_init_frod_projections`."""
        model.frod_V, model.frod_s_indices, model.frod_s_size = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        for name, module in model.model.named_modules():
            if isinstance(module, nn.Linear) and model._check_target_module_exists(config, name):
                kind, width = _category_from_key(name), module.in_features
                places = max(1, int(width * width * config.sparse_rate))
                for store, tensor in (
                    (model.frod_V, torch.zeros(width, width, dtype=module.weight.dtype)),
                    (model.frod_s_indices, torch.zeros(2, places, dtype=torch.int64)),
                    (model.frod_s_size, torch.tensor([width, width])),
                ):
                    store[kind] = BufferDict({adapter: tensor}, persistent=False)

    replaced: dict[tuple[Any, str], Any] = {
        # The runs had no compiler for BOFT's extension, by the number of their parameters, and each layer asks again.
        (boft, "get_fbd_cuda"): lambda: None,
        (boft.BOFTLayer, "perm2mat"): lambda layer, indices: torch.zeros(len(indices), len(indices)),
        (FrodModel, "_init_frod_projections"): make_projections,
        (FrodLinear, "_offload_base_weight_to_cpu"): lambda layer: None,
        (FrodLayer, "_calculate_frod_u_and_lambda"): lambda layer, v, w: (w.float(), torch.zeros(w.size(1))),
    }
    kept = {(owner, name): getattr(owner, name) for owner, name in replaced}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in kept.items():
            setattr(owner, name, value)


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
