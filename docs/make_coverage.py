"""Writes coverage.md from benchmarks/results: `python docs/make_coverage.py`. A test keeps it up to date."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("coverage.md")
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "coverage-2-cores.json"

HEAD = """\
# Models

Which models can be simulated from nothing but a config or a factory.

## transformers

`--model path/to/config.json` takes the head that the config names in `architectures`. These are all model types of
transformers {transformers} with a head that is trained. Each was built from its default config at a depth of two
layers, and two steps were recorded on the fake GPU in bf16-mixed and in bf16-true, with torch {torch}. Both must
succeed: **{works} of {all} ({share:.1%})**. `python benchmarks/coverage.py` recorded the figures on this page.

What a model reads besides text is made from its config: one image for each sample, of the size that the config names,
or 30 seconds of speech beside text (10 seconds where a model reads no text and no length was asked for). The image's or
the recording's placeholders count as tokens of the sequence, and `--explain` says how many there are. Where a default
config contradicts itself, so that no machine could train the model, `benchmarks/coverage.toml` has what it needs.

| trained for | types | work |
| --- | ---: | ---: |
"""

MIDDLE = """
These do not work from their default config:

| type | class | reason |
| --- | --- | --- |
"""

TAIL = """
## Mixtures of experts

A router's choice has no value on the fake GPU: every expert is taken to be chosen by the same number of tokens, and
`--explain` says so. Routing that is less even changes nothing where transformers multiplies all experts at once
(`grouped_mm`, its default where the model has it): the tokens are sorted by expert, and the tensors are as large as all
tokens together, whoever gets them. In a loop over experts (`experts_implementation="eager"`) each expert's activations
are as large as its share, and all are kept for the backward: their sum is the same. Only what is alive inside the one
expert at work is larger in a busy one. A test records a Mixtral both ways, evenly routed and with all tokens sent to
the same two experts, and compares the peaks. Where each expert has a fixed capacity, the capacity decides.

## timm

