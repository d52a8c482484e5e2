"""Tests of batchfinder/models/diffusers.py, in processes of their own that have diffusers beside this environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.models.build import build_workload
from batchfinder.models.catalog import denoisers, find_model
from tests.models.beside import FOLDER, answers, with_package

Ask = Callable[..., Any]
pytestmark = pytest.mark.cuda_build

ASK = """
from batchfinder.errors import BatchFinderError
from batchfinder.models import build_workload
from batchfinder.recording.fake_device import FakeDeviceMode

def shapes(given):
    return {
        name: shapes(each) if isinstance(each, dict) else [*each.shape, str(each.dtype)] for name, each in given.items()
    }

def ask(spec, sides, **options):
    with FakeDeviceMode(allow_non_fake_inputs=True):
        workload = build_workload(spec, **options)
    batches, model = workload.make_batch, workload.model
    found = {"side": batches.side, "shapes": [], "said": list(workload.assumptions)}
    for side in sides:
        try:
            found["shapes"].append(shapes(batches(2, side)))
        except BatchFinderError as error:
            found["shapes"].append(str(error))
    found["parameters"] = sum(each.numel() for each in model.parameters())
    found["trained"] = sum(each.numel() for each in model.parameters() if each.requires_grad)
    found["checkpointed"] = sum(bool(getattr(each, "gradient_checkpointing", False)) for each in model.modules())
    found["quantized"] = sum(type(each).__name__ == "Linear4bit" for each in model.modules())
    return found
"""


@pytest.fixture(scope="module")
def ask() -> Ask:
    """What denoisers are, and their batches, each question asked of one process."""
    return partial(answers, "diffusers", ASK)


PUBLISHED = {
    "stable-diffusion-1.5": (859_520_964, 512),
    "sdxl": (2_567_463_684, 1024),
    "stable-diffusion-3-medium": (2_028_328_000, 1024),
    "flux.1-dev": (11_901_408_320, 1024),
}
"""Parameters, and the images that they are made for. The first is in the documentation of `num_parameters`."""


@pytest.mark.exhaustive
def test_they_are_the_published_models(ask: Ask) -> None:
    """As many parameters as published, and images of the size that each is made for."""
    assert [row.name for row in denoisers()] == list(PUBLISHED)
    found = ask(*((name, [], {}) for name in PUBLISHED))
    assert [(each["parameters"], each["side"]) for each in found] == list(PUBLISHED.values())


def test_every_row_has_its_source() -> None:
    """Each names the published config.json that its figures repeat, and is found by its repository."""
    for row in denoisers():
        part = "unet" if row.architecture.startswith("UNet") else "transformer"
        assert row.source == f"https://huggingface.co/{row.published}/blob/main/{part}/config.json"
        assert find_model(row.published) is row


@pytest.mark.exhaustive
def test_batches(ask: Ask) -> None:
    """Latents are an eighth of the image; Flux sees 2 x 2 of them as one token, with a position each."""
    sd, xl, sd3, flux = ask(
        ("sd-1.5", [None, 768, 500], {}), ("sdxl", [None], {}), ("sd3-medium", [512, 4096], {}), ("flux-dev", [512], {})
    )
    whole, moment = "torch.float32", "torch.int64"
    assert sd["shapes"][0] == {
        "sample": [2, 4, 64, 64, whole],
        "encoder_hidden_states": [2, 77, 768, whole],
        "target": [2, 4, 64, 64, whole],
        "timestep": [2, moment],
    }
    assert sd["shapes"][1]["sample"] == [2, 4, 96, 96, whole]
    assert sd["shapes"][2].endswith("expected an image side that is a multiple of 8 pixels.")
    assert sd["said"] == ["latents and 77 tokens of text are encoded: VAE and text encoders are not on the GPU"]
    assert xl["shapes"][0]["added_cond_kwargs"] == {"text_embeds": [2, 1280, whole], "time_ids": [2, 6, whole]}
    assert sd3["shapes"][0]["hidden_states"] == [2, 16, 64, 64, whole]
    assert sd3["shapes"][1].endswith("expected an image side that is a multiple of 16 pixels up to 3072.")
    assert flux["shapes"][0] == {
        "hidden_states": [2, 1024, 64, whole],
        "encoder_hidden_states": [2, 512, 4096, whole],
        "pooled_projections": [2, 768, whole],
        "txt_ids": [512, 3, whole],
        "img_ids": [1024, 3, whole],
        "target": [2, 1024, 64, whole],
        "guidance": [2, whole],
        "timestep": [2, whole],
    }


@pytest.mark.exhaustive
def test_options(ask: Ask) -> None:
    """LoRA on the layers of diffusers' scripts, as published of SDXL at rank 4; checkpointing; 4-bit weights."""
    adapted, full, selective, quantized = ask(
        ("sdxl", [], {"lora": 4}),
        ("stable-diffusion-1.5", [], {"gradient_checkpointing": True}),
        ("flux-dev", [], {"gradient_checkpointing": "selective"}),
        ("flux-dev", [], {"lora": 16, "quantization": "nf4", "precision": "bf16-mixed"}),
    )
    assert adapted["trained"] == 5_806_080
    assert full["checkpointed"] > 4
    assert selective["checkpointed"] == 1
    assert quantized["quantized"] > 19 + 38


