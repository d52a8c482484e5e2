"""Every command in the README and on the pages runs as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED_WHOLE = ("batchfinder reproduce all",)
"""Commands whose whole output has a test of its own, in tests/cli/test_reproduce.py."""

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
    lines = [line for page in PAGES for block in _SHELL.findall(page.read_text()) for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("batchfinder ")))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the reader's files lie."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "path/to").mkdir(parents=True)
    (folder / "path/to/config.json").write_text(CONFIG)
    (folder / "my_package").mkdir()
    (folder / "my_package/my_module.py").write_text(MODULE)
    return folder


def test_there_are_commands() -> None:
    """The pages are found, and each verb stands on one of them."""
    verbs = {command.split()[1] for command in _commands()}
    assert verbs == {"sweep", "profile", "estimate", "reproduce", "cache"}


@pytest.mark.parametrize("command", [command for command in _commands() if command not in TESTED_WHOLE])
def test_it_runs(command: str, here: Path) -> None:
    """It ends well, prints something, and complains of nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "batchfinder", *shlex.split(command)[1:]],
        cwd=here,
        env=environment(here / "cache"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "warning" not in done.stderr
