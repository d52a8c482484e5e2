"""The named models and what is known of model families: data read from TOML, without torch."""

from __future__ import annotations

import difflib
import functools
import os
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from typing import Any

from batchfinder.errors import MissingExtra, UnknownName
from batchfinder.models.hub import config_from_hub

TIMM = "timm/"
"""What stands before the name of a model of timm's, as in the ids of its repositories on the Hub."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One named model."""

    name: str
    aliases: tuple[str, ...]  # other names for exactly this configuration
    published: str  # the repository on the Hugging Face hub that its figures come from
    architecture: str  # the class, of transformers with its head
    source: str  # address of the published config.json
    config: dict[str, Any]  # the figures, by the names of the config class
    library: str = "transformers"  # that has the class

    @property
    def keys(self) -> tuple[str, ...]:
        """Every way of writing this model's name."""
        return (self.name, *self.aliases, self.published, self.published.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class Label:
    """A tensor of integers that a head computes its loss from."""

    name: str  # the keyword it is passed by
    each: str  # `sample` or `token`: what has one number
    below: int | str  # the numbers are smaller; a name stands for an attribute of the config, or for `seq_len`


@dataclass(frozen=True, slots=True)
class MediaTensor:
    """A tensor of images or audio that a model reads.

    A dimension, and each number in `rows`, is a number or a product of sizes by name: `rows*columns*patch`.
    """

    name: str  # the keyword it is passed by
    shape: tuple[int | str, ...]
    rows: tuple[int | str, ...] = ()  # whole numbers that each sample has, in place of random pixels or waves
    fill: int | None = None  # the whole number that all elements are
    kind: str = "float"  # `float`, `int` or `bool`


@dataclass(frozen=True, slots=True)
class Media:
    """What a model reads besides text, by the arguments of its `forward`."""

    arguments: frozenset[str]  # those that a `forward` of this kind has
    tensors: tuple[MediaTensor, ...]
    what: str  # in words, with the sizes in braces
    config: tuple[str, ...]  # parts of the config that say the sizes, by what their names hold
    sizes: dict[str, int | str]  # sizes that differ from the usual, or products of others
    model_types: frozenset[str]  # those it is for; empty for all
    features: str = ""  # the model's method that makes one vector for each placeholder token
    placeholders: str = ""  # how many placeholders a sample has, where no method says it
    text: bool = True  # whether token ids are read as well, where the model could read them
    length: str = ""  # the size that the sequence length stands for, where the model reads no text


@dataclass(frozen=True, slots=True)
class Families:
    """What transformers' class names and model types say about training."""

    heads: dict[str, tuple[Label, ...]]  # labels by the end of the class name
    positions: tuple[str, ...]  # what configs call the number of positions
    unlimited: frozenset[str]  # model types whose positions have no end
    after_padding: frozenset[str]  # model types that number positions from `pad_token_id + 1`
    smallest_side: dict[str, int]  # smallest image side by model type, in pixels
    media: tuple[Media, ...]  # the first that fits counts
    sizes: dict[str, tuple[tuple[str, ...], int]]  # of media: the names a size has in configs, and what is usual
    placeholder_tokens: tuple[str, ...]  # names that a placeholder's token has in configs
    token_kinds: tuple[str, ...]  # arguments that say which tokens are placeholders

    def labels(self, architecture: str) -> tuple[Label, ...] | None:
        """Return the labels that a transformers class is trained with, None where it has no head known here."""
        fitting = [suffix for suffix in self.heads if architecture.endswith(suffix)]
        return self.heads[max(fitting, key=len)] if fitting else None

    def media_of(self, model_type: str, arguments: Collection[str]) -> Media | None:
        """Return what a model of this type reads besides text, given the arguments of its `forward`."""
        for each in self.media:
            if each.arguments <= set(arguments) and (not each.model_types or model_type in each.model_types):
                return each
        return None


@functools.cache
def models() -> tuple[ModelRow, ...]:
    """Return every named model of transformers, in the order it is listed."""
    return _rows("models.toml", "transformers")


@functools.cache
def denoisers() -> tuple[ModelRow, ...]:
    """Return every named denoiser of diffusers, in the order it is listed."""
    return _rows("denoisers.toml", "diffusers")


def _rows(file: str, library: str) -> tuple[ModelRow, ...]:
    table = tomllib.loads(resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))
    return tuple(ModelRow(**{**row, "aliases": tuple(row["aliases"]), "library": library}) for row in table["models"])


@functools.cache
def families() -> Families:
    """Return what is known of heads, positions and image sides."""
    data = tomllib.loads(resources.files(__package__).joinpath("families.toml").read_text(encoding="utf-8"))
    return Families(
        heads={row["suffix"]: tuple(Label(**label) for label in row["labels"]) for row in data["heads"]},
        positions=tuple(data["positions"]["names"]),
        unlimited=frozenset(data["positions"]["unlimited"]),
        after_padding=frozenset(data["positions"]["after_padding"]),
        smallest_side=data["smallest_side"],
        media=tuple(_media(row) for row in data["media"]),
        sizes={name: (tuple(row["names"]), row["usual"]) for name, row in data["sizes"].items()},
        placeholder_tokens=tuple(data["placeholders"]["tokens"]),
        token_kinds=tuple(data["placeholders"]["kinds"]),
    )


def _media(row: dict[str, Any]) -> Media:
    tensors = tuple(
        MediaTensor(**{**tensor, "shape": tuple(tensor["shape"]), "rows": tuple(tensor.get("rows", ()))})
        for tensor in row["tensors"]
    )
    defaults = {"config": ["vision", "image"], "sizes": {}, "model_types": []}
    values = {**defaults, **row, "tensors": tensors, "arguments": frozenset(row["arguments"])}
    values |= {"config": tuple(values["config"]), "model_types": frozenset(values["model_types"])}
    return Media(**values)


def list_models() -> tuple[str, ...]:
    """Return the names of the models that need nothing but their name; denoisers need diffusers besides."""
    return tuple(row.name for row in models())


def find_model(name: str) -> ModelRow:
    """Look a model up by name, alias or repository; case, `-`, `_`, `.` and spaces do not matter.

    Raises:
        UnknownName: no such model; the nearest names are named.
    """
    by_key = {_plain(key): row for row in (*models(), *denoisers()) for key in row.keys}
    found = by_key.get(_plain(name))
    if found is not None:
        return found
    wanted = _plain(name.rpartition("/")[2])
    near = difflib.get_close_matches(wanted, by_key, n=8, cutoff=0.6)
    matches = list(dict.fromkeys(by_key[key].name for key in near))[:3]
    known = "" if matches else f"Known models: {', '.join(list_models())}. "
    others = "A path to a config.json or its folder, package.module:factory, or owner/name on the Hub will do as well."
    raise UnknownName("model", name, matches, known + others)


def check_model_name(model: str) -> None:
    """Find a misspelt name early, and fetch the config.json of a model on the Hub; the rest is checked in building it.

    Raises:
        UnknownName: no such model.
        HubFailed: it is on the Hub, and its config.json cannot be had.
        MissingExtra: it is timm's, which is not installed.
    """
    if ":" in model or model.endswith(".json") or model.startswith((".", "~", os.sep)) or os.path.exists(model):
        return
    if model.startswith(TIMM):
        if find_spec("timm") is None:
            raise MissingExtra("timm", "timm", model)
        return
    try:
        find_model(model)
    except UnknownName:
        if config_from_hub(model) is None:
            raise


def _plain(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.lower())
