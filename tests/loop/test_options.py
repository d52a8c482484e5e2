"""Invalid arguments are refused before anything is tried, with what would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder import tune_batch_size
from batchfinder.errors import InvalidValue
from batchfinder.loop.options import check_single_process, device_of

DEVICE = "cpu, cuda or cuda:N, whose memory can be limited and measured"


def refused(function: Callable[[], Any]) -> str:
    """The text of the refusal."""
    with pytest.raises(InvalidValue) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"seq_lens": []}, "seq_lens"),
        ({"seq_lens": [128, 0]}, "seq_lens"),
        ({"headroom": "much%"}, "headroom"),
        ({"headroom": 1.0}, "headroom"),
        ({"headroom": "5"}, "headroom"),
        ({"budget": "much"}, "budget"),
        ({"multiple_of": 0}, "multiple_of"),
    ],
)
def test_arguments(wrong: dict[str, Any], option: str) -> None:
    """Each refusal names the option and the value; the step is not called."""

    def never(*given: Any) -> None:
        raise AssertionError("called")

    text = refused(lambda: tune_batch_size(never, never, [nn.Linear(1, 1)], **wrong))
    assert text.startswith(f"{option}: ") or f" {option}" in text
    assert repr(wrong[option]) in text


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (
            (lambda model, batch: None, lambda size, length: None),
            "train_step: invalid value '<lambda>(model, batch)'; expected a function that is called with the batch, "
            "and nothing else (missing a required argument: 'batch').",
        ),
        (
            (lambda batch: None, lambda size: None),
            "make_batch: invalid value '<lambda>(size)'; expected a function that is called with batch_size and "
            "seq_len, and nothing else (too many positional arguments).",
        ),
    ],
)
def test_functions_of_other_arguments(functions: tuple[Any, Any], said: str) -> None:
    """A function that could not be called is refused by its signature, before anything is copied or tried."""
    assert refused(lambda: tune_batch_size(*functions, [nn.Linear(1, 1)])) == said


def test_device() -> None:
    """The one asked for, else that of the model's or the optimizer's parameters."""
    model = nn.Linear(1, 1)
    cpu = torch.device("cpu")
    assert device_of("cpu:0", []) == cpu
    assert device_of(None, [{}, model]) == cpu
    assert device_of(None, [torch.optim.SGD(model.parameters())]) == cpu
    assert f"{DEVICE}, since state= holds no model to take it from." in refused(lambda: device_of(None, [{}]))
    assert f"invalid value 'gpu'; expected {DEVICE}." in refused(lambda: device_of("gpu", []))
    assert f"invalid value 'meta'; expected {DEVICE}." in refused(
        lambda: device_of(None, [nn.Linear(1, 1, device="meta")])
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert refused(lambda: device_of("cuda:99", [])).endswith(
        f"a device that PyTorch {torch.__version__} can use; it sees {gpus} CUDA devices here."
    )


def test_only_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several that train together are refused, with what to do instead."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert refused(check_single_process).endswith(
        "expected one, since the others would hang when it runs out of memory; find the size on one device, and give "
        "it to plan_accumulation(target_batch_size, size, num_devices)."
    )


@pytest.mark.gpu
def test_device_of_a_card() -> None:
    """A card without a number is the current one."""
    assert device_of("cuda", []) == torch.device("cuda", torch.cuda.current_device())
