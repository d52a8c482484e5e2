"""This version of batchfinder, and those of what is installed beside it."""

from __future__ import annotations

from contextlib import suppress

__version__ = "0.1.0"


def installed(*packages: str) -> dict[str, str]:
    """Versions by the names that pip has, batchfinder's first; what is not installed is left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"batchfinder": __version__}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
