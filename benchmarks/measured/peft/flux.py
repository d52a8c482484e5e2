"""FLUX.2-klein with one of peft's methods, and what method_comparison/image-gen/run.py does before it trains.

What a run reserves depends on what was on the card before: the texts and images that are kept lie in memory that their
encoders have left, so that it is not given back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from batchfinder.models.build import allow_fake_weights
from batchfinder.recording.fake_device import fake_copy, move_module
from batchfinder.training.step import Workload
from benchmarks.measured.peft.cases import ClippedAdamW, offload_replaced_weights, with_adapter

# Of FLUX.2-klein-base-4B: 5 blocks of two streams and 20 of one, 24 heads of 128, and text of three layers of Qwen3-4B.
TRANSFORMER = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 3 * 2560,
    "guidance_embeds": False,
}
TEXT_ENCODER = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_TEXT_LAYERS = (10, 20, 30)
_IMAGES = 14  # that are trained on: 20 less two for validation and four for the test
_IMAGES_AT_ONCE, _TEXT_TOKENS, _PIXELS = 2, 512, 512
_SIDE = _PIXELS // 16


def build(config: str, optimizer: str, autocast_adapter_dtype: bool) -> Workload:
    """FLUX.2-klein-base-4B in bf16 with one of peft's methods.

    Raises:
        ModuleNotFoundError: diffusers is not installed.
    """
    from diffusers import Flux2Transformer2DModel

    with allow_fake_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer: Any = Flux2Transformer2DModel(**TRANSFORMER).to(torch.bfloat16)
        transformer.enable_gradient_checkpointing()
        model = FluxTraining(with_adapter(transformer, config, autocast_adapter_dtype))

    def make_optimizer(_: Any) -> torch.optim.Optimizer:
        model.encode_data()  # the step asks for its optimizer when the model is on the card
        trained = model.transformer
        offload_replaced_weights(trained)
        return ClippedAdamW(trained.parameters(), trained, lr=1e-4, weight_decay=1e-4)

    return Workload(
        model,
        lambda batch_size, seq_len: torch.arange(batch_size, device="cpu"),
        optimizer=make_optimizer,
        seq_len_unit="none",
        zero_grad_after_loss=True,
    )


class FluxTraining(nn.Module):
    """What is on the card while run.py trains: the encoder of the evaluation, the transformer, all texts and images.

    The text encoder and the VAE are on the CPU by then.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        from diffusers import AutoencoderKLFlux2
        from transformers import Dinov2Config, Dinov2Model, Qwen3Config, Qwen3ForCausalLM

        self.dino = Dinov2Model(Dinov2Config(image_size=518)).requires_grad_(False)  # facebook/dinov2-base, in fp32
        self.transformer = transformer
        self.data: Any = nn.Module()
        self.held: dict[str, torch.Tensor] = {}
        text_encoder = Qwen3ForCausalLM(Qwen3Config(**TEXT_ENCODER)).to(torch.bfloat16)
        self._encoders: list[Any] = [text_encoder, AutoencoderKLFlux2().to(torch.bfloat16)]  # no modules of its own

    def encode_data(self) -> None:
        """Encode all texts and images, each encoder on the card only while it does.

        The third and later ones find the memory that the second had: it is enough to take theirs.
        """
        text_encoder, vae = self._encoders
        device = next(self.dino.parameters()).device
        with torch.no_grad():
            with _on(device, text_encoder):
                texts = [_encoded_text(text_encoder, device) for _ in range(2)]
                texts += [(texts[0][0].clone(), texts[0][1].clone()) for _ in range(_IMAGES - len(texts))]
            self.data.register_buffer("prompts", torch.cat([prompt for prompt, _ in texts]))
            self.data.register_buffer("text_ids", torch.cat([ids for _, ids in texts]))
            del texts
            with _on(device, vae):
                latents = [_encoded_images(vae, device) for _ in range(2)]
                latents += [latents[0].clone() for _ in range(_IMAGES // _IMAGES_AT_ONCE - len(latents))]
            self.data.register_buffer("latents", torch.cat(latents))
        self._encoders.clear()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """The loss of the images at `indices`, (batch,).

        What the loop's variables hold lives until the next step assigns to them, one after the other. Patches are
        packed into tokens and scattered back by their positions, as diffusers' Flux2KleinPipeline does.
        """
        data, held = self.data, self.held
        steps = [torch.arange(number, device="cpu") for number in (1, _SIDE, _SIDE, 1)]
        held["latents"] = data.latents.index_select(0, indices)
        held["prompts"] = data.prompts.index_select(0, indices)
        held["text_ids"] = data.text_ids.index_select(0, indices)
        latents = held["latents"]
        image_ids = torch.cartesian_prod(*steps).expand(len(indices), -1, -1).to(latents.device)
        held["image_ids"] = image_ids
        held["noise"] = torch.randn_like(latents)
        held["timesteps"] = torch.ones(len(indices)).to(latents.device)
        held["sigmas"] = sigmas = torch.ones(len(indices), 1, 1, 1, dtype=latents.dtype).to(latents.device)
        held["noisy"] = (1.0 - sigmas) * latents + sigmas * held["noise"]
        held["packed"] = held["noisy"].flatten(2).permute(0, 2, 1)
        self.transformer.zero_grad()  # run.py does it here: the new inputs are there before the old gradients go
        held["predicted"] = self.transformer(
            hidden_states=held["packed"],
            timestep=held["timesteps"] / 1000,
            guidance=None,
            encoder_hidden_states=held["prompts"],
            txt_ids=held["text_ids"],
            img_ids=image_ids,
            return_dict=False,
        )[0]
        held["predicted"] = held["predicted"][:, : _SIDE * _SIDE]
        held["predicted"] = torch.stack([_unpacked(*one) for one in zip(held["predicted"], image_ids, strict=True)])
        held["weighting"] = torch.ones_like(sigmas)
        held["target"] = held["noise"] - latents
        each = held["weighting"].float() * (held["predicted"].float() - held["target"].float()) ** 2
        return torch.mean(each.reshape(len(indices), -1), 1).mean()


@contextmanager
def _on(device: torch.device, module: nn.Module) -> Iterator[None]:
    """Within it a module is on the card: `offload_models` of diffusers."""
    move_module(module, lambda tensor, dtype: fake_copy(tensor, device, dtype))
    try:
        yield
    finally:
        cpu = torch.device("cpu")
        move_module(module, lambda tensor, dtype: fake_copy(tensor, cpu, dtype))


def _encoded_text(text_encoder: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's (1, tokens, 3 x width), and its tokens' positions; as `encode_prompt` of Flux2KleinPipeline."""
    ids = torch.zeros(1, _TEXT_TOKENS, dtype=torch.int64).to(device)
    mask = torch.ones(1, _TEXT_TOKENS, dtype=torch.int64).to(device)
    output = text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    layers = torch.stack([output.hidden_states[layer] for layer in _TEXT_LAYERS], dim=1)
    prompt = layers.permute(0, 2, 1, 3).reshape(1, _TEXT_TOKENS, -1)
    return prompt.repeat(1, 1, 1), torch.zeros(1, _TEXT_TOKENS, 4, dtype=torch.int64).to(device)


def _encoded_images(vae: Any, device: torch.device) -> torch.Tensor:
    """Two images' latents in patches of 2 x 2, (2, channels, side, side)."""
    pixels = torch.zeros(_IMAGES_AT_ONCE, 3, _PIXELS, _PIXELS, dtype=torch.bfloat16, device=device)
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + 1e-4)
    latents = vae.encode(pixels).latent_dist.mode().view(_IMAGES_AT_ONCE, -1, _SIDE, 2, _SIDE, 2)
    return (latents.permute(0, 1, 3, 5, 2, 4).reshape(_IMAGES_AT_ONCE, -1, _SIDE, _SIDE) - mean) / deviation


def _unpacked(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    places = ids[:, 1] * _SIDE + ids[:, 2]
    image = torch.zeros((_SIDE * _SIDE, tokens.size(1)), device=tokens.device, dtype=tokens.dtype)
    image = image.scatter(0, places.unsqueeze(1).expand(-1, tokens.size(1)), tokens)
    return image.view(_SIDE, _SIDE, -1).permute(2, 0, 1)
