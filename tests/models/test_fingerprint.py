"""Tests of batchfinder/models/fingerprint.py: it changes with what changes a step's memory, and with nothing else."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfinder.models import build_workload
from batchfinder.models.fingerprint import (
    fingerprint_file,
    fingerprint_module,
    fingerprint_optimizer,
    fingerprint_workload,
)

WriteModule = Callable[[str, str], None]


class Net(nn.Module):
    """A module whose heads and dropout leave no trace in its tensors."""

    def __init__(self, heads: int = 2, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._heads = heads
        self.dropout = dropout
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.activation = nn.functional.gelu


def changed(change: Callable[[Any], object]) -> Net:
    """A net after a change."""
    net = Net()
    change(net)
    return net


def tie(net: Net) -> None:
    """Add a layer that shares a weight."""
    net.other = nn.Linear(4, 4)
    net.other.weight = net.linear.weight


def test_everything_that_changes_memory_changes_it() -> None:
    """Classes, names, numbers, switches, functions, types, trainability, sharing, buffers, lazy layers."""
    different = [
        Net(), Net(heads=4), Net(dropout=0.0), Net(dtype=torch.float64), nn.Sequential(Net()), nn.Sequential(nn.ReLU()),
        nn.Sequential(nn.GELU()), nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1, stride=2), nn.LazyLinear(4),
        changed(lambda net: net.linear.weight.requires_grad_(False)),
        changed(tie), changed(lambda net: setattr(net, "other", nn.Linear(4, 4))),
        changed(lambda net: net.register_buffer("seen", torch.zeros(1))),
        changed(lambda net: setattr(net, "activation", nn.functional.relu)),
        changed(lambda net: setattr(net, "checkpointing", True)),
    ]  # fmt: skip
    assert len({fingerprint_module(net) for net in different}) == len(different)


def test_what_changes_no_memory_does_not_change_it() -> None:
    """Values, gradients, modes, rates, paths, times, collections that grew, objects of any kind and number."""
    before, after = Net(), Net(dropout=0.2).eval()
    after.linear(torch.ones(4)).sum().backward()
    for net, number in ((before, 1), (after, 10_000)):
        net.folder, net.run, net.started = Path(f"runs/{number}"), f"run {number}", time.time()
        net.losses, net.replay, net.itself = [0.1] * number, deque(object() for _ in range(number)), [net]
        net.optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / number)
    assert fingerprint_module(before) == fingerprint_module(after)


class Lit(pl.LightningModule):
    """What people keep on a LightningModule."""

    def __init__(self, lr: float, batch_size: int, seed: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.batch_size, self.seed = lr, batch_size, seed
        self.net = Net()


def test_settings_of_a_run_on_a_lightning_module_do_not_matter() -> None:
    """Learning rate, batch size, seed and hyperparameters; what its layers are does."""
    first, second = Lit(0.1, 8, 1), Lit(0.2, 16, 2)
    assert fingerprint_module(first) == fingerprint_module(second)
    second.net = Net(heads=4)
    assert fingerprint_module(first) != fingerprint_module(second)


def test_switches_of_a_lightning_module_matter() -> None:
    """Such as one for checkpointing, among its attributes or its hyperparameters."""
    first, second, third = (Lit(0.1, 8, 1) for _ in range(3))
    second.checkpoints = True
    third.hparams["checkpoints"] = True
    assert len({fingerprint_module(each) for each in (first, second, third)}) == 3
    second.checkpoints = third.hparams["checkpoints"] = False
    assert len({fingerprint_module(each) for each in (first, second, third)}) == 3


class Hostile(nn.Module):
    """A module that cannot be looked at from outside without an error."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update({"number": 3, "config": Untouchable(), 7: 8})

    def extra_repr(self) -> str:
        raise RuntimeError


class Untouchable:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


def test_nothing_that_a_module_holds_makes_it_fail() -> None:
    """Not even objects that raise whatever is asked of them."""
    assert fingerprint_module(Hostile()) == fingerprint_module(Hostile())


