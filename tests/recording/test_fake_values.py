"""Tests of batchfinder/recording/fake_values.py: code that reads values is answered, and the answer is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.utils._mode_utils import no_dispatch

from batchfinder.recording import fake_values
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload
from tests.builders import recurrent, small
from tests.builders.recurrent import FEATURES
from tests.builders.small import HIDDEN, IN

Record = Callable[..., Trace]


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("item", "a value read from a tensor made by aten.sum.default is taken to be 1.0"),
        ("bool", "a value read from a tensor made by aten.all.default is taken to be True"),
        ("mask", "aten.index.Tensor: its output is taken to be as large as it can get"),
        ("nonzero", "aten.nonzero.default: its output is taken to be as large as it can get"),
        ("written", "a value read from a tensor made by aten.zeros.default is taken to be 1.0"),
        ("filled", "a value read from a tensor made by aten.mean.default is taken to be 3.0"),
        ("asserted", "a value read from a tensor made by aten.lt.Scalar is taken to be True"),
        ("tolist", "a value read from a tensor made by aten.addmm.default is taken to be 1.0"),
    ],
)
def test_reading_a_value_is_answered(record: Record, way: str, told: str) -> None:
    """The step is recorded to its end, and what had to be made up stands in `unmodelled`."""
    trace = record(partial(small.reading, way), 8)
    assert told in trace.unmodelled
    assert trace.structure.marks[-1].stage == "end"
    assert sum(k == "gradient" for k in trace.structure.kinds) == 4


@pytest.mark.parametrize(
    "way", ["known count", "known shape", "known to the CPU", "known in place", "known in floating point"]
)
def test_what_comes_from_no_weight_is_known(record: Record, way: str) -> None:
    """Counts, lengths and grids of a batch are computed beside the recording, through views and copies."""
    assert record(partial(small.reading, way), 8).unmodelled == ("kernels' small scratch tensors",)


def test_what_is_written_over_is_known_no_more(record: Record) -> None:
    """A value that depends on a weight, written through a view, is not answered with the old one."""
    trace = record(partial(small.reading, "known no more"), 8)
    assert "a value read from a tensor made by aten.sum.default is taken to be 1" in trace.unmodelled


def test_the_selected_elements_alone_are_recorded(record: Record) -> None:
    """`numbers[mask]` of a known mask is as long as the mask says; the indices on the way are recorded too."""
    trace = record(partial(small.reading, "known shape"), 8, mode="forward")
    selected = [
        size
        for size, operator in zip(trace.sizes, trace.structure.operators, strict=True)
        if operator in ("aten.index.Tensor", "aten.nonzero.default", "aten.repeat_interleave.Tensor")
    ]
    # Three places and three numbers; three positions again; ten of 0 to 4, each as often as it says.
    assert selected == [24, 24, 24, 80]


@pytest.mark.parametrize("way", ["bool", "sum", "ones"])
def test_all_is_true(record: Record, way: str) -> None:
    """`mask.all()`, also as transformers writes it (`mask.sum() == mask.numel()`), means that nothing is masked."""
    trace = record(partial(small.reading, way), 8)
    assert "aten.exp.default" not in trace.structure.operators


def test_equality_is_not_assumed(record: Record) -> None:
    """That some sum equals some number is not taken for granted: only a mask's sum is known."""
    trace = record(partial(small.reading, "equal"), 8)
    assert "aten.exp.default" not in trace.structure.operators


@pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b", "qwen2.5-0.5b", "bert-base", "roberta-base"])
def test_unmasked_batches_need_no_mask(record: Record, model: str) -> None:
    """On a GPU transformers finds that nothing is padded and makes no mask, so Ampere takes the flash kernel."""
    from tests.builders.few_layers import build

    trace = record(partial(build, spec=model), 2, 64, capability=(8, 0), precision="bf16-mixed", steps=1)
    attention = {name for name in trace.structure.operators if "attention" in name}
    assert attention == {
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_backward.default",
    }


def test_masked_selection_is_as_large_as_can_be(record: Record) -> None:
    """`x[mask]` is taken to select every element."""
    trace = record(partial(small.reading, "mask"), 8)
    selected = [n for n, op in zip(trace.sizes, trace.structure.operators, strict=True) if op == "aten.index.Tensor"]
    # Row and column of each element, and then the elements, in both steps.
    assert selected == [16 * 8 * HIDDEN, 4 * 8 * HIDDEN] * 2


