"""Which changes `estimate` tries. What they buy is in test_estimate.py."""

from __future__ import annotations

import pytest

from batchfinder.cli.estimate import Change, changes, combined, read_request
from batchfinder.cli.main import build_parser
from batchfinder.report.estimate import Changed


def tried(options: str, brings_optimizer: bool = False) -> list[str]:
    """The changes tried for some options, as they would be typed."""
    request = read_request(build_parser().parse_args(["estimate", *options.split()]))
    return [str(change) for change in changes(request, brings_optimizer)]


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
    half, less, light = (
        Change({"precision": "16-mixed"}),
        Change({"gradient_checkpointing": True}),
        Change({"optimizer": "sgd"}),
    )
    done, refused = Changed("", 8, 1, True, 9), Changed("", 8, error="no option")
    assert combined([(half, done), (less, done), (light, done)]) == Change({**half.options, **less.options})
    assert combined([(half, done), (less, refused), (light, done)]) is None
    assert combined([(Change({"precision": "bf16-true"}), done), (less, done)]) is None