TINY = {
    "_class_name": "FluxTransformer2DModel",
    "num_layers": 1,
    "num_single_layers": 2,
    "num_attention_heads": 8,
    "joint_attention_dim": 512,
}


@pytest.mark.exhaustive
def test_folders_and_files(ask: Ask, tmp_path: Path) -> None:
    """A config.json, its folder, and that of a pipeline; a class that is not known, and figures that are wrong."""
    part = tmp_path / "pipeline" / "transformer"
    part.mkdir(parents=True)
    (part.parent / "model_index.json").write_text("{}")
    (part / "config.json").write_text(json.dumps(TINY))
    vae, wrong = tmp_path / "vae.json", tmp_path / "wrong.json"
    vae.write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    wrong.write_text(json.dumps({**TINY, "num_attention_heads": "many"}))
    file, folder, pipeline, other, bad, eager = ask(
        *((str(path), [], {}) for path in (part / "config.json", part, part.parent, vae, wrong)),
        (str(part), [], {"attention": "eager"}),
    )
    assert file["parameters"] == folder["parameters"] == pipeline["parameters"] > 1 << 20
    assert "expected a denoiser whose batches are known (UNet2DConditionModel, " in other
    assert "it is a AutoencoderKL" in other
    assert "expected figures that diffusers accepts (" in bad
    assert f"expected sdpa, flash or none, which diffusers has for {part}" in eager


def train(folder: str, path: str, batch_size: int, side: int) -> tuple[int, int]:
    """Two steps on a real card: most allocated and most reserved."""
    import torch

    sys.path.insert(0, folder)
    from batchfinder.models import build_workload
    from batchfinder.training.spec import StepConfig
    from batchfinder.training.step import Step

    workload = build_workload(path)
    device = torch.device("cuda", 0)
    workload.model.to(device)
    Step(workload, StepConfig(), device).run(batch_size, side)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.exhaustive
def test_a_simulated_step_is_the_real_one(cuda_stub: Any, tmp_path: Path) -> None:
    """PyTorch's CUDA build takes to 2 % what the recording says."""
    environ = with_package("diffusers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    real = cuda_stub(gpu="A10").run(train, FOLDER, str(file), 4, 256).result
    command = [sys.executable, "-m", "batchfinder", "estimate", "--model", str(file), "--gpu", "a10", "--json"]
    done = subprocess.run(
        [*command, "--batch-size", "4", "--seq-len", "256"], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["allocated_bytes"], found["reserved_bytes"]) == pytest.approx(real, rel=0.02)


def test_without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named, with the extra."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtra, match=r"sdxl needs diffusers, .*torch-batchfinder\[diffusers\]"):
        build_workload("sdxl")
    with pytest.raises(InvalidValue, match="expected sdpa, flash or none, which diffusers has for sdxl"):
        build_workload("sdxl", attention="eager")