def test_nothing_is_read_silently(record: Record) -> None:
    """A model that reads nothing has nothing of the kind in `unmodelled`."""
    trace = record(small.mlp, 8)
    assert not [text for text in trace.unmodelled if "taken to be" in text]
    assert IN


B, L = 6, 10
DATA, OUTPUT = 4 * B * L * FEATURES, 4 * B * L * recurrent.HIDDEN


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_and_unpacked(record: Record, batch_first: bool) -> None:
    """Packing copies the data, by way of another copy if the batch comes first; unpacking copies the output."""
    trace = record(partial(recurrent.layers, "GRU", packed=True, batch_first=batch_first), B, L)
    structure = trace.structure
    start, end = (mark.position for mark in structure.marks if (mark.step, mark.stage) in ((0, "forward"), (0, "loss")))
    made = [i for i in structure.order[start:end] if i >= 0]
    by_operator = {
        name: [trace.sizes[i] for i in made if structure.operators[i] == f"aten.{name}.default"]
        for name in ("_pack_padded_sequence", "full", "_cudnn_rnn")
    }
    assert by_operator["_pack_padded_sequence"] == [DATA]
    assert by_operator["full"] == [OUTPUT]
    assert by_operator["_cudnn_rnn"][:2] == [OUTPUT, 4 * B * recurrent.HIDDEN]
    assert 6 * OUTPUT in by_operator["_cudnn_rnn"]


def test_the_state_has_the_batch_that_was_packed(record: Record) -> None:
    """The number of samples in the first step is read from the packed sequence, and is not made up."""
    trace = record(partial(recurrent.layers, "LSTM", packed=True), B, L)
    states = [
        size
        for size, operator in zip(trace.sizes, trace.structure.operators, strict=True)
        if operator == "aten.zeros.default" and size < 4 * 4 * recurrent.HIDDEN * recurrent.HIDDEN
    ]
    assert states[:2] == [4 * B * recurrent.HIDDEN] * 2


def test_full_lengths_are_told(record: Record) -> None:
    """The recording says that it takes all sequences to be of full length."""
    told = "aten._pack_padded_sequence.default: its output is taken to be as large as it can get"
    assert told in record(partial(recurrent.layers, "GRU", packed=True), B, L).unmodelled
    assert told not in record(partial(recurrent.layers, "GRU"), B, L).unmodelled


def test_the_backward_goes_all_the_way(record: Record) -> None:
    """Packed layers get gradients, as others do."""
    trace = record(partial(recurrent.layers, "GRU", packed=True, batch_first=True), B, L)
    assert "gradient" in trace.structure.kinds


def _mixtral(experts: str, uneven: bool) -> Workload:
    from transformers import MixtralConfig, MixtralForCausalLM

    from batchfinder.models.pretrained import workload_from_model

    config = MixtralConfig(
        num_hidden_layers=3, hidden_size=256, intermediate_size=896, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1000, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = experts
    if uneven:

        def same_experts(self: object, func: object, args: object, made: list[torch.Tensor]) -> list[object]:
            with no_dispatch():
                return [None, torch.arange(made[1].size(-1)).expand(made[1].shape).contiguous()]

        fake_values.KnownValues._choices = same_experts  # type: ignore[method-assign, assignment]
    return workload_from_model(MixtralForCausalLM(config), "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_routing_does_not_change_the_peak(record: Record, experts: str) -> None:
    """All tokens sent to the same two experts of eight take as much memory at the peak as tokens spread evenly.

    An expert's activations are kept for the backward, so in a loop over experts too it is the sum that counts.
    """
    traces = [
        record(partial(_mixtral, experts, uneven), 4, 512, capability=(8, 0), precision="bf16-true")
        for uneven in (False, True)
    ]
    even, uneven = map(_most_bytes, traces)
    assert even == uneven
    assert "what is largest (experts, classes): each is chosen equally often" in traces[0].unmodelled


def _most_bytes(trace: Trace) -> int:
    alive = accumulate(trace.sizes[block] if block >= 0 else -trace.sizes[~block] for block in trace.structure.order)
    return max(alive)
