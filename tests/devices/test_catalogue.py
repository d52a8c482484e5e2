from __future__ import annotations

import subprocess
import sys

import pytest

from batchfinder.devices.catalog import read_tables


@pytest.mark.parametrize(("file", "kind"), [("gpus.toml", "gpu"), ("instances.toml", "instance")])
def test_reads_tables_in_order(file: str, kind: str) -> None:
    """Both files are part of the package, and every table of them has a name."""
    names = [table["name"] for table in read_tables(file, kind)]
    assert len(names) == len(set(names)) > 0


def test_torch_is_not_imported() -> None:
    """Looking up a GPU imports nothing heavy."""
    code = (
        "import sys, batchfinder.devices as devices; devices.find_instance('p3.2xlarge'); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
