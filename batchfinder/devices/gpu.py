"""The GPUs in gpus.toml, and finding one by almost any of its names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from batchfinder.devices.catalogue import read_tables
from batchfinder.devices.names import GpuKey, gpu_key, nearest
from batchfinder.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as software sees it; a card with two of them (K80, MI250X) counts as two.

    Attributes:
        name: what a report calls it.
        aliases: other names it is found by.
        vendor: `NVIDIA` or `AMD`.
        class_gb: the marketing size, which tells cards of one family apart; not a capacity.
        memory_bytes: what the driver reports as total.
        context_bytes: what the CUDA context and libraries take of it before the first tensor.
        compute_capability: major and minor; None for AMD.
        architecture: the chip's family, with the gfx name for AMD.
        multiprocessors: streaming multiprocessors, or compute units for AMD.
        source: where `memory_bytes` comes from.
        context_source: where `context_bytes` comes from.
        estimated: the fields that are not figures printed for this very card.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    class_gb: int
    memory_bytes: int
    context_bytes: int
    compute_capability: tuple[int, int] | None
    architecture: str
    multiprocessors: int
    source: str
    context_source: str
    estimated: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """What is left for the caching allocator of one process that has the card to itself."""
        return self.memory_bytes - self.context_bytes


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue, by generation."""
    return tuple(_gpu(table) for table in read_tables("gpus.toml", "gpu"))


def find_gpu(name: str) -> Gpu:
    """Find a GPU by a name as typed, or as a driver prints it.

    Case, spaces, hyphens, underscores and vendor words do not matter. A memory size must be the card's own. A family
    without a size means its smaller card (`V100` 16 GB, `A100` 40 GB), `H100` the SXM card, `Titan X` the Pascal one.

    Args:
        name: `v100-32gb`, `Tesla T4`, `NVIDIA GeForce RTX 3090`, `titan x maxwell`.

    Raises:
        UnknownName: there is no such GPU in the catalogue; after a wrong size, the family's cards are named.
    """
    key = gpu_key(name)
    known = _by_key()
    for attempt in (key, key.without_form()):
        if attempt.text in known:
            return known[attempt.text]
    raise UnknownName("GPU", name, _family(key) or nearest(key.text, {text: gpu.name for text, gpu in known.items()}))


@cache
def _by_key() -> dict[str, Gpu]:
    """Every key a GPU is found by: each name and alias, as it stands and with the card's size."""
    known: dict[str, Gpu] = {}
    for gpu in all_gpus():
        for name in (gpu.name, *gpu.aliases):
            key = gpu_key(name)
            known[key.text] = gpu
            known.setdefault(GpuKey(key.model, gpu.class_gb).text, gpu)
    return known


def _family(key: GpuKey) -> tuple[str, ...]:
    """The cards whose name differs from this one in the size only."""
    if key.size_gb is None:
        return ()
    models = {key.model, key.without_form().model}
    return tuple(
        gpu.name for gpu in all_gpus() if any(gpu_key(name).model in models for name in (gpu.name, *gpu.aliases))
    )


def _gpu(table: dict[str, Any]) -> Gpu:
    capability = table.get("compute_capability")
    lists = {field: tuple(table.get(field, ())) for field in ("aliases", "estimated")}
    return Gpu(**{**table, **lists, "compute_capability": _major_minor(capability) if capability else None})


def _major_minor(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
