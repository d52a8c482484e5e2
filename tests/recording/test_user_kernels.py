"""Tests of batchfinder/recording/user_kernels.py: Triton's kernels and custom operators are recorded without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest

from batchfinder.errors import RecordingFailed
from batchfinder.recording.simulation import RecordingClient
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec
from tests.builders.custom_operators import calling
from tests.builders.small import IN

Record = Callable[..., Trace]
B = 8
OUTPUT = 4 * B * IN


def made_by(trace: Trace, operator: str) -> list[int]:
    """The sizes of what one operator has made."""
    return [n for n, name in zip(trace.sizes, trace.structure.operators, strict=True) if name.startswith(operator)]


def test_what_a_python_kernel_allocates_is_recorded(record: Record) -> None:
    """In the forward and in the backward: the scratch tensor inside as well as the output."""
    trace = record(partial(calling, "doubled"), B)
    # In each of two steps once in the forward and once in the backward.
    assert made_by(trace, "aten.new_empty") == [4 * OUTPUT] * 4
    assert not [text for text in trace.unmodelled if "batchfinder_tests" in text]


def test_a_compiled_kernel_is_known_by_its_fake_one(record: Record) -> None:
    """Its output is recorded, nothing is left of the attempt to run it, and the recording says so."""
    trace = record(partial(calling, "compiled"), B)
    assert made_by(trace, "batchfinder_tests.compiled") == [OUTPUT] * 2
    assert made_by(trace, "aten.new_empty") == []
    assert "batchfinder_tests.compiled.default: what its kernel takes besides its outputs" in trace.unmodelled


@pytest.mark.parametrize(("which", "line"), [("unknown", "return called(out)"), ("backward", "return unknown(grad)")])
def test_an_operator_without_a_fake_kernel_names_itself(forked_recorders: None, which: str, line: str) -> None:
    """The error says which operator, on which line of the user's, and what to do; in the backward too."""
    spec = WorkloadSpec("tests.builders.custom_operators:calling", {"which": which})
    with RecordingClient(spec) as recorder:
        error = recorder.submit(RecordingJob(StepConfig(), (8, 0), B, None)).exception()
    assert type(error) is RecordingFailed
    said = str(error)
    assert "the custom operator batchfinder_tests.unknown cannot be recorded, at " in said
    assert re.search(rf"custom_operators\.py:\d+, in \w+: {re.escape(line)}", said)
    assert '@torch.library.register_fake("batchfinder_tests::unknown")' in said


def test_cuda_is_the_fake_gpu(record: Record) -> None:
    """`device="cuda"` in a model's code makes a tensor on the GPU that is simulated."""
    trace = record(partial(calling, "cuda"), B)
    assert OUTPUT in made_by(trace, "aten.zeros.default")


def test_compared_tensors_are_taken_to_be_equal(record: Record) -> None:
    """`torch.equal` has no answer without values; the one that is assumed is told."""
    trace = record(partial(calling, "compared"), B)
    assert made_by(trace, "aten.exp") == []
    assert "two tensors that are compared by torch.equal are taken to be equal" in trace.unmodelled


@pytest.mark.slow
def test_a_triton_kernel_is_recorded(record: Record) -> None:
    """One of the user's own, autotuned: its output and what it allocates by the number of multiprocessors."""
    pytest.importorskip("triton")

    def build() -> object:
        from batchfinder.recording.user_kernels import skip_triton_launches

        skip_triton_launches()  # before Triton is imported, as in a recording process
        from tests.builders.triton_kernels import scaling

        return scaling()

    trace = record(build, B, capability=(9, 0))
    made = made_by(trace, "aten.empty.memory_format")
    assert made.count(OUTPUT) == 4
    assert made.count(4 * 132) == 4
    assert any("1 Triton kernel (such as scaled_kernel): neither run nor tuned" in text for text in trace.unmodelled)


@pytest.mark.slow
def test_liger_never_makes_all_logits(record: Record) -> None:
    """Its fused linear cross-entropy, at 2048 tokens of 128,256 words, makes logits in chunks."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")

    def build(liger: bool) -> object:
        from batchfinder.recording.user_kernels import skip_triton_launches
        from tests.builders.few_layers import build as few_layers

        skip_triton_launches()
        workload = few_layers("llama-3.2-1b")
        if liger:
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(workload.model, None)
        return workload

    logits = 2 * 2048 * 128_256
    plain, liger = (
        record(partial(build, on), 2, 1024, capability=(8, 0), precision="bf16-true") for on in (False, True)
    )
    assert max(plain.sizes) == 2 * logits  # the loss is computed in fp32
    weights = 2 * 128_256 * 2048
    assert [size for size in liger.sizes if size >= logits and size != weights] == []
