"""Which command made an output, with which versions, and when: what a file says of itself."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from batchfinder.cache.store import without_password
from batchfinder.versions import installed


def made_by() -> dict[str, Any]:
    """The command that this process was started with, versions by package, and the day (UTC), as JSON values."""
    return {
        "command": without_password(shlex.join(["batchfinder", *sys.argv[1:]])),
        "versions": installed("torch", "transformers"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def made_by_words() -> str:
    """The same in one line."""
    made = made_by()
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return f"made on {made['date']} by {made['command']} ({versions})"