`--model timm/NAME` is any model of [timm](https://huggingface.co/docs/timm)'s registry (`pip install
torch-batchfinder[timm]`), with or without the tag of its weights: the id of a repository of timm's on the Hub,
`timm/vit_base_patch16_224.augreg_in21k`, is one too. Nothing is downloaded. It is trained on images with the
cross-entropy of its classes (1000 where it has none of its own, which `--explain` says). `--seq-len` is the side of the
images in pixels; without it they are of the model's own size. What has a table of positions takes that size alone: timm
has models for others, such as `vit_base_patch16_384`.

```console
$ batchfinder sweep --model timm/convnext_base --gpu t4 --gpu l4 --precision 16-mixed --gradient-checkpointing
Largest training batch, simulated
16-mixed, adamw, gradient checkpointing
usable: 14.44 GiB of T4, 21.78 GiB of L4
recorder: fake device, PyTorch 2.13.0+cpu

model               GPU  seq len  max batch  peak reserved  source
─────────────────────────────────────────────────────────────────────
timm/convnext_base  T4       224        502      14.44 GiB  simulated
timm/convnext_base  L4       224        785      21.76 GiB  simulated

3 assumptions; --explain lists them
```

`--gradient-checkpointing` is timm's `set_grad_checkpointing`, `--attention eager` its `set_fused_attn(False)`, and
`--lora 8 --lora-targets qkv,proj` gives adapters to layers by name. Parameters are counted against torchvision's
documentation of the same models (a test).

## diffusers

`--model` takes denoisers that people fine-tune (`pip install torch-batchfinder[diffusers]`), by a name, by the id of
their pipeline on the Hub, or by a `config.json`, its folder or that of a pipeline: those of the classes
`UNet2DConditionModel`, `SD3Transformer2DModel` and `FluxTransformer2DModel`. Four need nothing but their name, and have
as many parameters as published (a test): `stable-diffusion-1.5`, `sdxl`, `stable-diffusion-3-medium` and `flux.1-dev`.

```console
$ batchfinder sweep --model sd-1.5 --model sdxl --gpu rtx-4090 --lora 16 --precision bf16-true --gradient-checkpointing
Largest training batch on RTX 4090, simulated
bf16-true, adamw, LoRA of rank 16, gradient checkpointing
23.08 GiB usable
recorder: fake device, PyTorch 2.13.0+cpu

model   seq len  max batch  peak reserved  source
────────────────────────────────────────────────────
sd-1.5      512         82      23.01 GiB  simulated
sdxl       1024         29      22.64 GiB  simulated

3 assumptions; --explain lists them
```

A step is that of diffusers' training scripts: the mean squared error of what is predicted from latents, a time step and
encoded text. Latents and text are taken to be encoded before, so that the VAE and the text encoders are not on the GPU;
`--explain` says so. `--seq-len` is the side of the image in pixels, eight for each latent. `--lora` without
`--lora-targets` is on the layers that the scripts have (`to_q`, `to_k`, `to_v`, `to_out.0`), and `--quantization nf4`
holds all linear layers in 4 bits, as diffusers does.

## Others of diffusers, torchvision

A factory wraps the model, and says what a batch is:

```python
import diffusers, timm, torch, torchvision
from batchfinder import Workload


class Classifier(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, pixels, labels):
        return torch.nn.functional.cross_entropy(self.net(pixels), labels)


def images(batch_size, side):
    side = side or 224
    return torch.rand(batch_size, 3, side, side), torch.randint(1000, (batch_size,))


def convnext():
    return Workload(Classifier(torchvision.models.convnext_tiny()), images, seq_len_unit="pixels")


def vit():
    return Workload(Classifier(timm.create_model("vit_small_patch16_224")), images, seq_len_unit="pixels")


def unet():
    def batch(batch_size, _):
        return {
            "sample": torch.rand(batch_size, 4, 64, 64),
            "timestep": torch.randint(1000, (batch_size,)),
            "encoder_hidden_states": torch.rand(batch_size, 77, 768),
        }

    return Workload(diffusers.UNet2DConditionModel(cross_attention_dim=768), batch, seq_len_unit="none")


def dit():
    def batch(batch_size, _):
        return {
            "hidden_states": torch.rand(batch_size, 4, 32, 32),
            "timestep": torch.randint(1000, (batch_size,)),
            "class_labels": torch.randint(1000, (batch_size,)),
        }

    return Workload(diffusers.DiTTransformer2DModel(), batch, seq_len_unit="none")
```

```console
$ batchfinder sweep --model my_models:unet --gpu l40s --precision bf16-mixed
```

The loss of a model that computes none is the mean of its output; give `Workload(loss=...)` for another. Tried with
diffusers 0.42.1 (UNet2DModel, UNet2DConditionModel, AutoencoderKL, the DiT, Stable Diffusion 3's and Flux'
transformers), torchvision 0.28.0 (17 architectures) and timm 1.0.31 (20): all are recorded without real weights.
"""


def page() -> str:
    """The page's text."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    rows: dict[str, Any] = result["types"]
    tasks = Counter(row["task"] for row in rows.values())
    works = Counter(row["task"] for row in rows.values() if "failed" not in row)
    lines = [HEAD.format(**result["versions"], works=works.total(), all=len(rows), share=works.total() / len(rows))]
    lines += [f"| {task} | {count} | {works[task]} |\n" for task, count in sorted(tasks.items())]
    lines.append(MIDDLE)
    for model_type, row in rows.items():
        if "failed" in row:
            precision, said = next(iter(row["failed"].items()))
            said = said.replace("|", "\\|").replace("<", "&lt;")
            only = f"{precision} only: " if len(row["failed"]) == 1 and precision != "config" else ""
            lines.append(f"| {model_type} | {row['architecture']} | {only}{said} |\n")
    return "".join([*lines, TAIL])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
