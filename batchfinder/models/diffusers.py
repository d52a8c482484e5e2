"""Workloads of diffusers' denoisers, with random weights: the package's only importer of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfinder.errors import BatchFinderError, InvalidValue, MissingExtra
from batchfinder.models.build import allow_fake_weights
from batchfinder.models.torchvision import import_torchvision
from batchfinder.training.step import Workload

Shapes = dict[str, Any]
"""By an argument of a denoiser's forward, the shape of what it is given; of a nested argument a mapping of these."""

VAE_SCALE = 8
"""Pixels of an image for each of its latents, in both directions."""
_TIME_IDS = 6
"""Numbers that SDXL is told of an image: its size before and after, and where it was cut."""


@dataclass(frozen=True)
class Denoiser:
    """What a class of denoisers reads.

    Attributes:
        shapes: of its arguments besides the time step, by its config, the batch size, the side of the latents as it
            sees them and the tokens of text; `target` is that of what it returns.
        text_tokens: that describe an image, as diffusers' training script for it has them by default.
        side: of an image, in latents, where the config says none.
        packed: latents that are packed into one before the denoiser sees them, in both directions.
        time: the type of a time step.
    """

    shapes: Callable[[Any, int, int, int], Shapes]
    text_tokens: int
    side: int = 64
    packed: int = 1
    time: torch.dtype = torch.int64


