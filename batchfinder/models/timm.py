"""Workloads of timm's image models, with random weights: the package's only importer of timm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from batchfinder.devices.catalog import nearest
from batchfinder.errors import InvalidValue, MissingExtra, UnknownName
from batchfinder.models.build import allow_fake_weights
from batchfinder.models.catalog import TIMM
from batchfinder.models.synthetic_batches import ImageBatches
from batchfinder.models.torchvision import import_torchvision
from batchfinder.training.step import Workload

USUAL_CLASSES = 1000
"""Of a model that has none, such as one that was trained without labels: those of ImageNet."""


class Classifier(nn.Module):
    """A model of timm's with the loss of its classes, by the arguments that models of transformers have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The cross-entropy of images (batch, channels, side, side) and the indices of their classes (batch,)."""
        return {"loss": nn.functional.cross_entropy(self.model(pixel_values), labels)}

    @property
    def supports_gradient_checkpointing(self) -> bool:
        """Whether the model has it; those without refuse to have it enabled."""
        model: Any = self.model
        try:
            model.set_grad_checkpointing(True)
            model.set_grad_checkpointing(False)
        except (AssertionError, AttributeError):
            return False
        return True

    def gradient_checkpointing_enable(self) -> None:
        """Let each block, or stage, compute its activations again in the backward."""
        model: Any = self.model
        model.set_grad_checkpointing(True)


def workload_from_timm(spec: str, attention: str | None) -> Workload:
    """Build a model of timm's registry, by its name with or without the tag of its weights.

    Args:
        spec: `timm/NAME`, which is also the id of its weights on the Hub.
        attention: as in `build_workload`.

    Raises:
        MissingExtra: timm is not installed, or cannot be imported.
        UnknownName: it has no such model; the nearest names are named.
        InvalidValue: the model does not have this attention.
    """
    try:
        import_torchvision()
        import timm
        from timm import layers
    except (ImportError, RuntimeError) as error:  # the latter from a torchvision of another PyTorch
        missing = isinstance(error, ModuleNotFoundError) and error.name == "timm"
        raise MissingExtra("timm", "timm", spec, "" if missing else str(error)) from error
    name = spec.removeprefix(TIMM)
    tagged = [*timm.list_models(include_tags=True), *timm.list_models()]
    if name not in tagged:
        close = nearest(name, {each: each for each in tagged}, limit=3)
        hint = f"It is looked for in timm {timm.__version__}, which has {len(timm.list_models())} models."
        raise UnknownName("model", spec, [TIMM + each for each in close], hint)
    with _fused_attention(layers, attention), torch.random.fork_rng(devices=[]), allow_fake_weights():
        model: Any = timm.create_model(name, pretrained=False)
        has_classes = bool(model.num_classes)
        if not has_classes:
            model.reset_classifier(USUAL_CLASSES)
    if attention in ("sdpa", "flash") and not any(getattr(part, "fused_attn", False) for part in model.modules()):
        raise InvalidValue("attention", attention, f"eager, or none: {spec} has no attention with a fused kernel")
    channels, side, _ = model.pretrained_cfg["input_size"]
    batches = ImageBatches(
        num_labels=model.num_classes,
        channels=channels,
        side=side,
        resizable=not model.pretrained_cfg.get("fixed_input_size", False),
    )
    said = () if has_classes else (f"{USUAL_CLASSES} classes, where {spec} has none of its own",)
    return Workload(Classifier(model), batches, seq_len_unit="pixels", assumptions=said)


@contextmanager
def _fused_attention(layers: Any, attention: str | None) -> Iterator[None]:
    """What timm's models are told of fused attention as they are built."""
    before = layers.use_fused_attn()
    if attention is not None:
        layers.set_fused_attn(attention != "eager")
    try:
        yield
    finally:
        layers.set_fused_attn(before)