def test_it_is_the_same_for_fake_tensors() -> None:
    """A model has one fingerprint, real or fake."""
    real = fingerprint_module(build_workload("resnet50").model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fingerprint_module(build_workload("resnet50").model) == real


def test_options_of_a_transformers_model_change_it() -> None:
    """Attention, gradient checkpointing, and a config's figure that no tensor shows."""

    def wider(workload: Any) -> Any:
        workload.model.config.chunk_size_feed_forward = 2
        return workload

    with FakeTensorMode(allow_non_fake_inputs=True):
        workloads = [
            build_workload("distilbert"),
            build_workload("distilbert", attention="eager"),
            build_workload("distilbert", gradient_checkpointing=True),
            wider(build_workload("distilbert")),
            build_workload("bert-base"),
        ]
        again = fingerprint_module(build_workload("distilbert").model)
    different = [fingerprint_module(workload.model) for workload in workloads]
    assert again == different[0]
    assert len(set(different)) == 5


def test_where_a_transformers_model_came_from_does_not_matter() -> None:
    """The folder that its config was read from is no figure."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        here, there = (build_workload("distilbert").model for _ in range(2))
    there.config._name_or_path = "runs/checkpoint-500"
    assert fingerprint_module(here) == fingerprint_module(there)


def group(make: Callable[..., torch.optim.Optimizer], **options: Any) -> str:
    """The fingerprint of an optimizer, written."""
    return json.dumps(fingerprint_optimizer(make(Net().parameters(), **options)))


def test_options_of_an_optimizer_that_change_its_memory() -> None:
    """Class, switches, whether there is momentum or decay, and which parameters; not rates, nor how much momentum."""
    sgd, adam = torch.optim.SGD, torch.optim.AdamW
    different = [
        group(sgd), group(sgd, momentum=0.9), group(sgd, foreach=False), group(adam), group(adam, amsgrad=True),
        group(adam, fused=True), group(torch.optim.LBFGS, history_size=5), group(torch.optim.LBFGS, history_size=9),
        json.dumps(fingerprint_optimizer(sgd([Net().linear.weight]))),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert group(sgd, lr=0.1, momentum=0.9) == group(sgd, lr=torch.tensor(0.2), momentum=0.8)
    optimizer = sgd(Net().parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)
    assert json.loads(group(sgd, momentum=0.9))["class"] == fingerprint_optimizer(optimizer)["class"]


CODE = """
import torch
from torch import nn
from batchfinder.training.step import Workload

class Mine(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

class Callable:
    def __call__(self, output, batch):
        return output.sum()

def factory():
    size = 3
    return Workload(Mine(3, 3), lambda batch_size, seq_len: torch.ones(batch_size, 3), Callable())
"""


@pytest.mark.parametrize(
    ("old", "new", "is_seen"),
    [("(x) * 2", "(x) * 3", True), ("output.sum()", "output.mean()", True), ("size = 3", "size = 4", False)],
)
def test_a_changed_method_matters_in_the_users_process(
    write_module: WriteModule, monkeypatch: pytest.MonkeyPatch, old: str, new: str, is_seen: bool
) -> None:
    """The source of the model's own classes and of what it is trained with; not the rest of a script."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def after_writing(text: str) -> str:
        write_module("code_changing", text)
        sys.modules.pop("code_changing", None)
        workload = build_workload("code_changing:factory")
        return fingerprint_module(workload.model, workload.make_batch, functools.partial(workload.loss))

    before = after_writing(CODE)
    assert (after_writing(CODE.replace(old, new)) != before) is is_seen
    assert after_writing(CODE) == before


def test_code_that_was_typed_in_is_known_by_its_name() -> None:
    """In a notebook or an interpreter there may be no source."""
    space: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
    exec("class Typed(nn.Linear):\n    pass\ndef step(batch): pass", space)
    assert fingerprint_module(space["Typed"](2, 2)) != fingerprint_module(nn.Linear(2, 2))
    assert fingerprint_module(Net(), space["step"]) != fingerprint_module(Net())


FORKING = """
import importlib, json, os, sys
from batchfinder.models import build_workload
from batchfinder.models.fingerprint import fingerprint_workload
for line in sys.stdin:
    module, folder, path = json.loads(line)
    if not os.fork():
        os.chdir(folder)
        sys.path.insert(1, path)
        importlib.invalidate_caches()
        spec = module + ":factory"
        print(fingerprint_workload(build_workload(spec), "batchfinder.models:build_workload", spec), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def in_a_fork() -> Iterator[Callable[..., str]]:
    """`in_a_fork(module, path)`: the fingerprint of its `factory`, where nothing of the user's has been imported."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        asking, answers = process.stdin, process.stdout
        assert asking is not None
        assert answers is not None

        def ask(module: str, path: str = "") -> str:
            print(json.dumps([module, os.getcwd(), path]), file=asking, flush=True)
            return answers.readline().strip()

        yield ask
        asking.close()


def test_files_of_a_factory_matter(write_module: WriteModule, in_a_fork: Callable[..., str], tmp_path: Path) -> None:
    """The file itself, one that it imports, and one that this imports; not one that nobody imports."""
    write_module("code_main", "import code_helper\n" + CODE)
    write_module("code_helper", "from code_package import deeper\n")
    (tmp_path / "code_package").mkdir()
    deeper = tmp_path / "code_package" / "deeper.py"
    found = []
    for text in ("number = 1", "number = 1", "number = 2"):
        deeper.write_text(text)
        found.append(in_a_fork("code_main"))
    assert found[0]
    assert found[0] == found[1] != found[2]
    write_module("code_beside", "number = 3")
    assert in_a_fork("code_main") == found[2]
    write_module("code_main", "import code_helper\n" + CODE.replace("size = 3", "size = 4"))
    assert in_a_fork("code_main") not in ("", *found)


LIBRARY = """
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
"""


def test_a_librarys_version_stands_for_its_code(
    write_module: WriteModule, tmp_path: Path, in_a_fork: Callable[..., str]
) -> None:
    """Where the model is made of a library's classes."""
    write_module("code_main", CODE.replace("Mine(3, 3)", "__import__('fakelib').Net()"))
    found = []
    for version, body in (("1.0", ""), ("1.0", "# other text\n"), ("2.0", "")):
        site = tmp_path / f"{version}{len(body)}" / "site-packages"
        info = site / f"fakelib-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fakelib\nVersion: {version}\n")
        (site / "fakelib.py").write_text(LIBRARY + body)
        found.append(in_a_fork("code_main", str(site)))
    assert found[0]
    assert found[0] == found[1] != found[2] != ""


def test_what_else_was_imported_does_not_matter_to_a_named_model(
    write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workload without code of the user's has one fingerprint, in every process."""
    named = ("batchfinder.models:build_workload", "resnet50")
    with FakeTensorMode(allow_non_fake_inputs=True):
        before = fingerprint_workload(build_workload("resnet50"), *named)
        monkeypatch.syspath_prepend(str(tmp_path))
        write_module("code_beside", "beside = 1\n")
        __import__("code_beside")
        assert fingerprint_workload(build_workload("resnet50"), *named) == before


def test_hash_seeds_and_addresses_leave_no_trace(write_module: WriteModule) -> None:
    """It is the same in every process."""
    write_module("code_stable", CODE)
    code = "import sys; from batchfinder.models import build_workload as build; "
    code += "from batchfinder.models.fingerprint import fingerprint_workload as of; "
    code += "print(of(build('code_stable:factory'), 'code_stable:factory'))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**environment, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] != ""


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    """Has an empty fingerprint; one that is there has that of its bytes."""
    assert fingerprint_file(tmp_path / "gone") == ""
    (tmp_path / "here").write_bytes(b"")
    assert fingerprint_file(tmp_path / "here") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
