"""Tests of batchfinder/models/__init__.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

import batchfinder.models


def test_import_is_cheap() -> None:
    """Importing the zoo and listing its models imports neither torch nor transformers."""
    code = (
        "import sys, batchfinder.models as z; z.list_models(); z.find_model('gpt2');"
        "sys.exit(bool({'torch', 'transformers', 'pytorch_lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lightning_is_not_imported() -> None:
    """What understands factories and LightningModules imports neither Lightning nor transformers."""
    code = (
        "import sys, batchfinder.models.build;sys.exit(bool({'transformers', 'pytorch_lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_other_names_are_missing() -> None:
    """An attribute that does not exist is an AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="nonsense"):
        batchfinder.models.nonsense
