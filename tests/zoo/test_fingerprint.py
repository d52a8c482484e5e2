"""Tests of batchfinder/zoo/fingerprint.py."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfinder.step.workload import Workload
from batchfinder.zoo import build_workload
from batchfinder.zoo.batches import TextBatches
from batchfinder.zoo.fingerprint import fingerprint

WriteModule = Callable[[str, str], None]


class Net(nn.Module):
    """A module whose heads leave no trace in its tensors."""

    def __init__(self, heads: int = 2, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._heads = heads
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.dropout = nn.Dropout(dropout)


def of(model: nn.Module, make_batch: Any = None, **more: Any) -> str:
    """Return the fingerprint of a model with some batches."""
    return fingerprint(Workload(model, make_batch or TextBatches(3), **more))


def test_values_do_not_matter() -> None:
    """Two models that differ only in their weights have one fingerprint, and training or gradients do not change it."""
    first, second = Net(), Net().eval()
    second.linear(torch.ones(4)).sum().backward()
    assert of(first) == of(second)


def test_it_is_the_same_for_fake_tensors() -> None:
    """A model of the zoo has one fingerprint, real or fake."""
    real = fingerprint(build_workload("resnet50"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fingerprint(build_workload("resnet50")) == real


def frozen(net: Net) -> Net:
    """Make one weight untrainable."""
    net.linear.weight.requires_grad_(False)
    return net


def tied(net: Net) -> Net:
    """Add a layer that shares a weight."""
    net.other = nn.Linear(4, 4)
    net.other.weight = net.linear.weight
    return net


def untied(net: Net) -> Net:
    """Add a layer of its own."""
    net.other = nn.Linear(4, 4)
    return net


def buffered(net: Net) -> Net:
    """Add a buffer."""
    net.register_buffer("seen", torch.zeros(1))
    return net


def test_everything_that_matters_changes_it() -> None:
    """Plain settings, dropout, types, trainability, sharing, buffers and batches each give another fingerprint."""
    different = [
        of(Net()), of(Net(heads=4)), of(Net(dropout=0.2)), of(Net(dtype=torch.float64)), of(frozen(Net())),
        of(tied(Net())), of(untied(Net())), of(buffered(Net())), of(nn.Sequential(Net())),
        of(Net(), TextBatches(5)), of(Net(), TextBatches(3, keyword="ids")),
        of(Net(), optimizer=functools.partial(torch.optim.SGD, lr=0.1)),
        of(Net(), optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        of(Net(), optimizer=torch.optim.Adam),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_options_of_a_transformers_model_change_it() -> None:
    """Attention and gradient checkpointing are a part of the fingerprint."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        different = [
            fingerprint(build_workload("distilbert")),
            fingerprint(build_workload("distilbert", attention="eager")),
            fingerprint(build_workload("distilbert", gradient_checkpointing=True)),
            fingerprint(build_workload("bert-base")),
        ]
    assert len(set(different)) == 4


CODE = """
import torch
from torch import nn
from batchfinder.step.workload import Workload

def attend(x):
    return x * 2

class Mine(nn.Linear):
    def forward(self, x):
        return attend(x)

def factory():
    size = 3
    return Workload(Mine(3, 3), lambda batch_size, seq_len: torch.ones(batch_size, size))
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("x * 2", "x * 3"), ("size = 3", "size = 4"), ("attend(x)\n", "attend(attend(x))\n")],
)
def test_the_users_code_matters(write_module: WriteModule, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """A change in the user's file changes it, though no tensor's shape does, also in a function beside the class."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def after_writing(text: str) -> str:
        write_module("code_changing", text)
        sys.modules.pop("code_changing", None)
        return fingerprint(build_workload("code_changing:factory"))

    before = after_writing(CODE)
    assert after_writing(CODE.replace(old, new)) != before
    assert after_writing(CODE) == before


def test_it_is_the_same_in_every_process(write_module: WriteModule) -> None:
    """Hash seeds and addresses leave no trace."""
    write_module("code_stable", CODE)
    code = (
        "from batchfinder.zoo import build_workload; from batchfinder.zoo.fingerprint import fingerprint;"
        "print(fingerprint(build_workload('code_stable:factory')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == fingerprint(build_workload("code_stable:factory"))
