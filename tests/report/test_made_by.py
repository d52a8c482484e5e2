"""What an output says of the command that made it."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

import pytest

import batchfinder
from batchfinder.report.made_by import made_by, made_by_words


def test_the_command_can_be_typed_again_and_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words with blanks are quoted; a password in a cache's URL is left out; versions and the day stand beside it."""
    typed = ["sweep", "--gpu", "RTX 4090", "--cache", "ftp://me:secret@host/cache"]
    monkeypatch.setattr("sys.argv", ["/some/where/batchfinder", *typed])
    command = "batchfinder sweep --gpu 'RTX 4090' --cache ftp://me:***@host/cache"
    today = datetime.now(UTC).date().isoformat()
    versions = {"batchfinder": batchfinder.__version__, **{name: version(name) for name in ("torch", "transformers")}}
    assert made_by() == {"command": command, "versions": versions, "date": today}
    assert made_by_words() == (
        f"made on {today} by {command} (batchfinder {batchfinder.__version__}, "
        f"torch {version('torch')}, transformers {version('transformers')})"
    )
