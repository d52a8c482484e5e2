"""Tests of batchfinder/models/build.py: names, paths and factories."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from batchfinder.errors import InvalidValue, UnknownName, UserCodeFailed
from batchfinder.models import build_workload
from batchfinder.models.build import allow_fake_weights, compile_workload, is_factory, workload_from_factory
from batchfinder.recording.fake_device import FakeDeviceMode
from batchfinder.training.step import Workload

WriteModule = Callable[[str, str], None]
TINY = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 40,
    "max_position_embeddings": 24,
}
USER_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, input_ids):
        return self.embedding(input_ids)

def tiny_bert():
    from transformers import BertConfig, BertForMaskedLM
    return BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a model in a folder."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "gpt2"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(TINY))
    return place


@pytest.mark.parametrize("spec", ["./gpt2", "gpt2/config.json", "./gpt2/config.json"])
def test_a_path_is_a_path(folder: Path, spec: str) -> None:
    """A folder and the file in it mean the same; written with a separator it wins over a model of that name."""
    workload = build_workload(spec)
    assert type(workload.model).__name__ == "BertForSequenceClassification"
    assert workload.max_seq_len == 24


def test_a_path_without_a_separator(folder: Path) -> None:
    """A folder whose name is no model's is found too."""
    folder.rename(folder.parent / "checkpoint")
    assert build_workload("checkpoint").max_seq_len == 24


def test_a_path_that_does_not_exist() -> None:
    """What looks like a path but is none is not called an unknown model."""
    with pytest.raises(InvalidValue, match=r"invalid value 'nowhere/config.json'; .* that exists"):
        build_workload("nowhere/config.json")


def test_an_unknown_name() -> None:
    """A name that nothing has is an unknown model."""
    with pytest.raises(UnknownName, match=r"unknown model 'gtp2'\. Did you mean gpt2"):
        build_workload("gtp2")


def test_an_unknown_attention() -> None:
    """Attention has three names."""
    with pytest.raises(InvalidValue, match="attention: invalid value 'fast'; expected one of eager, sdpa, flash"):
        build_workload("gpt2", attention="fast")


def test_options_of_a_module_of_ones_own(write_module: WriteModule) -> None:
    """Options that only the user's code can set are refused for it, by name."""
    write_module("mine", USER_MODEL)
    with pytest.raises(InvalidValue, match="mine:Net chooses the attention of its model itself"):
        build_workload("mine:Net", attention="eager")
    with pytest.raises(InvalidValue, match="mine:Net enables it in its model"):
        build_workload("mine:Net", gradient_checkpointing=True)


def test_options_of_a_transformers_model_of_ones_own(write_module: WriteModule) -> None:
    """A transformers model that a factory returns takes every option, and gets its head's batches."""
    write_module("mine", USER_MODEL)
    workload = build_workload("mine:tiny_bert", attention="eager", gradient_checkpointing=True)
    assert workload.model.config._attn_implementation == "eager"
    assert all(layer.gradient_checkpointing for layer in workload.model.bert.encoder.layer)
    assert workload.max_seq_len == 512
    workload.model.train()(**workload.make_batch(2, 6)).loss.backward()


MODULES = """
import torch
from torch import nn
from batchfinder.training.step import Workload

def workload():
    return Workload(nn.Linear(3, 2), lambda batch_size, seq_len: torch.ones(batch_size, 3))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        nn.init.trunc_normal_(self.embedding.weight)

    def forward(self, input_ids):
        return self.embedding(input_ids)

class Positional(Tokens):
    def forward(self, x):
        return self.embedding(x)

class Config:
    vocab_size = 5

class Configured(Tokens):
    config = Config()

class Batched(Tokens):
    def make_batch(self, batch_size, seq_len):
        return {"input_ids": torch.zeros(batch_size, seq_len, dtype=torch.int64)}

class Pixels(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

class Space:
    nested = Tokens

number = 3

def forgot():
    Tokens()

def wrong():
    return {"model": Tokens()}

def a_class():
    return Tokens

def raises():
    return inner()

def inner():
    raise RuntimeError("no data found")

def leaves():
    raise SystemExit("usage: train.py")
"""


@pytest.mark.parametrize("spec", ["a:b", "package.module:factory", "m:Class.method"])
def test_factories_are_recognised(spec: str) -> None:
    """A dotted module, a colon and a dotted name make a factory."""
    assert is_factory(spec)


