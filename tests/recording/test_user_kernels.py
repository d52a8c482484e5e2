"""Tests of batchfinder/recording/user_kernels.py: Triton's kernels and custom operators are recorded without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from batchfinder.simulator.trace import Trace
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


LOGITS = 2 * 2048 * 128_256
WEIGHTS = 2 * 128_256 * 2048


def llama(loss: str, packed: bool = False) -> object:
    """Two layers of Llama 3.2 1B, whose words are 128,256, with another loss or packed samples."""
    from batchfinder.models.pretrained import pack, replace_loss
    from batchfinder.recording.user_kernels import skip_triton_launches
    from tests.builders.few_layers import build

    skip_triton_launches()
    workload = build("llama-3.2-1b")
    if packed:
        workload = pack(workload, None, "llama")
    if loss != "default":
        replace_loss(workload.model, loss, "llama")
    return workload


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["chunked", "liger", "trl"])
def test_other_losses_never_make_all_logits(record: Record, loss: str) -> None:
    """At 2048 tokens they make logits in parts; the model's own loss makes all of them, and in fp32 once more."""
    if loss != "chunked":
        pytest.importorskip("triton")
        pytest.importorskip({"liger": "liger_kernel", "trl": "trl.trainer.utils"}[loss])
    trace = record(partial(llama, loss), 2, 1024, capability=(8, 0), precision="bf16-true")
    # Sums of the weights' gradients may be kept in fp32.
    assert {size for size in trace.sizes if size >= LOGITS} <= {WEIGHTS, 2 * WEIGHTS}
    plain = record(partial(llama, "default"), 2, 1024, capability=(8, 0), precision="bf16-true", steps=1)
    assert plain.sizes.count(2 * LOGITS) >= 2


@pytest.mark.slow
def test_gpt_2_is_a_causal_model_too(record: Record) -> None:
    """Its class is named otherwise, GPT2LMHeadModel; chunked, its loss makes no logits of all 2048 tokens."""

    def gpt2() -> object:
        from batchfinder.models.pretrained import replace_loss
        from tests.builders.few_layers import build

        workload = build("gpt2")
        replace_loss(workload.model, "chunked", "gpt2")
        return workload

    logits, weights = 2 * 2048 * 50_257, 2 * 50_257 * 768
    trace = record(gpt2, 2, 1024, capability=(8, 0), precision="bf16-true", steps=1)
    assert {size for size in trace.sizes if size >= logits // 4} <= {weights, 2 * weights}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_packed_attention_is_the_flash_kernel(record: Record, precision: str) -> None:
    """One row of 4 samples of 512: the output, a number for each token and head, and the backward's own memory."""
    trace = record(partial(llama, "default", packed=True), 4, 512, capability=(8, 0), precision=precision, steps=1)
    tokens, heads, head = 4 * 512, 32, 64
    forward = made_by(trace, "aten._flash_attention_forward")
    assert forward.count(2 * tokens * heads * head) == 2
    assert forward.count(4 * tokens * heads) == 2
    backward = made_by(trace, "aten._flash_attention_backward")
    padded = tokens + 128 * 4
    assert backward.count(4 * padded * heads) == backward.count(4 * padded * heads * head) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "precision", "said"), [((7, 5), "16-mixed", "float16 on 7.5"), ((8, 0), "fp32", "float32 on 8.0")]
)
def test_a_packed_row_is_refused_where_it_cannot_run(
    record: Record, capability: tuple[int, int], precision: str, said: str
) -> None:
    """Flash attention needs Ampere and half precision."""
    expected = rf"compute capability 8\.0 and half precision; this is {said}"
    with pytest.raises(AssertionError, match=expected):
        record(partial(llama, "default", packed=True), 2, 64, capability=capability, precision=precision, steps=1)
