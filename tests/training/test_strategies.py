"""Tests of batchfinder/training/strategies.py: which modules are units, over which mesh, in which types."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from batchfinder.training.spec import STRATEGIES, StepOptions
from batchfinder.training.strategies import blocks_of, fullest_shard, mesh_shape, mixed_precision, own_tokens


class Block(nn.Module):
    """A block with a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Model(nn.Module):
    """Blocks in a list, and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


class Named(Model):
    """One that says, as transformers' do, which modules are not to be split."""

    _no_split_modules: ClassVar[list[str]] = ["Linear"]


class Tied(Model):
    """A layer of the first block has the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].experts[0].weight = self.head[2].weight  # type: ignore[union-attr, index]


def test_what_shares_a_parameter_with_another_unit_is_none() -> None:
    """FSDP refuses a parameter in two units; within one it may stand twice."""
    model = Tied()
    _, second, third = model.layers
    assert blocks_of(model) == [model.head[0], third, second]
    third.experts[0].weight = third.experts[1].weight  # type: ignore[union-attr, index]
    assert blocks_of(model) == [model.head[0], third, second]


def test_the_outermost_lists_hold_the_blocks() -> None:
    """What stands in a list within a block is part of it, and so is what has no parameters; the last come first."""
    model = Model()
    first, second, third = model.layers
    assert blocks_of(model) == [model.head[2], model.head[0], third, second, first]
    assert blocks_of(nn.Linear(2, 2)) == []


def test_transformers_names_its_blocks() -> None:
    """Then lists do not count, and inner modules come before those that they are in."""
    model = Named()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert blocks_of(model) == linear[::-1]


def test_the_rank_of_which_most_trains() -> None:
    """Where the first part of a flat parameter is frozen the last ranks have what trains; else the first has most."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
    wrapped = nn.ParameterList(model.parameters())
    assert fullest_shard(wrapped, 4) == 0
    wrapped[0].requires_grad_(False)
    assert (fullest_shard(wrapped, 4), fullest_shard(wrapped, 80)) == (3, 64)


def test_meshes() -> None:
    """One dimension of all GPUs; with `hsdp` and `fsdp2-tp` nodes of eight, the latter also of other sizes."""
    assert {name: mesh_shape(name, 32) for name in ("fsdp2", "hsdp", "fsdp2-tp")} == {
        "fsdp2": {"shard": 32},
        "hsdp": {"replicate": 4, "shard": 8},
        "fsdp2-tp": {"shard": 4, "tensor": 8},
    }
    assert mesh_shape("fsdp2-tp", 32, 2) == {"shard": 16, "tensor": 2}
    assert mesh_shape("fsdp2-cp", 32, 4) == {"shard": 8, "context": 4}


def test_each_gpu_has_its_tokens() -> None:
    """Of 10 tokens each of 3 GPUs has 4, as 12 are shared out in pairs; a mask goes, and what has no tokens stays."""
    batch = {
        "ids": torch.zeros(2, 10),
        "attention_mask": torch.ones(2, 10),
        "label": torch.zeros(2),
        "image": torch.zeros(2, 3),
    }
    assert {name: tuple(each.shape) for name, each in own_tokens(batch, 10, 3).items()} == {
        "ids": (2, 4),
        "label": (2,),
        "image": (2, 3),
    }


@pytest.mark.slow
def test_types() -> None:
    """Mixed precision gathers and sums in bf16; else nothing is cast."""
    policy = mixed_precision("bf16-mixed")
    assert {policy.param_dtype, policy.reduce_dtype, policy.output_dtype} == {torch.bfloat16}
    assert mixed_precision("fp32").param_dtype is mixed_precision("bf16-true").reduce_dtype is None


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"strategy": "ddp"}, "gpus"),
        ({"strategy": "hsdp", "gpus": 8}, "gpus"),
        ({"strategy": "hsdp", "gpus": 12}, "gpus"),
        ({"strategy": "fsdp2-tp", "gpus": 8}, "tensor_parallel"),
        ({"strategy": "fsdp2-tp", "gpus": 12, "tensor_parallel": 1}, "tensor_parallel"),
        ({"strategy": "fsdp2", "gpus": 16, "tensor_parallel": 8}, "tensor_parallel"),
        ({"tensor_parallel": 8}, "tensor_parallel"),
        ({"strategy": "fsdp2-cp", "gpus": 12}, "context_parallel"),
        ({"strategy": "fsdp2-tp", "gpus": 16, "context_parallel": 8}, "context_parallel"),
        ({"strategy": "fsdp2-cp", "gpus": 16, "attention": "eager"}, "strategy"),
        ({"strategy": "ddp", "gpus": 2, "mode": "inference"}, "mode"),
        ({"strategy": "ddp", "gpus": 2, "optimizer_in_backward": True}, "optimizer_in_backward"),
        ({"strategy": "fsdp2", "gpus": 2, "precision": "16-mixed"}, "precision"),
        ({"strategy": "fsdp2", "gpus": 2, "optimizer": "muon"}, "optimizer"),
        ({"strategy": "fsdp2", "gpus": 2, "compile": "model"}, "compile"),
        ({"strategy": "tp", "gpus": 2, "compile": "layers"}, "compile"),
        ({"strategy": "fsdp", "gpus": 2, "compile": "layers"}, "compile"),
        ({"strategy": "fsdp2", "gpus": 2, "lora": 8, "quantization": "nf4"}, "quantization"),
        ({"strategy": "ddp", "gpus": 2, "optimizer": "adamw-offload"}, "optimizer"),
        ({"optimizer": "adamw-offload", "precision": "16-mixed"}, "precision"),
        ({"optimizer": "adamw-offload", "optimizer_in_backward": True}, "optimizer_in_backward"),
    ],
)
def test_what_cannot_be_had_together(options: dict[str, object], option: str) -> None:
    """Each wrong combination is one error, which names the option to change."""
    refused = StepOptions(**options).refused_together()  # type: ignore[arg-type]
    assert refused is not None
    assert refused.option == option


def test_what_can() -> None:
    """The strategies with the usual options, and DDP with whatever one GPU can do; words and JSON say so."""
    for name in STRATEGIES:
        assert StepOptions(strategy=name, gpus=16, precision="bf16-mixed").refused_together() is None
    assert StepOptions(strategy="ddp", gpus=2, precision="16-mixed", compile="layers").refused_together() is None
    assert StepOptions(optimizer="adamw-offload", precision="bf16-mixed").refused_together() is None
    assert StepOptions(optimizer="adamw-offload", precision="16-mixed", mode="inference").refused_together() is None
    options = StepOptions(strategy="fsdp2", gpus=8)
    assert options.words() == ["fp32", "adamw", "FSDP2 on 8 GPUs"]
    assert options.newer() == {"strategy": "fsdp2", "gpus": 8}
    assert StepOptions(gpus=8).words()[-1] == "the model's own sharding on 8 GPUs"
    split = StepOptions(strategy="fsdp2-tp", gpus=16, tensor_parallel=4)
    assert split.words()[-1] == "FSDP2 and tensor parallelism of 4 on 16 GPUs"
    assert (split.step().tensor_parallel, split.communicators, options.communicators) == (4, 2, 1)
    assert StepOptions().newer() == {}