@pytest.mark.parametrize("spec", ["gpt2", "a:", ":b", "a b:c", "./a:b", "C:\\models", "s3://x/y", "1a:b"])
def test_other_text_is_no_factory(spec: str) -> None:
    """Names, paths and addresses are not mistaken for factories."""
    assert not is_factory(spec)


def test_a_workload_is_taken_as_it_is(write_module: WriteModule) -> None:
    """A factory may return a Workload, from a module in the current directory."""
    write_module("user_models", MODULES)
    workload = workload_from_factory("user_models:workload")
    assert workload.model(workload.make_batch(4, None)).shape == (4, 2)


@pytest.mark.parametrize(("name", "bound"), [("Tokens", 7), ("Configured", 5), ("Space.nested", 7)])
def test_a_module_that_takes_input_ids(write_module: WriteModule, name: str, bound: int) -> None:
    """It is fed token ids below its vocabulary: its config's, or its first embedding's."""
    write_module("user_models", MODULES)
    workload = workload_from_factory(f"user_models:{name}")
    batch = workload.make_batch(20, 20)
    assert batch["input_ids"].max() == bound - 1
    assert workload.model(**batch).shape == (20, 20, 4)


def test_a_module_that_calls_them_something_else(write_module: WriteModule) -> None:
    """Where no argument is called input_ids, they are the first one."""
    write_module("user_models", MODULES)
    workload = workload_from_factory("user_models:Positional")
    assert workload.model(workload.make_batch(2, 3)).shape == (2, 3, 4)


def test_a_module_with_batches_of_its_own(write_module: WriteModule) -> None:
    """A make_batch method is used where there is one."""
    write_module("user_models", MODULES)
    workload = workload_from_factory("user_models:Batched")
    assert not workload.make_batch(2, 3)["input_ids"].any()


def test_factories_run_on_fake_tensors(write_module: WriteModule) -> None:
    """Inside a FakeTensorMode the user's model takes no memory, though it initialises its weights."""
    write_module("user_models", MODULES)
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = workload_from_factory("user_models:Tokens")
    assert isinstance(workload.model.embedding.weight, FakeTensor)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_module:f", r"there is no no_such_module in .* or on the Python path"),
        ("user_models.inside:f", r"there is no user_models.inside"),
        ("user_models:missing", "user_models has no missing"),
        ("user_models:number", "it is of type int"),
        ("user_models:forgot", r"it returned None \(is its return statement missing\?\)"),
        ("user_models:wrong", "it returned something of type dict"),
        ("user_models:a_class", "it returned the class Tokens itself"),
        ("user_models:Pixels", r"config.vocab_size or an nn.Embedding.*; Pixels has neither"),
    ],
)
def test_what_cannot_be_used_is_explained(write_module: WriteModule, spec: str, said: str) -> None:
    """A missing module or name, or a result that cannot be trained, is an error that names it."""
    write_module("user_models", MODULES)
    with pytest.raises(InvalidValue, match=said):
        workload_from_factory(spec)


def test_a_file_will_do_for_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`folder/file.py:factory`, from any working folder; and what is wrong with one."""
    (tmp_path / "code").mkdir()
    code = "from torch import nn\n\nclass Parts:\n    @staticmethod\n    def net():\n        return nn.Embedding(9, 2)"
    (tmp_path / "code" / "their_net.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for spec in ("code/their_net.py:Parts.net", f"{tmp_path}/code/their_net.py:Parts.net"):
        assert isinstance(build_workload(spec).model, nn.Embedding)
    for spec, said in (
        ("code/nothing.py:net", "a Python file that exists; there is no code/nothing.py"),
        ("code/their_net.py", "code/their_net.py:NAME, with the name of what makes the model in that file"),
    ):
        with pytest.raises(InvalidValue) as caught:
            build_workload(spec)
        assert said in str(caught.value)


def test_a_factory_that_raises_shows_its_own_traceback(write_module: WriteModule) -> None:
    """The traceback starts in the user's code, and none of ours is in it."""
    write_module("user_models", MODULES)
    with pytest.raises(UserCodeFailed) as caught:
        workload_from_factory("user_models:raises")
    lines = caught.value.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "user_models.py" in lines[1]
    assert lines[1].endswith("in raises")
    assert lines[-1] == "RuntimeError: no data found"
    assert "batchfinder" not in caught.value.traceback
    assert caught.value.__cause__ is None
    assert caught.value.what == "user_models:raises"


