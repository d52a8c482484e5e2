"""Tests of batchfinder/models/timm.py, in processes of their own that have timm beside this environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from batchfinder.errors import MissingExtra
from batchfinder.models.catalog import check_model_name
from tests.models.beside import FOLDER, answers, with_package

Ask = Callable[..., Any]
pytestmark = pytest.mark.cuda_build

ASK = """
import torch
from batchfinder.errors import BatchFinderError
from batchfinder.models import build_workload
from batchfinder.recording.fake_device import FakeDeviceMode

def ask(spec, sides, **options):
    with FakeDeviceMode(allow_non_fake_inputs=True):
        workload = build_workload(spec, **options)
    batches = workload.make_batch
    shapes = {}
    for side in sides:
        try:
            shapes[side] = [list(each.shape) for each in batches(2, side).values()]
        except BatchFinderError as error:
            shapes[side] = str(error)
    model = workload.model
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "labels": batches.num_labels,
        "side": batches.side,
        "shapes": list(shapes.values()),
        "fused": sorted({str(each.fused_attn) for each in model.modules() if hasattr(each, "fused_attn")}),
        "checkpointed": bool(getattr(getattr(model, "model", None), "grad_checkpointing", False)),
        "said": list(workload.assumptions),
    }
"""


@pytest.fixture(scope="module")
def ask() -> Ask:
    """What models are, and their batches, each question asked of one process."""
    return partial(answers, "timm", ASK)


PUBLISHED = {
    "resnet50": 25_557_032,
    "vit_base_patch16_224.augreg_in21k_ft_in1k": 86_567_656,
    "convnext_base": 88_591_464,
    "efficientnet_b0": 5_288_548,
    "swin_tiny_patch4_window7_224": 28_288_354,
    "mobilenetv3_large_100": 5_483_032,
}
"""Parameters, by torchvision's documentation of the same models."""


@pytest.mark.exhaustive
def test_they_are_the_published_models(ask: Ask) -> None:
    """As many parameters as published, 1000 classes, and images of the size that each is made for."""
    found = ask(*((f"timm/{name}", [None], {}) for name in PUBLISHED))
    assert [each["parameters"] for each in found] == list(PUBLISHED.values())
    assert {each["labels"] for each in found} == {1000}
    assert [each["shapes"][0] for each in found] == [[[2, 3, 224, 224], [2]]] * len(found)


def test_names_with_a_tag(ask: Ask) -> None:
    """The id of a repository on the Hub is built from timm's registry: the tag decides on classes and image size."""
    in21k, larger, none = ask(
        ("timm/vit_base_patch16_224.augreg_in21k", [None], {}),
        ("timm/vit_base_patch16_384.augreg_in21k_ft_in1k", [None], {}),
        ("timm/vit_small_patch14_dinov2.lvd142m", [None], {}),
    )
    assert (in21k["labels"], in21k["side"], in21k["said"]) == (21843, 224, [])
    assert (larger["labels"], larger["side"]) == (1000, 384)
    assert (none["labels"], none["side"]) == (1000, 518)
    assert none["said"] == ["1000 classes, where timm/vit_small_patch14_dinov2.lvd142m has none of its own"]


def test_sides(ask: Ask) -> None:
    """A convolutional network takes any; what has a table of positions its own alone."""
    resnet, vit = ask(("timm/resnet18", [160], {}), ("timm/vit_tiny_patch16_224", [224, 256], {}))
    assert resnet["shapes"] == [[[2, 3, 160, 160], [2]]]
    assert vit["shapes"][0] == [[2, 3, 224, 224], [2]]
    assert "expected an image side of 224 pixels, the only one the model takes" in vit["shapes"][1]


