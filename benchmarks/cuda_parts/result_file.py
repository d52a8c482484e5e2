"""The one JSON file, written anew whenever something has been found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class ResultFile:
    """A result that is complete on disk at any time.

    Args:
        path: of the file; its folder is made.
        result: JSON values; changed by whoever finds something, then saved.
    """

    def __init__(self, path: Path, result: dict[str, Any]) -> None:
        self.path = path
        self.result = result
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        """Write it, in one move."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    def failed(self, what: str, error: BaseException) -> None:
        """Note what could not be done, and go on.

        Args:
            what: was being done.
            error: what it ended with.
        """
        self.result["errors"].append({"what": what, "error": f"{type(error).__name__}: {error}"})
        self.save()

    def not_reached(self, what: str) -> None:
        """Note what there was no time for.

        Args:
            what: by name.
        """
        self.result["not_reached"].append(what)
        self.save()