def test_a_factory_that_raises_much_is_told_of_in_short(write_module: WriteModule) -> None:
    """Of a long message the middle is left out, and how long it is is said."""
    write_module("long_words", "def raises():\n    raise RuntimeError('x' * 5_000_000 + 'end')\n")
    with pytest.raises(
        UserCodeFailed, match=r"(?s)in raises.*RuntimeError: x+\n\[498\d{4} of 500\d{4} .*xend"
    ) as caught:
        workload_from_factory("long_words:raises")
    assert len(str(caught.value)) < 21_000


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("raise ValueError('at import')", "ValueError: at import"),
        ("def f(:\n  pass", "SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_cannot_be_imported_shows_why(write_module: WriteModule, text: str, last: str) -> None:
    """An error while importing the user's module is shown without Python's import machinery."""
    write_module("broken_models", text)
    with pytest.raises(UserCodeFailed, match="importing broken_models raised") as caught:
        workload_from_factory("broken_models:f")
    assert "broken_models.py" in caught.value.traceback.splitlines()[1 if "Syntax" not in last else 0]
    assert caught.value.traceback.splitlines()[-1] == last
    assert "importlib" not in caught.value.traceback


def test_a_factory_that_exits_is_an_error(write_module: WriteModule) -> None:
    """sys.exit in a factory does not end the command without a word."""
    write_module("user_models", MODULES)
    with pytest.raises(UserCodeFailed, match=r"SystemExit: usage: train.py"):
        workload_from_factory("user_models:leaves")


def test_an_interrupt_is_not_swallowed(write_module: WriteModule) -> None:
    """Ctrl-C inside the user's code stays what it is."""
    write_module("slow_models", "def f():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        workload_from_factory("slow_models:f")


def test_generators_do_not_move(write_module: WriteModule) -> None:
    """Batches made for the user's module leave their random numbers as they were."""
    write_module("user_models", MODULES)
    workload = workload_from_factory("user_models:Tokens")
    before = torch.get_rng_state()
    workload.make_batch(2, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_truncated_normal_needs_it() -> None:
    """torch's truncated normal looks at its values: the day it does not, this module can go."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        nn.init.trunc_normal_(torch.empty(3, 3))


def test_fake_weights_are_initialised_without_values() -> None:
    """Inside a FakeTensorMode truncated normal initialisation passes, also where it was imported by name."""
    from torch.nn.init import trunc_normal_

    with FakeTensorMode(), allow_fake_weights():
        assert trunc_normal_(torch.empty(3, 3)).shape == (3, 3)


def test_real_weights_are_initialised_as_ever() -> None:
    """Outside a FakeTensorMode nothing changes, and nothing is left changed afterwards."""
    with allow_fake_weights():
        assert nn.init.trunc_normal_(torch.zeros(8, 8)).any()
    with FakeTensorMode(), allow_fake_weights():
        pass
    assert nn.init.trunc_normal_(torch.zeros(8, 8)).any()


@pytest.mark.parametrize("change", [{"memory_format": torch.channels_last}, {"dtype": torch.bfloat16}])
def test_fake_weights_are_converted_in_place(change: dict[str, Any]) -> None:
    """`module.to` of a memory format or a type works on parameters as large as weights, and keeps what is tied tied."""
    with FakeDeviceMode(allow_non_fake_inputs=True), allow_fake_weights():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2048, 5))
        model.tied = model[1].weight
        model.to(**change)
        model.to(**change)
    for convolution in (model[0], model[1]):
        weight = convolution.weight
        assert weight.is_contiguous(memory_format=change.get("memory_format", torch.contiguous_format))
        assert weight.dtype == change.get("dtype", torch.float32)
        assert isinstance(weight, nn.Parameter)
    assert isinstance(model[1].weight, FakeTensor)
    assert model.tied is model[1].weight


def test_layers_to_compile_are_looked_for() -> None:
    """A model without a list of layers of one class is compiled as a whole or not at all."""
    workload = Workload(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lambda batch_size, seq_len: torch.zeros(batch_size, 4)
    )
    with pytest.raises(InvalidValue, match="compile: invalid value 'layers'; expected model; mine:net has no list"):
        compile_workload(workload, "layers", "mine:net")