def _unet(config: Any, batch: int, side: int, tokens: int) -> Shapes:
    text = config.cross_attention_dim
    shapes: Shapes = {
        "sample": (batch, config.in_channels, side, side),
        "encoder_hidden_states": (batch, tokens, text if isinstance(text, int) else text[0]),
        "target": (batch, config.out_channels, side, side),
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - _TIME_IDS * config.addition_time_embed_dim
        shapes["added_cond_kwargs"] = {"text_embeds": (batch, pooled), "time_ids": (batch, _TIME_IDS)}
    return shapes


def _sd3(config: Any, batch: int, side: int, tokens: int) -> Shapes:
    return {
        "hidden_states": (batch, config.in_channels, side, side),
        "encoder_hidden_states": (batch, tokens, config.joint_attention_dim),
        "pooled_projections": (batch, config.pooled_projection_dim),
        "target": (batch, config.out_channels or config.in_channels, side, side),
    }


def _flux(config: Any, batch: int, side: int, tokens: int) -> Shapes:
    patches = side**2
    shapes: Shapes = {
        "hidden_states": (batch, patches, config.in_channels),
        "encoder_hidden_states": (batch, tokens, config.joint_attention_dim),
        "pooled_projections": (batch, config.pooled_projection_dim),
        "txt_ids": (tokens, 3),
        "img_ids": (patches, 3),
        "target": (batch, patches, config.out_channels or config.in_channels),
    }
    return {**shapes, "guidance": (batch,)} if config.guidance_embeds else shapes


DENOISERS = {
    "UNet2DConditionModel": Denoiser(_unet, 77),
    "SD3Transformer2DModel": Denoiser(_sd3, 154, 128),
    "FluxTransformer2DModel": Denoiser(_flux, 512, 128, 2, torch.float32),
}
"""By the class that a config.json has as its `_class_name`."""


class DenoiserTraining(nn.Module):
    """A denoiser with its loss: the mean squared error in fp32, as diffusers' training scripts have it."""

    lora_targets = ["to_q", "to_k", "to_v", "to_out.0"]  # those of diffusers' training scripts

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
        """The loss; `target` is of the shape of what the denoiser returns."""
        predicted = self.model(**inputs, return_dict=False)[0]
        return {"loss": nn.functional.mse_loss(predicted.float(), target.float())}

    @property
    def supports_gradient_checkpointing(self) -> bool:
        """Whether the denoiser has it."""
        return bool(getattr(self.model, "_supports_gradient_checkpointing", False))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Let each block compute its activations again in the backward.

        Args:
            gradient_checkpointing_kwargs: of `torch.utils.checkpoint.checkpoint`.
        """
        model: Any = self.model
        how = gradient_checkpointing_kwargs or {"use_reentrant": False}
        model.enable_gradient_checkpointing(partial(checkpoint, **how))


@dataclass(frozen=True)
class LatentBatches:
    """`make_batch` for a denoiser of latents; the sequence length is the image's side in pixels.

    Attributes:
        denoiser: what it reads.
        config: its, of diffusers.
        side: that `None` stands for, in pixels.
        multiple: sides are multiples of this, in pixels.
        largest: the largest side, in pixels; None where there is no limit.
    """

    denoiser: Denoiser
    config: Any = field(repr=False)
    side: int = 512
    multiple: int = VAE_SCALE
    largest: int | None = None

    def __call__(self, batch_size: int, seq_len: int | None) -> dict[str, Any]:
        """Return the arguments of the denoiser, and a `target` of the shape of its output, float32.

        Raises:
            InvalidValue: the denoiser does not take images of this side.
        """
        side = self.side if seq_len is None else seq_len
        if side < self.multiple or side % self.multiple or side > (self.largest or side):
            most = "" if self.largest is None else f" up to {self.largest}"
            expected = f"an image side that is a multiple of {self.multiple} pixels{most}"
            raise InvalidValue("seq_len", side, expected)
        generator = torch.Generator(device="cpu").manual_seed(0)  # so that no generator of the user's moves

        def draw(shapes: Shapes) -> dict[str, Any]:
            return {
                name: draw(shape)
                if isinstance(shape, dict)
                else torch.rand(shape, generator=generator, device="cpu").float()
                for name, shape in shapes.items()
            }

        latents = side // (VAE_SCALE * self.denoiser.packed)
        batch = draw(self.denoiser.shapes(self.config, batch_size, latents, self.denoiser.text_tokens))
        return {**batch, "timestep": torch.full((batch_size,), 1, dtype=self.denoiser.time, device="cpu")}


def workload_from_figures(figures: dict[str, Any], what: str) -> Workload:
    """Build the denoiser that a config.json of diffusers describes.

    Args:
        figures: the file's, within bounds.
        what: the model as the user named it.

    Raises:
        MissingExtra: diffusers is not installed, or cannot be imported.
        InvalidValue: its batches are not known, or diffusers does not accept the figures.
    """
    name = figures["_class_name"]
    if name not in DENOISERS:
        expected = f"a denoiser whose batches are known ({', '.join(DENOISERS)}), or a package.module:factory"
        raise InvalidValue("model", what, f"{expected}; it is a {name}")
    try:
        import_torchvision()
        import diffusers
    except (ImportError, RuntimeError) as error:  # the latter from a torchvision of another PyTorch
        missing = isinstance(error, ModuleNotFoundError) and error.name == "diffusers"
        raise MissingExtra("diffusers", "diffusers", what, "" if missing else str(error)) from error
    with ExitStack() as stack:
        stack.callback(diffusers.utils.logging.set_verbosity, diffusers.utils.logging.get_verbosity())
        diffusers.utils.logging.set_verbosity_error()
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(allow_fake_weights())
        try:
            model = getattr(diffusers, name).from_config(figures)
        except BatchFinderError:
            raise
        except Exception as error:  # the library checks figures with exceptions of every kind
            said = " ".join(str(error).split()) or type(error).__name__
            raise InvalidValue("model", what, f"figures that diffusers accepts ({said})") from error
    denoiser, config = DENOISERS[name], model.config
    latents, patches = config.get("sample_size") or denoiser.side, config.get("pos_embed_max_size")
    multiple = VAE_SCALE * denoiser.packed * config.get("patch_size", 1)
    batches = LatentBatches(
        denoiser,
        config,
        side=VAE_SCALE * (latents if isinstance(latents, int) else max(latents)),
        multiple=multiple,
        largest=None if patches is None else patches * multiple,
    )
    said = f"latents and {denoiser.text_tokens} tokens of text are encoded: VAE and text encoders are not on the GPU"
    return Workload(DenoiserTraining(model), batches, seq_len_unit="pixels", assumptions=(said,))
