"""Models to try sizes on: named ones built from their published figures, local configs, and the user's own code.

Nothing is downloaded and weights are random. Importing this package is cheap; torch and transformers are imported when
`build_workload` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchfinder.models.catalog import find_model, list_models

if TYPE_CHECKING:
    from batchfinder.models.build import build_workload

__all__ = ["build_workload", "find_model", "list_models"]


def __getattr__(name: str) -> Any:
    if name == "build_workload":
        from batchfinder.models.build import build_workload

        return build_workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
