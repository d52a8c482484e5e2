"""Tests of models/pretrained.py: a config.json is figures, from anywhere; it loads no code, and there are bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.models import build_workload

ROOT = Path(__file__).parents[2]
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
# As much of the package as transformers imports; loading a kernel leaves a file.
KERNELS = """
class Anything:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, decorated):
        return decorated

def get_kernel(*args, **kwargs):
    open("REACHED", "w").write(repr(args))
    raise FileNotFoundError("no hub here")

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""


def write(path: Path, **figures: Any) -> Path:
    """A config.json of a small Llama with further figures."""
    path.write_text(json.dumps({**SMALL, **figures}))
    return path


def refusal(path: Path) -> str:
    """What is said of a config that is refused."""
    with pytest.raises(InvalidValue) as caught:
        build_workload(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    "figures",
    [
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"attn_implementation": "paged|kernels-community/flash-attn"},
        {"_attn_implementation": {"": "sdpa", "text_config": "kernels-community/flash-attn"}},
        {"vision_config": {"_attn_implementation_internal": "kernels-community/flash-attn"}},
        {"_experts_implementation": "kernels-community/flash-attn"},
    ],
)
def test_a_kernel_of_the_hub_is_refused(tmp_path: Path, figures: dict[str, Any]) -> None:
    """Wherever the config has it; the message names it and what to do."""
    said = refusal(write(tmp_path / "config.json", **figures))
    assert "kernels-community/flash-attn" in said
    assert "_implementation" in said
    assert "--attention" in said


@pytest.mark.parametrize("figures", [{"auto_map": {"AutoConfig": "code.Evil"}, "trust_remote_code": True}])
def test_code_that_a_config_names_is_left_alone(tmp_path: Path, figures: dict[str, Any]) -> None:
    """Published configs of models that transformers has by now name their first code; none of it runs."""
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    model: Any = build_workload(str(write(tmp_path / "config.json", **figures))).model
    assert not hasattr(model.config, "auto_map")
    assert not hasattr(model.config, "trust_remote_code")


def test_building_reaches_no_kernel(tmp_path: Path) -> None:
    """Not where the package is installed and transformers would fall back to it, nor in a model that asks for one."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text(KERNELS)
    info = site / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    write(tmp_path / "flash.json", _attn_implementation="flash_attention_2")
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "state_size": 4}
    (tmp_path / "mamba.json").write_text(json.dumps({**mamba, "num_hidden_layers": 1, "vocab_size": 128}))
    code = """
        from batchfinder.errors import BatchFinderError
        from batchfinder.models import build_workload
        from transformers.utils import is_kernels_available
        assert is_kernels_available()
        for name in ("flash.json", "mamba.json"):
            try:
                print(type(build_workload(name).model).__name__)
            except BatchFinderError as error:
                print(error)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "MambaForCausalLM" in ran.stdout
    assert not (tmp_path / "REACHED").exists()


@pytest.mark.parametrize("name", ["/dev/zero", "fifo", "folder"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str) -> None:
    """A device, a pipe, and a folder whose config.json is one."""
    (tmp_path / "folder").mkdir()
    for pipe in (tmp_path / "fifo", tmp_path / "folder" / "config.json"):
        os.mkfifo(pipe)
    assert "a config.json that is a file" in refusal(tmp_path / name)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """The largest that were published have some 100 KiB."""
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "at most 16 MiB" in refusal(path)


@pytest.mark.parametrize("depth", [200, 2_000, 200_000])
def test_json_that_is_nested_deeply(tmp_path: Path, depth: int) -> None:
    """Whatever gives way first, the message is about the depth."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "deep": ' + "[" * depth + "]" * depth + "}")
    assert "nested at most 100 deep" in refusal(path)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"model_type": "resnet", "architectures": [], "depths": [3, 10**6]}, "depths is 1000000"),
        ({"num_labels": 10**9}, "num_labels is 1000000000"),
        ({"text_config": {"num_experts": 10**7}}, "num_experts is 10000000"),
    ],
)
def test_figures_that_nothing_could_build(tmp_path: Path, figures: dict[str, Any], said: str) -> None:
    """They would take hours and all memory; the message names the figure and its bound."""
    message = refusal(write(tmp_path / "config.json", **figures))
    assert said in message
    assert "at most" in message


@pytest.mark.parametrize(
    "spec",
    [
        "~nosuchuser/config.json",
        "/" + "x" * 300 + "/config.json",
        "x" * 5000,
        "loop/config.json",
        "config\0.json",
        '{"num_hidden_layers": 1' + "0" * 5000 + "}",
    ],
)
def test_paths_that_no_system_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """Too long, of nobody, in a loop of links, with a zero byte: an error of the user's, not of ours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(BatchFinderError):
        build_workload(spec)
