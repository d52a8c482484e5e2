"""Which other options an estimate tries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchfinder.cli.estimate import read_request
from batchfinder.cli.parser import build_parser
from batchfinder.memory_use.breakdown import Kinds, estimate
from batchfinder.report.estimate import Alternative
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.trace import Trace, TraceStructure
from batchfinder.sizing.alternatives import as_typed, changes_nothing, combined, single_changes
from batchfinder.units import GIB


def tried(options: str, brings_optimizer: bool = False) -> list[str]:
    """The changes tried for some options, as they would be typed."""
    request = read_request(build_parser().parse_args(["estimate", *options.split()]))
    return [as_typed(changes) for changes in single_changes(request, brings_optimizer)]


CHECKPOINTING = "--gradient-checkpointing"
LIGHTER = ["--optimizer adamw-fused", "--optimizer adafactor", "--optimizer sgd"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "--gpu v100",
            ["--precision 16-mixed", CHECKPOINTING, *LIGHTER],
        ),
        (
            "--gpu a100 --attention eager",
            ["--precision bf16-mixed", CHECKPOINTING, "--attention sdpa", *LIGHTER],
        ),
        (
            "--gpu a100 --precision bf16-mixed --optimizer adam",
            ["--precision bf16-true", CHECKPOINTING, "--attention flash", "--optimizer adafactor", "--optimizer sgd"],
        ),
        ("--gpu v100 --precision 16-mixed --optimizer sgd --gradient-checkpointing", []),
        (
            "--gpu a100 --precision bf16-true --attention flash --optimizer sgd-momentum",
            [CHECKPOINTING, "--optimizer sgd"],
        ),
        ("--gpu t4 --mode inference", ["--precision 16-mixed"]),
    ],
)
def test_what_is_tried(options: str, expected: list[str]) -> None:
    """Whatever would hold less and is not there already is tried, each alone."""
    assert tried(options) == expected


def test_an_optimizer_of_its_own_stays() -> None:
    """A workload's own optimizer is not exchanged for another one."""
    assert not [change for change in tried("--gpu v100", brings_optimizer=True) if "optimizer" in change]


def test_all_at_once() -> None:
    """Changes that could be made are made together, without those that train otherwise."""
    half, less, light = {"precision": "16-mixed"}, {"gradient_checkpointing": True}, {"optimizer": "sgd"}
    done, refused = Alternative("", 8, 1, True, 9), Alternative("", 8, error="no option")
    assert combined([(half, done), (less, done), (light, done)]) == {**half, **less}
    assert combined([(half, done), (less, refused), (light, done)]) is None
    assert combined([({"precision": "bf16-true"}, done), (less, done)]) is None


@pytest.mark.parametrize(
    ("changes", "operators", "optimizer", "nothing"),
    [
        ({"attention": "flash"}, ("aten.mm", "aten._scaled_dot_product_flash_attention.default"), 0, True),
        ({"attention": "flash"}, ("aten._scaled_dot_product_cudnn_attention.default",), 0, True),
        ({"attention": "flash"}, ("aten._scaled_dot_product_efficient_attention.default",), 0, True),
        ({"attention": "flash"}, ("aten._safe_softmax.default",), 0, False),
        ({"attention": "flash"}, ("aten.mm",), 0, False),
        ({"optimizer": "sgd"}, (), 9, True),
        ({"optimizer": "sgd"}, (), 10, False),
        ({"gradient_checkpointing": True}, (), 0, False),
    ],
)
def test_what_changes_nothing_is_not_tried(
    changes: dict[str, object], operators: tuple[str, ...], optimizer: int, nothing: bool
) -> None:
    """Neither flash attention where a fused kernel runs, nor another optimizer for less than 1 % of the peak."""
    names = ("",) * len(operators)
    trace = Trace(1, 8, TraceStructure((), (), operators, names, names), ())
    alone = estimate(trace, DeviceMemory(GIB, GIB))
    alone = replace(alone, kinds=Kinds(optimizer=optimizer), peak_bytes=1000)
    assert changes_nothing(changes, alone) is nothing
