"""Reads the catalogue's TOML files, which are part of the package."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def read_tables(file: str, kind: str) -> list[dict[str, Any]]:
    """Read one catalogue file.

    Args:
        file: the file's name, in this package.
        kind: the name of its array of tables: `gpu` or `instance`.

    Returns:
        The tables, in the order of the file.
    """
    text = files("batchfinder.devices").joinpath(file).read_text(encoding="utf-8")
    tables: list[dict[str, Any]] = tomllib.loads(text)[kind]
    return tables
