"""Every command in the README and on the pages runs as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import run_command, run_here
from tests.prefork import Prefork

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED_WHOLE = ("batchfinder reproduce all",)
"""Commands whose whole output has a test of its own, in tests/cli/test_reproduce.py."""
FIRST = "batchfinder sweep"
"""What a newcomer runs."""
LONG = (
    *("--find seq-len", "24GB+", "--from", "Qwen/", "--html", "estimate --model gpt2", "--strategy fsdp2", "plan "),
    *("llama-3.2-1b --seq-len", "--plot gpt2.png", "--device cpu", "resnet50"),
)
"""Parts of the commands that CI has no time for; each has tests of its own elsewhere."""

_INLINE = re.compile(r"`(batchfinder [^`]+)`")
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)

# What the commands speak of as if it were the reader's.
CONFIG = '{"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}'
MODULE = """
import torch
from batchfinder import Workload

def factory():
    return Workload(torch.nn.Linear(64, 8), lambda batch_size, seq_len: torch.randn(batch_size, seq_len, 64))
"""


def _commands() -> list[str]:
    # What needs PyTorch's CUDA build is tested in tests/cuda_build.
    pages = [page for page in PAGES if page.stem not in ("cuda-stub", "programs")]
    lines = [line for page in pages for block in _SHELL.findall(page.read_text()) for line in block.splitlines()]
    # What a shell would write to a file is printed here, and the file is the reader's.
    return list(dict.fromkeys(line.partition(" > ")[0] for line in lines if line.startswith("batchfinder ")))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the reader's files lie."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "path/to").mkdir(parents=True)
    (folder / "path/to/config.json").write_text(CONFIG)
    (folder / "qlora.yml").write_text((ROOT / "docs/examples/axolotl/qlora.yml").read_text())
    (folder / "my_package").mkdir()
    (folder / "my_package/my_module.py").write_text(MODULE)
    return folder


def test_there_are_commands() -> None:
    """The pages are found, and each command stands on one of them."""
    verbs = {command.split()[1] for command in _commands()}
    assert verbs == {"sweep", "profile", "estimate", "plan", "reproduce", "cache", "page", "gpus", "instances"}


def test_the_readmes_table_has_commands_of_the_pages() -> None:
    """So that each is run below."""
    found = _INLINE.findall(PAGES[0].read_text())
    inline = [each for each in found if not each.startswith(("batchfinder dry-run", "batchfinder stub"))]
    assert len(inline) >= 4
    assert set(inline) <= set(_commands())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.exhaustive] if any(part in command for part in LONG) else [])
        for command in _commands()
        if command not in TESTED_WHOLE
    ],
)
def test_it_runs(command: str, here: Path, prefork: Prefork) -> None:
    """It ends well, prints something, and complains of nothing; the first of all does so as a process of its own."""
    arguments = shlex.split(command)[1:]
    if command == FIRST:
        done = run_command(*arguments, cache=here / "cache", folder=here)
    else:
        done = run_here(prefork, *arguments, cache=here / "cache", folder=here)
    assert done.code == 0, done.err
    assert done.out
    assert "warning" not in done.err
