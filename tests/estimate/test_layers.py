"""Tests of batchfinder/estimate/sharding.py."""

from __future__ import annotations

from batchfinder.estimate.sharding import Layers, layers_of
from batchfinder.simulator.trace import Structure, Trace

H = 768


def test_bert(bert: Trace) -> None:
    """A layer of BERT-base has the parameters that can be counted by hand; embeddings, pooler and head are the rest."""
    attention = 4 * (H * H + H) + 2 * H
    feed_forward = 2 * 4 * H * H + 4 * H + H + 2 * H
    embeddings = (30522 + 512 + 2) * H + 2 * H
    rest = embeddings + H * H + H + 2 * H + 2
    assert layers_of(bert) == Layers(4 * (attention + feed_forward), 4 * rest)


def test_without_lists(mlp: Trace) -> None:
    """A model without lists of modules is one unit, the root's."""
    held = sum(size for size, kind in zip(mlp.sizes, mlp.structure.kinds, strict=True) if kind == "parameter")
    assert layers_of(mlp) == Layers(0, held)


def test_the_outermost_list_counts() -> None:
    """A list within a layer is part of that layer; what is no parameter does not count."""
    modules = ("stages.0.layers.0", "stages.0.layers.1", "stages.1", "stages.1", "head")
    kinds = ("parameter", "parameter", "parameter", "gradient", "parameter")
    structure = Structure(tuple(range(5)), (), ("x",) * 5, modules, kinds)
    assert layers_of(Trace(1, None, structure, (10, 20, 25, 1000, 7))) == Layers(30, 7)
