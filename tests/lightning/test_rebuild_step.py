"""Tests of batchfinder/lightning/rebuild_step.py: a step put together from its parts is the step."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.lightning.dry_run import Setting
from batchfinder.lightning.prediction import RECORDED, _write_parts
from batchfinder.lightning.rebuild_step import Parts, RebuiltStep, _loss, build
from batchfinder.models.build import understand
from batchfinder.results import Shape
from batchfinder.simulator.trace import Trace
from tests.lightning import nets
from tests.lightning.starting import Here, at_start


class Grouped(nets.ConvNet):
    """Two groups of an optimizer with state, and a tensor and a list of parameters beside the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3, 1, 1)
        self.again = [self.net[0].weight]

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0] * self.scale + torch.zeros(3, 1, 1, device=self.device), batch[1]))

    def configure_optimizers(self) -> Any:
        wide = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        narrow = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def make_batch(self, batch_size: int, seq_len: int | None) -> Any:
        return torch.zeros(batch_size, 3, self.side, self.side), torch.zeros(batch_size, dtype=torch.int64)


class Tied(Here):
    """The output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("net", "options", "settings"),
    [
        ("Here", {}, {}),
        ("Here", {"precision": "bf16-mixed", "accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}),
        ("Tied", {}, {}),
        ("Grouped", {}, {}),
    ],
)
def test_the_rebuilt_step_allocates_what_the_module_does(
    net: str, options: dict[str, Any], settings: dict[str, Any], record: Any, tmp_path: Path
) -> None:
    """Block for block: each event and each size are those of the module itself, trained through the zoo's path."""
    path = tmp_path / "parts"
    make = globals()[net]
    setting = Setting("fit", accumulation=options.get("accumulate_grad_batches", 1))
    micro_batches = setting.micro_batches(1)
    at_start(make(), lambda *now: _write_parts(now[0], now[1], setting, now[2], Shape(), False, path), **options)
    rebuilt = record(lambda: build(str(path), []), RECORDED[1], micro_batches=micro_batches, **settings)
    own = record(lambda: understand(on_device(make()), net), RECORDED[1], micro_batches=micro_batches, **settings)
    assert in_order(rebuilt) == in_order(own)
    assert rebuilt.sizes == own.sizes
    assert micro_batches == (2 if options else 1)


def in_order(trace: Trace) -> list[list[int]]:
    """The events; releases with nothing between them may come in any order, as a batch's tensors do."""
    runs = itertools.groupby(trace.structure.order, key=lambda event: event < 0)
    return [sorted(run) if released else list(run) for released, run in runs]


def on_device(module: Any) -> Any:
    """Move by hand what is no parameter and no buffer, as a trainer's setup would have."""
    from batchfinder.recording import fake_device

    if isinstance(module, Grouped):
        device = fake_device.register()
        module.scale, module._device = module.scale.to(device), device
    return module


def test_an_optimizer_on_a_cpu_goes_tensor_by_tensor() -> None:
    """Where it was not told otherwise; on a GPU it works on lists of tensors, which takes more memory."""
    model = nn.Linear(4, 4)
    told, untold = (torch.optim.Adam(model.parameters(), lr=0.1, foreach=foreach) for foreach in (True, None))
    seen = []
    for optimizer, foreach in ((told, False), (untold, False), (untold, True)):
        parts = Parts(
            module=model,
            trainer=SimpleNamespace(),
            step="training_step",
            batches={},
            default_dtype=torch.float32,
            optimizer=type(optimizer),
            defaults=optimizer.defaults,
            groups=[dict(group) for group in optimizer.param_groups],
            foreach=foreach,
        )
        made = RebuiltStep(parts).optimizer([])
        assert made is not optimizer
        assert made.defaults == optimizer.defaults
        assert all(mine is own for mine, own in zip(made.param_groups[0]["params"], model.parameters(), strict=True))
        seen.append((made.param_groups[0]["lr"], made.param_groups[0]["foreach"]))
    assert seen == [(0.1, True), (0.1, False), (0.1, None)]


def test_a_step_without_a_loss() -> None:
    """Lightning skips such a batch; what it would take is not known."""
    for output in (None, {"loss": None}):
        with pytest.raises(TypeError) as caught:
            _loss(output, None)
        assert str(caught.value) == "the step returned NoneType and no loss"
