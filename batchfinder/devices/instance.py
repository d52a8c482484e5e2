"""The cloud instances in instances.toml, and finding one by its provider's name for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from batchfinder.devices.catalogue import read_tables
from batchfinder.devices.gpu import Gpu, find_gpu
from batchfinder.devices.names import instance_key, nearest
from batchfinder.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Instance:
    """A rented machine and the GPUs in it.

    Attributes:
        name: the provider's name for it.
        aliases: other names it is found by.
        provider: `AWS`, `Azure` or `Google Cloud`.
        gpu: the GPU, one of them.
        num_gpus: how many GPUs a process sees there.
        source: where the GPU and the number come from.
    """

    name: str
    aliases: tuple[str, ...]
    provider: str
    gpu: Gpu
    num_gpus: int
    source: str


@cache
def all_instances() -> tuple[Instance, ...]:
    """Every instance of the catalogue, by provider."""
    return tuple(_instance(table) for table in read_tables("instances.toml", "instance"))


def find_instance(name: str) -> Instance:
    """Find an instance by a name as typed.

    Case and punctuation do not matter; `ml.`, `Standard_` and the provider's name may be in front or missing.

    Args:
        name: `ml.p3.16xlarge`, `NC24s v3`, `Standard_ND96asr_v4`, `a2-highgpu-8g`.

    Raises:
        UnknownName: there is no such instance in the catalogue.
    """
    key = instance_key(name)
    known = _by_key()
    if key not in known:
        raise UnknownName("instance", name, nearest(key, {text: found.name for text, found in known.items()}))
    return known[key]


@cache
def _by_key() -> dict[str, Instance]:
    return {instance_key(name): instance for instance in all_instances() for name in (instance.name, *instance.aliases)}


def _instance(table: dict[str, Any]) -> Instance:
    return Instance(**{**table, "aliases": tuple(table.get("aliases", ())), "gpu": find_gpu(table["gpu"])})