@pytest.mark.exhaustive
def test_options(ask: Ask) -> None:
    """timm's own switches: fused attention, and checkpointing of all blocks; adapters on layers by name."""
    vit = "timm/vit_tiny_patch16_224"
    plain, eager, fused, full, adapted = ask(
        (vit, [], {}),
        (vit, [], {"attention": "eager"}),
        (vit, [], {"attention": "flash"}),
        (vit, [], {"gradient_checkpointing": True}),
        (vit, [], {"lora": 4, "lora_targets": "qkv,proj"}),
    )
    assert [each["fused"] for each in (plain, eager, fused)] == [["True"], ["False"], ["True"]]
    assert [each["checkpointed"] for each in (plain, full)] == [False, True]
    width, blocks = 192, 12
    on_patches = width + 3 * 16 * 16  # the layer that makes patches is called proj too
    assert adapted["trained"] == 4 * (blocks * ((width + 3 * width) + (width + width))) + 4 * on_patches


def test_what_is_refused(ask: Ask) -> None:
    """Unknown names, with the nearest; and options that a model does not have."""
    name, tag, attention, none, every, selective = ask(
        ("timm/resnet5", [], {}),
        ("timm/resnet50.a9_in1k", [], {}),
        ("timm/resnet18", [], {"attention": "sdpa"}),
        ("timm/inception_v3", [], {"gradient_checkpointing": True}),
        ("timm/resnet18", [], {"gradient_checkpointing": "every-2"}),
        ("timm/resnet18", [], {"gradient_checkpointing": "selective"}),
    )
    assert name.startswith("UnknownName: unknown model 'timm/resnet5'. Did you mean timm/resnet50")
    assert "It is looked for in timm " in name
    assert "Did you mean timm/resnet50." in tag
    assert attention.endswith("expected eager, or none: timm/resnet18 has no attention with a fused kernel.")
    assert "expected a model that supports it, which timm/inception_v3 (Classifier) does not" in none
    for refused in (every, selective):
        assert refused.endswith("expected full: timm/resnet18 has no other.")


@pytest.mark.exhaustive
def test_the_command() -> None:
    """A sweep without a length is of the model's own images; checkpointing makes room for more."""
    command = [sys.executable, "-m", "batchfinder", "sweep", "--gpu", "t4", "--json", "--no-cache"]
    found = []
    for options in ([], ["--gradient-checkpointing"]):
        done = subprocess.run(
            [*command, "--model", "timm/vit_base_patch16_384", "--precision", "16-mixed", *options],
            capture_output=True,
            text=True,
            env=with_package("timm"),
        )
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["rows"]
        assert row["seq_len"] == 384
        found.append(row["max_batch_size"])
    assert 0 < found[0] < found[1]


def train(folder: str, name: str, batch_size: int) -> tuple[int, int]:
    """Two steps on a real card: most allocated and most reserved."""
    import torch

    sys.path.insert(0, folder)
    from batchfinder.models import build_workload
    from batchfinder.training.spec import StepConfig
    from batchfinder.training.step import Step

    workload = build_workload(name)
    device = torch.device("cuda", 0)
    workload.model.to(device)
    Step(workload, StepConfig(optimizer="sgd-momentum"), device).run(batch_size, None)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def test_a_simulated_step_is_the_real_one(cuda_stub: Any) -> None:
    """PyTorch's CUDA build takes to 1 % what the recording says."""
    name, size = "timm/vit_base_patch16_224", 16
    environ = with_package("timm")
    real = cuda_stub(gpu="T4").run(train, FOLDER, name, size).result
    command = [sys.executable, "-m", "batchfinder", "estimate", "--model", name, "--gpu", "t4", "--json"]
    options = ["--optimizer", "sgd-momentum", "--batch-size", str(size)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["allocated_bytes"], found["reserved_bytes"]) == pytest.approx(real, rel=0.01)


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name alone says so, before anything is built."""
    monkeypatch.setattr("batchfinder.models.catalog.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"timm/resnet50 needs timm, .*torch-batchfinder\[timm\]"):
        check_model_name("timm/resnet50")
