"""What cannot be meant is refused before anything is tried, with what would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.errors import InvalidValue
from batchfinder.loop.options import budget_of, check_sizes, device_of, headroom_of

SIZES = {
    "seq_lens": None,
    "target_batch_size": None,
    "min_batch_size": 1,
    "max_batch_size": None,
    "multiple_of": 1,
    "tolerance": 0.0,
}
HEADROOM = "a share from 0.0 to below 1.0 or such as '5%', or a number of bytes or such as '1GiB'"
DEVICE = "cpu, cuda or cuda:N, whose memory can be limited and measured"


def refused(function: Callable[[], Any]) -> str:
    """The text of the refusal."""
    with pytest.raises(InvalidValue) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"target_batch_size": 0}, "target_batch_size: 0 will not do; expected a size of at least 1."),
        ({"min_batch_size": 0}, "min_batch_size: 0 will not do; expected a size of at least 1."),
        ({"max_batch_size": -1}, "max_batch_size: -1 will not do; expected a size of at least 1."),
        ({"multiple_of": 0}, "multiple_of: 0 will not do; expected a size of at least 1."),
        (
            {"seq_lens": []},
            "seq_lens: [] will not do; expected lengths of at least 1, or None for data of one fixed shape.",
        ),
        (
            {"seq_lens": [128, 0]},
            "seq_lens: [128, 0] will not do; expected lengths of at least 1, or None for data of one fixed shape.",
        ),
        (
            {"target_batch_size": 100, "multiple_of": 8},
            "target_batch_size: 100 will not do; expected a multiple of 8, as multiple_of asks of each size.",
        ),
        (
            {"target_batch_size": 4, "min_batch_size": 5},
            "target_batch_size: 4 will not do; expected at least the min_batch_size of 5.",
        ),
        (
            {"tolerance": 1.0},
            "tolerance: 1.0 will not do; expected a share from 0 (exact) to below 1, such as 0.01.",
        ),
    ],
)
def test_sizes(wrong: dict[str, Any], text: str) -> None:
    """Each names the option, the value, and what would do; what is right passes."""
    check_sizes(**SIZES)
    assert refused(lambda: check_sizes(**{**SIZES, **wrong})) == text


@pytest.mark.parametrize(
    ("given", "value"), [("5%", 0.05), (" 12.5 % ", 0.125), (0.05, 0.05), (0, 0), (1 << 20, 1 << 20), ("1GiB", 1 << 30)]
)
def test_headroom(given: Any, value: float | int) -> None:
    """A float and a percentage are shares, a whole number and a size are bytes."""
    assert headroom_of(given) == value
    assert type(headroom_of(given)) is type(value)


@pytest.mark.parametrize("given", [1.0, -0.1, -1, "100%", "-5%", "x%", None, float("nan")])
def test_headroom_that_cannot_be_meant(given: Any) -> None:
    """All of the memory, or less than none of it."""
    assert refused(lambda: headroom_of(given)) == f"headroom: {given!r} will not do; expected {HEADROOM}."


def test_headroom_that_is_no_size() -> None:
    """A text without a per cent sign is a size."""
    text = refused(lambda: headroom_of("much"))
    assert text == "headroom: 'much' will not do; expected a positive size such as 12GiB, 900MiB or 24GB."


def test_budget() -> None:
    """A size, a number of bytes, or as much as there is."""
    assert [budget_of(given) for given in ("12GiB", 5 << 20, None)] == [12 << 30, 5 << 20, None]
    text = refused(lambda: budget_of("much"))
    assert text == "budget: 'much' will not do; expected a positive size such as 12GiB, 900MiB or 24GB."


def test_device() -> None:
    """The one asked for, else that of the model's or the optimizer's parameters."""
    model = nn.Linear(1, 1)
    cpu = torch.device("cpu")
    assert device_of("cpu:0", []) == cpu
    assert device_of(None, [{}, model]) == cpu
    assert device_of(None, [torch.optim.SGD(model.parameters())]) == cpu
    assert refused(lambda: device_of(None, [{}])) == (
        f"device: None will not do; expected {DEVICE}, since state= holds no model to see it from."
    )
    assert refused(lambda: device_of("gpu", [])) == f"device: 'gpu' will not do; expected {DEVICE}."
    assert refused(lambda: device_of(None, [nn.Linear(1, 1, device="meta")])) == (
        f"device: 'meta' will not do; expected {DEVICE}."
    )
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert refused(lambda: device_of("cuda:99", [])) == (
        f"device: 'cuda:99' will not do; expected a device that PyTorch {torch.__version__} can use here; it sees "
        f"{cards} of CUDA's."
    )


@pytest.mark.gpu
def test_device_of_a_card() -> None:
    """A card without a number is the current one."""
    assert device_of("cuda", []) == torch.device("cuda", torch.cuda.current_device())
