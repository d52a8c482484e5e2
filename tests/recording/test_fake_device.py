"""Tests of batchfinder/recording/fake_device.py: an operator is one kernel where CUDA has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from batchfinder.models.build import allow_fake_weights
from batchfinder.recording.fake_device import ONE_KERNEL_ON_CUDA, SMALL_BYTES, FakeDeviceMode
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload
from tests.builders import small

Record = Callable[..., Trace]

BATCH, WIDTH = 8, 1024


def test_no_operator_is_composed_where_cuda_has_a_kernel() -> None:
    """Of all operators that PyTorch composes for backends without a kernel, those with a CUDA kernel are registered."""
    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = {entry["func"].partition("(")[0]: entry for entry in yaml.safe_load(file.read_text())}

    def backends(name: str | None) -> set[str]:
        dispatch = entries[name].get("dispatch", {}) if name else {}
        return {backend.strip() for backends in dispatch for backend in backends.split(",")}

    composed = {
        name
        for name, entry in entries.items()
        if "CompositeImplicitAutograd" in backends(name)
        and "CUDA" in backends(name) | backends(entry.get("structured_delegate"))
    }
    assert composed == set(ONE_KERNEL_ON_CUDA) - {"_fused_rms_norm_backward"}  # it has no composition to replace


def _workload(activation: str) -> Workload:
    from torch import nn

    kinds = {"silu": nn.SiLU(), "mish": nn.Mish(), "rms_norm": nn.RMSNorm(WIDTH, eps=1e-6)}
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kinds[activation])
    return Workload(model, lambda batch_size, seq_len: (torch.zeros(batch_size, WIDTH),))


def _blocks(trace: Trace, operator: str) -> list[int]:
    return [size for size, name in zip(trace.sizes, trace.structure.operators, strict=True) if name == operator]


def test_a_backward_is_one_tensor(record: Callable[..., Trace]) -> None:
    """SiLU and Mish make one tensor of the input's size in the backward, as on CUDA; two steps make two."""
    for activation in ("silu", "mish"):
        trace = record(lambda activation=activation: _workload(activation), BATCH)
        assert _blocks(trace, f"aten.{activation}_backward.default") == [4 * BATCH * WIDTH] * 2
        assert not _blocks(trace, "aten.sigmoid.default")


def test_rms_norm_is_fused(record: Callable[..., Trace]) -> None:
    """It keeps its input and one number per row, and its backward makes the two gradients."""
    trace = record(lambda: _workload("rms_norm"), BATCH)
    assert _blocks(trace, "aten._fused_rms_norm.default") == [4 * BATCH * WIDTH, 4 * BATCH] * 2
    assert _blocks(trace, "aten._fused_rms_norm_backward.default") == [4 * BATCH * WIDTH, 4 * WIDTH] * 2


def test_small_cpu_tensors_have_values() -> None:
    """Code that computes with small CPU tensors reads what it would read without a fake mode."""
    with FakeDeviceMode(allow_non_fake_inputs=True):
        rates = torch.linspace(0, 0.1, 5)
        rates[0] = 1
        assert rates.tolist() == pytest.approx([1, 0.025, 0.05, 0.075, 0.1])
        table = torch.arange(6).view(2, 3).T.contiguous()
        assert table.nonzero().tolist() == [[0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
        assert bool((torch.tensor([3, 4]) > 3).any())
        assert torch.equal(torch.cat([table, table]), torch.cat([table, table]))


def test_large_cpu_tensors_are_fake() -> None:
    """A tensor above the limit has no memory, whatever it is made of; below the limit it is real to the byte."""
    count = SMALL_BYTES // 4
    with FakeDeviceMode(allow_non_fake_inputs=True):
        small, large = torch.ones(count), torch.ones(count + 1)
        assert isinstance(large, FakeTensor)
        assert not isinstance(small, FakeTensor)
        assert isinstance(torch.cat([small, small]), FakeTensor)
        assert isinstance(small.to(torch.float64), FakeTensor)
        assert isinstance(small + large[:count], FakeTensor)
        assert isinstance(large.double(), FakeTensor)
        view = torch.ones(1).expand(SMALL_BYTES)
        assert not isinstance(view, FakeTensor)
        assert isinstance(view + 1, FakeTensor)


@pytest.mark.parametrize(
    "model_type",
    ["convnext", *(pytest.param(each, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for each in ("swin", "beit"))],
)
def test_models_that_read_values_as_they_are_built(record: Callable[..., Trace], model_type: str) -> None:
    """Vision models make a list of drop rates of a tensor in `__init__`."""

    def build() -> Workload:
        import transformers

        config = transformers.AutoConfig.for_model(model_type, num_labels=3)
        with FakeDeviceMode(allow_non_fake_inputs=True), allow_fake_weights():
            model = transformers.AutoModelForImageClassification.from_config(config)
        return Workload(model, lambda batch_size, seq_len: {"pixel_values": torch.zeros(batch_size, 3, 224, 224)})

    assert max(record(build, 2).sizes) > SMALL_BYTES


def test_a_shared_module_is_moved_once(record: Record) -> None:
    """A module that two others hold keeps one parameter, which both compute with, and one gradient."""

    def build() -> Workload:
        shared = nn.Linear(small.IN, small.IN, bias=False)
        return Workload(nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)), small.vectors)

    trace = record(build, 1)
    kinds = [kind for kind, size in zip(trace.structure.kinds, trace.sizes, strict=True) if size == 4 * small.IN**2]
    assert kinds.count("parameter") == 1
    held = [name for name in trace.structure.operators if name.startswith("aten.empty_strided")]
    assert len(held) == 1 + 2  # the weight, and a batch for each step


def test_outputs_do_not_come_from_other_arguments() -> None:
    """What is remembered of an operator's output belongs to these very arguments: types, strides, numbers, keywords."""
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda tensor: tensor.add(1),
        lambda tensor: tensor.add(1.0),
        lambda tensor: tensor.t().add(1),
        lambda tensor: tensor.to(torch.int64).add(1),
        lambda tensor: tensor.to(torch.int64).add(1.0),
        lambda tensor: tensor.sum(0),
        lambda tensor: tensor.sum([0, 1]),
        lambda tensor: tensor.sum(0, keepdim=True),
        lambda tensor: tensor.sum(0, dtype=torch.float64),
        lambda tensor: tensor.new_zeros((3,), dtype=torch.float16),
        lambda tensor: torch.cat([tensor, tensor], 1),
        lambda tensor: torch.cat([tensor, tensor], 0),
        lambda tensor: tensor[2:].add(1),
    ]
    mode = FakeDeviceMode(allow_non_fake_inputs=True)

    def described(made: torch.Tensor) -> tuple[object, ...]:
        return made.dtype, tuple(made.shape), made.stride(), made.untyped_storage().nbytes()

    expected = [described(call(torch.zeros(4, 6, device="meta"))) for call in calls]
    with mode:
        fake = mode.from_tensor(torch.zeros(4, 6))
        for _ in range(2):
            assert [described(call(fake)) for call in calls] == expected
