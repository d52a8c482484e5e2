"""Tests of batchfinder/estimate/estimate.py."""

from __future__ import annotations

from batchfinder.memory_use.breakdown import ModuleBytes, estimate, fold_lists, module_tree
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.trace import Trace, TraceStructure
from batchfinder.units import GIB

CARD = DeviceMemory(16 * GIB, 16 * GIB)


def made(*blocks: tuple[str, str, int]) -> Trace:
    """A trace of (kind, module, bytes)."""
    kinds, modules, sizes = zip(*blocks, strict=True)
    numbers = tuple(range(len(blocks)))
    return Trace(1, None, TraceStructure(numbers, (), ("x",) * len(blocks), modules, kinds), sizes)


TRACE = made(
    ("parameter", "encoder.layer.0.first", 1),
    ("parameter", "encoder.layer.1.first", 2),
    ("activation", "encoder.layer.1.first", 4),
    ("activation", "encoder.layer.1", 8),
    ("gradient", "head", 16),
    ("temporary", "", 32),
    ("input", "head", 64),
    ("workspace", "encoder.layer.0.first", 128),
)


def test_tree() -> None:
    """Each block counts with its module and all those around it; inputs and workspaces belong to none."""
    assert module_tree(TRACE, range(8)).to_json() == {
        "module": "",
        "bytes": 255,
        "temporary_bytes": 32,
        "inputs_bytes": 64,
        "workspace_bytes": 128,
        "parameters_bytes": 3,
        "activations_bytes": 12,
        "gradients_bytes": 16,
        "modules": [
            {
                "module": "encoder",
                "bytes": 15,
                "parameters_bytes": 3,
                "activations_bytes": 12,
                "modules": [
                    {
                        "module": "encoder.layer",
                        "bytes": 15,
                        "parameters_bytes": 3,
                        "activations_bytes": 12,
                        "modules": [
                            {
                                "module": "encoder.layer.0",
                                "bytes": 1,
                                "parameters_bytes": 1,
                                "modules": [
                                    {
                                        "module": "encoder.layer.0.first",
                                        "bytes": 1,
                                        "parameters_bytes": 1,
                                        "modules": [],
                                    }
                                ],
                            },
                            {
                                "module": "encoder.layer.1",
                                "bytes": 14,
                                "activations_bytes": 12,
                                "parameters_bytes": 2,
                                "modules": [
                                    {
                                        "module": "encoder.layer.1.first",
                                        "bytes": 6,
                                        "parameters_bytes": 2,
                                        "activations_bytes": 4,
                                        "modules": [],
                                    }
                                ],
                            },
                        ],
                    }
                ],
            },
            {"module": "head", "bytes": 16, "gradients_bytes": 16, "modules": []},
        ],
    }


def test_only_the_blocks_asked_for() -> None:
    """Blocks that are not alive do not count."""
    assert module_tree(TRACE, [1, 4]).by_kind() == {"parameters": 2, "gradients": 16}


def test_lists_are_folded() -> None:
    """The layers of a list become one, which says how many, and their namesakes become one, too."""
    (encoder, head) = fold_lists(module_tree(TRACE, range(8))).children
    (layers,) = encoder.children[0].children
    assert (layers.name, layers.count, layers.own, layers.total) == ("*", 2, {"activations": 8}, 15)
    (first,) = layers.children
    assert (first.name, first.count, first.own) == ("first", 2, {"parameters": 3, "activations": 4})
    assert (head.name, head.count) == ("head", 1)


def test_lists_in_lists() -> None:
    """Lists of lists are folded on each level."""
    blocks = [("parameter", f"stages.{stage}.layers.{layer}.norm", 1) for stage in range(3) for layer in range(4)]
    (stages,) = fold_lists(module_tree(made(*blocks), range(12))).children
    (stage,) = stages.children
    (layers,) = stage.children
    (layer,) = layers.children
    assert [(one.name, one.count) for one in (stage, layers, layer)] == [("*", 3), ("layers", 3), ("*", 12)]
    assert layer.children == [ModuleBytes("norm", 12, {"parameters": 12})]


def test_nothing_is_lost(bert: Trace) -> None:
    """The tree's total is that of the tensors alive, folded or not."""
    found = estimate(bert, CARD)
    tree = module_tree(bert, found.alive)
    assert tree.total == fold_lists(tree).total == sum(bert.sizes[block] for block in found.alive)
    assert [child.name for child in tree.children] == ["bert", "classifier"]
    assert tree.children[0].by_kind()["parameters"] > 0.99 * tree.by_kind()["parameters"]
