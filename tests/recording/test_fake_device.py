"""Tests of batchfinder/recording/fake_device.py: an operator is one kernel where CUDA has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torchgen
import yaml

from batchfinder.recording.fake_device import ONE_KERNEL_ON_CUDA
from batchfinder.simulator.trace import Trace
from batchfinder.training.workload import Workload

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
    import torch
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
