"""Tests of batchfinder/models/fingerprint.py."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfinder.models import build_workload
from batchfinder.models.fingerprint import fingerprint
from batchfinder.models.synthetic_batches import TextBatches
from batchfinder.training.workload import Workload

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
from batchfinder.training.workload import Workload

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


IMPORTS = """
import importlib, json, os, sys
from batchfinder.models import build_workload
from batchfinder.models.fingerprint import fingerprint
"""
PRINT = IMPORTS + "print(fingerprint(build_workload(sys.argv[1] + ':factory')))"
FORKING = (
    IMPORTS
    + """
for line in sys.stdin:
    module, folder, path = json.loads(line)
    if not os.fork():
        os.chdir(folder)
        sys.path.insert(1, path)
        importlib.invalidate_caches()
        print(fingerprint(build_workload(module + ":factory")), flush=True)
        os._exit(0)
    os.wait()
"""
)


def in_a_process(module: str, seed: int) -> str:
    """Return the fingerprint of a module's `factory`, in a fresh process."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PRINT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def in_a_fork() -> Iterator[Callable[..., str]]:
    """`in_a_fork(module, path)`: the fingerprint of its `factory`, where nothing of the user's has been imported."""
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
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


HOLDING = """
import argparse, collections, dataclasses, enum, functools, logging, pathlib, threading, types
import torch
from torch import nn
from batchfinder.training.workload import Workload

class Untouchable:
    __slots__ = ("k", "__dict__")
    def __init__(self, k):
        self.k = k
    def __repr__(self):
        raise RuntimeError
    __eq__ = __hash__ = __repr__

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Data:
    k: object

class Mapping(dict):
    def items(self):
        raise RuntimeError

CFG = types.SimpleNamespace(w=3)

class Net(nn.Linear):
    def __init__(self, held):
        super().__init__(3, 3)
        self.held = held
        self.itself = [self]
        self.log = logging.getLogger(__name__)
        self.lock = threading.Lock()
        self.names = {"a", "b", "c", Color.RED, ("d", 1)}
        self.path = pathlib.PurePath("a/b")

    def forward(self, x):
        return super().forward(x) * SCALE.k

SCALE = types.SimpleNamespace(k=1)

def make(batch_size, seq_len):
    return torch.ones(batch_size, CFG.w)

def bound(batch_size, seq_len, *, held):
    return torch.ones(batch_size, 3)

def defaulting(batch_size, seq_len, held=types.SimpleNamespace(k=1)):
    return torch.ones(batch_size, 3)

def closed(held):
    return lambda batch_size, seq_len: torch.ones(batch_size, held.k)
"""


@pytest.fixture
def holding(write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `HOLDING`, imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    write_module("code_holding", HOLDING)
    sys.modules.pop("code_holding", None)
    importlib.invalidate_caches()
    return importlib.import_module("code_holding")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda code, k: SimpleNamespace(k=k),
        lambda code, k: code.Data(k),
        lambda code, k: code.Untouchable(k),
        lambda code, k: [{"a": code.Untouchable(code.Data(k))}],
        lambda code, k: code.Mapping(a=k),
        lambda code, k: torch.zeros(k),
        lambda code, k: functools.partial(code.closed, code.Data(k)),
        lambda code, k: code.closed(code.Data(k)),
    ],
)
def test_what_a_module_holds_matters(holding: Any, wrap: Callable[[Any, int], Any]) -> None:
    """Objects of any kind are looked into, without running their code."""
    one, same, other = (of(holding.Net(wrap(holding, k)), holding.make) for k in (1, 1, 2))
    assert one == same != other


