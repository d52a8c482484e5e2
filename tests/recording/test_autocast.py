"""Tests of batchfinder/recording/autocast.py: the lists are the installed PyTorch's, the policies do what CUDA's do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchfinder.recording import autocast
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload

Record = Callable[..., Trace]
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
WIDTH = 64


def listed(macro: str) -> list[str]:
    """The operators in one of the header's lists, as `name` or `name.overload`."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert body is not None
    return [".".join(re.split(r",\s*", entry)) for entry in re.findall(r"_\(([\w, ]+)\)", body[1])]


@pytest.mark.skipif(not HEADER.exists(), reason="PyTorch was installed without its headers")
@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("AT_FORALL_FP32", autocast.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.FP32_SET_OPT_DTYPE),
        ("AT_FORALL_PROMOTE", autocast.PROMOTE),
    ],
)
def test_lists_are_the_headers(macro: str, names: tuple[str, ...]) -> None:
    """Each list has the operators of PyTorch's macro, once."""
    assert sorted(names) == sorted(listed(macro))


@pytest.mark.skipif(not HEADER.exists(), reason="PyTorch was installed without its headers")
def test_appended_types_are_the_headers() -> None:
    """The operators that are sent to another overload are those of PyTorch's macro."""
    text = HEADER.read_text()
    body = text[text.index("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE") : text.index("#define AT_FORALL_PROMOTE")]
    assert sorted(autocast.FP32_APPEND_DTYPE) == sorted(re.findall(r'"(norm[\w.]*)"', body))


def after_linear(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Workload]:
    """Builds a linear layer, whose output is of lower precision, and a function of that output."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.linear(x))

    return lambda: Workload(Model(), lambda batch_size, seq_len: (torch.zeros(batch_size, WIDTH),))


def forward_blocks(trace: Trace) -> list[tuple[str, int]]:
    """What the first forward allocates after the linear layer: operators and sizes."""
    marks = [(mark.step, mark.stage) for mark in trace.structure.marks]
    number = marks.index((0, "forward"))
    start, end = trace.structure.marks[number].position, trace.structure.marks[number + 1].position
    made = [
        (trace.structure.operators[i], trace.sizes[i])
        for i in trace.structure.order[start:end]
        if i >= 0 and trace.sizes[i]
    ]
    names = [name for name, _ in made]
    last = max(i for i, name in enumerate(names) if name == "aten.mm.default")
    return made[last + 1 :]


def forward(record: Record, function: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[str, int]]:
    """The forward of 8 samples in bf16-mixed, after the linear layer."""
    return forward_blocks(record(after_linear(function), 8, precision="bf16-mixed", mode="forward"))


def test_fp32_copies_its_input(record: Record) -> None:
    """exp runs on a copy in fp32."""
    assert forward(record, torch.exp) == [("aten._to_copy.default", 4 * 8 * WIDTH), ("aten.exp.default", 4 * 8 * WIDTH)]


def test_set_opt_dtype_asks_for_an_fp32_output(record: Record) -> None:
    """sum takes no copy of its input: it is told the output's type. A type that the user gave is left alone."""
    rows = lambda x: x.sum(-1)  # noqa: E731
    in_bf16 = lambda x: x.sum(-1, dtype=torch.bfloat16)  # noqa: E731
    assert forward(record, rows) == [("aten.sum.dim_IntList", 4 * 8)]
    assert forward(record, in_bf16) == [("aten.sum.dim_IntList", 2 * 8)]


def test_append_dtype_goes_to_the_typed_overload(record: Record) -> None:
    """norm gives fp32 of a bf16 input without a copy of it, with and without dimensions."""
    norms = torch._VF.norm
    by_row = forward(record, lambda x: norms(x, 2, [-1]))
    assert (sum(size for _, size in by_row), "aten._to_copy.default" in dict(by_row)) == (4 * 8, False)
    whole = forward(record, lambda x: norms(x, 2))
    assert (sum(size for _, size in whole), "aten._to_copy.default" in dict(whole)) == (4, False)


def test_promote_takes_the_widest(record: Record) -> None:
    """addcmul of one fp32 and two bf16 tensors copies these to fp32; of three bf16 tensors it copies nothing."""
    mixed = forward(record, lambda x: torch.addcmul(torch.zeros(8, WIDTH, device=x.device), x, x))
    assert [size for name, size in mixed if name == "aten._to_copy.default"] == [4 * 8 * WIDTH] * 2
    assert mixed[-1] == ("aten.addcmul.default", 4 * 8 * WIDTH)
    assert forward(record, lambda x: torch.addcmul(x, x, x)) == [("aten.addcmul.default", 2 * 8 * WIDTH)]


def test_binary_cross_entropy_is_refused(record: Record) -> None:
    """As on CUDA, and the message says what to use."""
    build = after_linear(lambda x: F.binary_cross_entropy(x.sigmoid(), torch.zeros_like(x)))
    with pytest.raises(AssertionError, match=r"refused under autocast.*binary_cross_entropy_with_logits"):
        record(build, 8, precision="bf16-mixed")
    assert record(build, 8).sizes


def test_double_is_left_alone(record: Record) -> None:
    """fp64 tensors are never cast."""
    doubled = forward(record, lambda x: torch.exp(torch.zeros(8, WIDTH, dtype=torch.float64, device=x.device)) * x)
    assert ("aten.exp.default", 8 * 8 * WIDTH) in doubled
