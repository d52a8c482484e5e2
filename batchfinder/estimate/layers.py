"""The model's parameters in the units that a sharded model is gathered in."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.simulator.trace import Trace


@dataclass(frozen=True, slots=True)
class Layers:
    """Bytes of parameters as they are stored.

    Attributes:
        largest: of the largest layer: of all modules that stand in a list (`encoder.layer.7`), the outermost.
        rest: of everything that is in no layer: embeddings, heads; all of a model without lists.
    """

    largest: int
    rest: int


def layers_of(trace: Trace) -> Layers:
    """The layers that wrapping policies make units of, as in `fully_shard(layer)` for each layer, then the whole model.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html: what was not sharded as part of an inner
    module belongs to the root's own unit.

    Args:
        trace: whose parameters count.
    """
    structure = trace.structure
    units: dict[str, int] = {}
    for kind, module, size in zip(structure.kinds, structure.modules, trace.sizes, strict=True):
        if kind == "parameter":
            unit = _unit(module)
            units[unit] = units.get(unit, 0) + size
    rest = units.pop("", 0)
    return Layers(max(units.values(), default=0), rest)


def _unit(module: str) -> str:
    """The path of the layer that a module is in; empty for one that is in none."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ""