def test_what_a_callable_refers_to_matters(holding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closures, defaults, attributes, arguments of a partial, and module globals, also a global of a method."""
    net = holding.Net(None)

    def each() -> list[str]:
        held = holding.Data(SimpleNamespace(k=holding.CFG.w))
        monkeypatch.setattr(holding.defaulting, "__defaults__", (held,))
        makes = [holding.closed(held), functools.partial(holding.bound, held=held), holding.defaulting, holding.make]
        return [of(net, make) for make in makes] + [of(net, loss=make) for make in makes]

    first = each()
    assert each() == first
    monkeypatch.setattr(holding.CFG, "w", 4)
    assert all(a != b for a, b in zip(each(), first, strict=True))
    before = of(net)
    monkeypatch.setattr(holding.SCALE, "k", 2)
    assert of(net) != before
    before = of(net, holding.make)
    monkeypatch.setattr(holding.make, "length", 2, raising=False)
    assert of(net, holding.make) != before


def test_steps_do_not_matter(holding: Any) -> None:
    """What a step leaves behind in the module or its optimizer is no setting."""
    net = holding.Net(None)
    net.optimizer, net.losses, net.last = torch.optim.Adam(net.parameters()), [], None
    before = of(net, holding.make)
    net.last = net(torch.ones(2, 3)).sum(dim=0)
    net.losses.append(net.last.sum())
    net.losses[0].backward()
    net.optimizer.step()
    assert of(net, holding.make) == before


def test_what_is_too_much_is_left_out(holding: Any) -> None:
    """Neither size nor depth makes it slow, or fail."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    wide = [holding.Data(i) for i in range(300_000)]
    began = time.process_time()
    assert of(holding.Net([deep, wide])) == of(holding.Net([deep, wide]))
    assert time.process_time() - began < 5


def test_helper_modules_matter(write_module: WriteModule, in_a_fork: Callable[..., str]) -> None:
    """A file that the model's file imports is read, and one that this imports."""
    write_module("code_main", "import code_helper\n" + CODE)
    write_module("code_helper", "import code_deeper\n")
    found = []
    for number in (1, 1, 2):
        write_module("code_deeper", f"number = {number}\n")
        found.append(in_a_fork("code_main"))
    assert found[0]
    assert found[0] == found[1] != found[2] != ""


def test_what_a_module_was_set_to_matters(write_module: WriteModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in another module of the user's, as in `settings.width`, counts with what it is now."""
    write_module("code_settings", "width = 3\n")
    write_module(
        "code_using", "import code_settings\n" + CODE.replace("batch_size, size", "batch_size, code_settings.width")
    )
    workload = build_workload("code_using:factory")
    before = fingerprint(workload)
    monkeypatch.setattr(sys.modules["code_settings"], "width", 4)
    assert fingerprint(workload) != before


LIBRARY = """
from torch import nn
def run(): pass
class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
"""


def install(folder: Path, version: str, body: str, record: str = "") -> None:
    """Put a version of a library into a folder."""
    info = folder / f"fakelib-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fakelib\nVersion: {version}\n")
    (info / "top_level.txt").write_text("fakelib\n")
    (info / "RECORD").write_text(record)
    (folder / "fakelib.py").write_text(LIBRARY + body)


@pytest.mark.parametrize(
    "code",
    [
        CODE + "\nimport fakelib",
        CODE + "\nfrom fakelib import run",
        CODE.replace("Mine(3, 3)", "__import__('fakelib').Net()"),
    ],
)
def test_versions_of_libraries_matter(
    write_module: WriteModule, tmp_path: Path, in_a_fork: Callable[..., str], code: str
) -> None:
    """A library's version stands for its code, whether the user's file imports it or the model is made of it."""
    write_module("code_main", code)
    found = []
    for version, body in (("1.0", ""), ("1.0", "# other text\n"), ("2.0", "")):
        site = tmp_path / f"{version}{len(body)}" / "site-packages"
        install(site, version, body)
        found.append(in_a_fork("code_main", str(site)))
    assert found[0]
    assert found[0] == found[1] != found[2] != ""


@pytest.mark.parametrize(("recorded", "its_text_matters"), [("fakelib.py", False), ("__editable__.fakelib.pth", True)])
def test_what_an_installer_recorded_is_a_library(
    write_module: WriteModule, tmp_path: Path, in_a_fork: Callable[..., str], recorded: str, its_text_matters: bool
) -> None:
    """Its version stands for it in a folder of any name; what is installed editable is the user's own all the same."""
    write_module("code_main", CODE + "\nimport fakelib")
    found = []
    for version, body in (("1.0", ""), ("1.0", "# other text\n"), ("2.0", "")):
        folder = tmp_path / f"{version}{len(body)}"
        install(folder, version, body, f"{recorded},,\n")
        found.append(in_a_fork("code_main", str(folder)))
    assert "" not in found
    assert (found[0] != found[1]) is its_text_matters
    assert (found[0] != found[2]) is not its_text_matters


def test_nothing_of_the_users_matters_to_the_zoo(
    write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workload without code of the user's has one fingerprint, whatever else has been imported."""
    before = fingerprint(build_workload("resnet50"))
    monkeypatch.syspath_prepend(str(tmp_path))
    write_module("code_beside", "beside = 1\n")
    importlib.invalidate_caches()
    importlib.import_module("code_beside")
    assert fingerprint(build_workload("resnet50")) == before


def test_it_is_the_same_in_every_process(write_module: WriteModule) -> None:
    """Hash seeds and addresses leave no trace."""
    write_module("code_stable", HOLDING + "\ndef factory(): return Workload(Net({'x', 'y', Data(1).k}), closed(CFG))\n")
    assert in_a_process("code_stable", seed=1) == in_a_process("code_stable", seed=2)
