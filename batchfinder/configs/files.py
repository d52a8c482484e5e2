"""YAML, JSON and TOML: a file's text as a mapping, and a number changed in the text with nothing else of it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def _read_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


READERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": json.loads,
    ".toml": tomllib.loads,
}
"""By the end of a file's name; each raises a ValueError for a text that is none of its kind."""


def read_mapping(text: str, name: str) -> dict[str, Any]:
    """A file's text as nested mappings.

    Raises:
        ValueError: the name ends in none of `READERS`, or the text is no mapping of that kind.
    """
    read = READERS.get(Path(name).suffix.lower())
    if read is None:
        raise ValueError(f"its name ends in none of {', '.join(READERS)}")
    values = read(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a mapping of keys to values")
    return values


def with_number(text: str, name: str, key: str, number: int, beside: str = "") -> str:
    """A file's text with another number in it: every other character stays.

    Of the places where the number can go, that one is taken which reads as wanted.

    Args:
        name: of the file, whose end says of what kind the text is.
        key: of the number, such as `train.micro_batch_size`; of a list's items, their places from 0.
        beside: the key next to which the number is added, where the file has none of its own.

    Raises:
        KeyError: the file has no such number, and none can be added.
        ValueError: the text is none of its kind, or the number is not written as such.
    """
    suffix = Path(name).suffix.lower()
    read = READERS[suffix]
    wanted = read(text)
    parts: list[Any] = [int(part) if part.isdigit() else part for part in key.split(".")]
    holder = wanted
    try:
        for part in parts[:-1]:
            holder = holder[part]
        old = holder.get(parts[-1]) if isinstance(holder, dict) else holder[parts[-1]]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise KeyError(key) from None
    last = parts[-1]
    is_number = isinstance(old, int) and not isinstance(old, bool)
    if not is_number and (old is not None or not beside):
        raise KeyError(key)
    holder[last] = number
    candidates = _replaced(text, str(last), number) if is_number else _added(text, suffix, str(last), number, beside)
    for changed in candidates:
        try:
            if read(changed) == wanted:
                return changed
        except ValueError:
            continue
    if not is_number:
        raise KeyError(key)
    raise ValueError("it is not written as a plain number")


def _replaced(text: str, last: str, number: int) -> Iterator[str]:
    """The text with each of its numbers replaced in turn, those first that stand in a line with the key."""
    found = list(re.finditer(r"(?<![\w.])\d+(?![\w.])", text))
    for match in sorted(found, key=lambda one: last not in text[text.rfind("\n", 0, one.start()) + 1 : one.start()]):
        yield f"{text[: match.start()]}{number}{text[match.end() :]}"


def _added(text: str, suffix: str, last: str, number: int, beside: str) -> Iterator[str]:
    """The text with the number added where its key has no value, or in the line after (in JSON before) another key."""
    for empty in re.finditer(rf"^[ \t]*{re.escape(last)}[ \t]*:([ \t]*(?:null|~)?)(?=[ \t]*(?:#.*)?\r?$)", text, re.M):
        yield f"{text[: empty.start(1)]} {number}{text[empty.end(1) :]}"
    neighbour = re.escape(beside.rpartition(".")[2])
    if suffix == ".json":
        for match in re.finditer(rf'(^[ \t]*)?"{neighbour}"\s*:', text, re.M):
            between = " " if match[1] is None else f"{_line_end(text)}{match[1]}"
            at = match.start() + len(match[1] or "")
            yield f'{text[:at]}"{last}": {number},{between}{text[at:]}'
        return
    assign = " = " if suffix == ".toml" else ": "
    for match in re.finditer(rf"^([ \t]*){neighbour}[ \t]*[:=][^\r\n]*(\r?\n|\Z)", text, re.M):
        before, after = (match[0], match[2]) if match[2] else (f"{match[0]}{_line_end(text)}", "")
        yield f"{text[: match.start()]}{before}{match[1]}{last}{assign}{number}{after}{text[match.end() :]}"


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
