"""Tests of batchfinder/recording/what_fits.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from batchfinder.devices.cards import card
from batchfinder.errors import InvalidValue, RecordingFailed
from batchfinder.memory_use.breakdown import bytes_over_time
from batchfinder.recording.simulation import Simulation
from batchfinder.recording.what_fits import FitSearch
from batchfinder.results import Shape
from batchfinder.sizing.what_fits import what_fits
from batchfinder.training.spec import StepOptions

pytestmark = pytest.mark.usefixtures("forked_recorders")

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "vocab_size": 4000,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, **SIZES},
    "deep-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 20, **SIZES},
    "wide-llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "vocab_size": 4000,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 2048,
        "max_position_embeddings": 1024,
    },
    "bert": {"architectures": ["BertForMaskedLM"], "model_type": "bert", "num_hidden_layers": 2, **SIZES},
}
TARGET = 8
KEPT = {"precision", "optimizer"}
"""So that six combinations are left."""

Looking = Callable[..., FitSearch]


@pytest.fixture
def looking(tmp_path: Path) -> Iterator[Looking]:
    """Makes one for a small model at so many tokens, with so much of a GPU."""
    with ExitStack() as stack:

        def make(model: str, budget: str, seq_len: int = 1024, asked: StepOptions | None = None) -> FitSearch:
            if model in MODELS:
                file = tmp_path / f"{model}.json"
                file.write_text(json.dumps(MODELS[model]))
                model = str(file)
            asked = asked or StepOptions()
            simulation = stack.enter_context(Simulation(asked.workload(model), asked.step()))
            return FitSearch(
                model, asked, card("a100 40gb", budget), TARGET, Shape(seq_len), simulation, lambda _: None
            )

        yield make


def all_that_train(look: FitSearch) -> list[StepOptions]:
    """Of the combinations that train the model, each recorded whole, those that fit."""
    trains = []
    for options in look.candidates(KEPT):
        if options.lora is None:
            try:
                steady = look.probe(options).steady_state(1, look.shape, exact=True)
            except InvalidValue:  # no causal model
                continue
            if steady.fits:
                trains.append(options)
    return trains


@pytest.mark.parametrize(
    ("model", "budget", "change"),
    [
        pytest.param("llama", "93MiB", "--loss chunked", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(
            "llama",
            "45MiB",
            "--gradient-checkpointing selective --loss chunked",
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        ),
        pytest.param(
            "bert", "84MiB", "--gradient-checkpointing full", marks=[pytest.mark.slow, pytest.mark.exhaustive]
        ),
        pytest.param("deep-llama", "140MiB", None, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_the_first_is_the_mildest_that_trains(looking: Looking, model: str, budget: str, change: str | None) -> None:
    """By all combinations, each recorded whole; and its micro-batch trains."""
    look = looking(model, budget)
    found = look.find(KEPT)
    trains = all_that_train(look)
    assert trains, "a budget in which something trains"
    assert StepOptions() not in trains, "and something has to change"
    assert found.fits[0].options == trains[0]
    assert change is None or found.fits[0].change == change
    for fit in found.fits[:1] if look._layers else found.fits:
        assert not fit.predicted
        steady = look.probe(fit.options).steady_state(fit.plan.micro_batch_size, look.shape, exact=True)
        assert steady.fits
        assert fit.plan.effective_batch_size == TARGET
        assert fit.peak_bytes == steady.timeline.max_reserved_bytes + look.card.device.context_bytes


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [
        (StepOptions(), 1),
        pytest.param(
            StepOptions(precision="bf16-mixed", gradient_checkpointing="selective"),
            2,
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        ),
        pytest.param(
            StepOptions(precision="bf16-true", lora=16, lora_targets="all-linear", gradient_checkpointing=True),
            2,
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        ),
    ],
    ids=["whole", "selective", "lora"],
)
@pytest.mark.slow
def test_a_deep_model_is_predicted_by_few_of_its_layers(
    looking: Looking, options: StepOptions, batch_size: int
) -> None:
    """What tensors hold at most, to a percent of what the whole model's recording says, and its FLOPs."""
    look = looking("deep-llama", "1GiB")
    predicted, flops = look._allocated(options, batch_size), look._flops(options)
    whole = look.probe(options).trace(batch_size, look.shape, exact=True)
    assert predicted == pytest.approx(bytes_over_time(whole).peak_bytes, rel=0.01)
    if batch_size == 1:
        assert flops == pytest.approx(whole.flops, rel=0.001)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(StepOptions(precision="bf16-true"), marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(StepOptions(optimizer="adamw-8bit"), marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(StepOptions(optimizer="adamw-offload"), marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(
            StepOptions(optimizer="adamw-offload", precision="bf16-true"),
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        ),
    ],
)
def test_what_is_ruled_out_does_not_fit(looking: Looking, options: StepOptions) -> None:
    """Weights, gradients and optimizer state are a lower bound, and no loose one."""
    look = looking("wide-llama", "1GiB", seq_len=16)
    look.find(KEPT)
    assert look._may_fit(options)
    trace = look.probe(options).trace(1, look.shape, exact=True)
    held = {kind: max(sizes) for kind, sizes in bytes_over_time(trace).by_kind.items()}
    states = sum(held[kind] for kind in ("parameters", "gradients", "optimizer"))
    for budget, may_fit in ((states, True), (int(0.9 * states), False)):
        look.card = card("a100 40gb", str(budget))
        assert look._may_fit(options) == may_fit


@pytest.mark.exhaustive
@pytest.mark.slow
def test_adapters_are_for_where_nothing_else_trains(looking: Looking) -> None:
    """They say so; and where they are allowed they come last."""
    found = looking("wide-llama", "51MiB", seq_len=16).find({"checkpointing", "loss"})
    assert found.fits
    assert all(fit.trains_adapters and fit.options.lora == 16 for fit in found.fits)
    assert found.ruled_out > 0
    assert found.larger_gpus
    roomy = looking("wide-llama", "80MiB", seq_len=16)
    roomy.target = 2048  # more than fit at once
    kept = roomy.find({"checkpointing", "loss"})
    assert kept.fits
    assert not any(fit.trains_adapters for fit in kept.fits)
    assert roomy.find({"checkpointing", "loss"}, allow=("lora",), count=9).fits[-1].trains_adapters


@pytest.mark.slow
@pytest.mark.exhaustive
def test_runners_up_have_larger_micro_batches(looking: Looking) -> None:
    """The one that computes most again, of the kind of training that the first is; what gains nothing is none."""
    first, second = looking("llama", "93MiB").find(KEPT).fits
    assert second.plan.micro_batch_size > first.plan.micro_batch_size
    assert second.flops > first.flops
    assert second.options.gradient_checkpointing is True
    found = looking("llama", "93MiB").find({"precision", "checkpointing"})
    sizes = [fit.plan.micro_batch_size for fit in found.fits]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("keep", ["precision", "optimizer", "loss", "checkpointing"])
def test_what_is_kept_is_in_no_candidate(looking: Looking, keep: str) -> None:
    """Of the options that may be changed."""
    name = "gradient_checkpointing" if keep == "checkpointing" else keep
    look = looking("llama", "1GiB")
    assert {getattr(options, name) for options in look.candidates()} != {getattr(StepOptions(), name)}
    assert {getattr(options, name) for options in look.candidates({keep})} == {getattr(StepOptions(), name)}


def test_offloaded_states_come_before_those_of_8_bits(looking: Looking) -> None:
    """They train the same: after mixed precision, which is faster too, and before what alters the states."""
    look = looking("llama", "1GiB")
    kinds = [(one.precision, one.optimizer) for one in look.candidates({"checkpointing", "loss"}) if one.lora is None]
    assert kinds == [
        *(("fp32", "adamw"), ("bf16-mixed", "adamw")),
        *(("fp32", "adamw-offload"), ("bf16-mixed", "adamw-offload")),
        *(("fp32", "adamw-8bit"), ("bf16-mixed", "adamw-8bit")),
        *(("bf16-true", "adamw"), ("bf16-true", "adamw-offload"), ("bf16-true", "adamw-8bit")),
    ]
    look.card = card("v100", None)  # whose 16-mixed has a GradScaler
    kinds = [(one.precision, one.optimizer) for one in look.candidates() if one.optimizer == "adamw-offload"]
    assert {precision for precision, _ in kinds} == {"fp32"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_offloading_takes_of_the_host(looking: Looking) -> None:
    """Parameters, gradients and two states of what trains, where the weights with their states are too much."""
    found = looking("wide-llama", "90MiB", seq_len=16).find({"precision", "checkpointing", "loss"})
    fit = found.fits[0]
    assert fit.change == "--optimizer adamw-offload"
    look = looking("wide-llama", "1GiB", seq_len=16)
    trace = look.probe(look.asked).trace(1, look.shape, exact=True)
    parameters = max(bytes_over_time(trace).by_kind["parameters"])
    assert fit.host_bytes == pytest.approx(4 * parameters, rel=0.01)
    assert found.to_json()["fits"][0]["host_bytes"] == fit.host_bytes
    assert [other.host_bytes for other in found.fits[1:] if other.options.optimizer == "adamw-8bit"] in ([], [0])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_model_that_counts_on_its_layers_is_recorded_whole(
    looking: Looking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that indexes its layers by a number of its own fails with fewer: nothing is predicted then."""
    code = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(20)])
        self.head = nn.Linear(32, 100)

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids)
        for number in range(20):
            hidden = self.layers[number](hidden).relu()
        return self.head(hidden).mean()

def net():
    return Net()
"""
    (tmp_path / "counts.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    look = looking("counts:net", "1MiB")
    assert look._layers == 20
    found = look.find()
    assert look._layers == 0
    assert found.tried >= 1


def test_the_function(tmp_path: Path) -> None:
    """What fits as asked is left as it is: no change, no runners-up, no other GPU; and what it cannot take."""
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(MODELS["llama"]))
    found = what_fits(str(file), gpu="T4", seq_len=64, target_batch_size=4, precision="fp16")
    (only,) = found.fits
    assert (only.change, only.plan.micro_batch_size, only.plan.accumulation) == ("", 4, 1)
    assert only.options == StepOptions(precision="16-mixed")
    assert (found.larger_gpus, found.several_gpus) == ((), None)
    assert found.to_json()["fits"][0]["micro_batch_size"] == 4
    for wrong in ({"keep": ("loss", "colour")}, {"allow": ("dora",)}, {"colour": 1}, {"seq_len": 4096}):
        with pytest.raises(InvalidValue):
            what_fits(str(file), **{"gpu": "T4", "seq_len": 64, **wrong})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_options_that_a_model_fails_with_are_left_out(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure with an option that was not asked for is no answer; with what was asked for it is an error."""
    look = looking("llama", "93MiB")
    real = look._allocated

    def fails(options: StepOptions, batch_size: int = 1) -> int:
        if options.loss == "chunked":
            raise RecordingFailed("this model has no such loss")
        return real(options, batch_size)

    monkeypatch.setattr(look, "_allocated", fails)
    found = look.find(KEPT)
    assert [fit.options.loss for fit in found.fits] == ["default"] * len(found.fits)
    assert found.fits[0].change == "--gradient-checkpointing selective"
    asked = looking("llama", "93MiB", asked=StepOptions(loss="chunked"))
    monkeypatch.setattr(asked, "_allocated", fails)
    with pytest.raises(RecordingFailed):
        asked._may_train(asked.asked)


def test_what_a_micro_batch_has_at_least(looking: Looking) -> None:
    """Micro-batches are no smaller, and where the target is to be met, no larger than what divides it."""
    look = looking("llama", "4GiB")
    look.min_micro_batch = 3
    assert look._accumulated(2) is None
    assert str(look._accumulated(5)) == "4 x 2 = 8"
    look.target, look.min_micro_batch = 256, 1
    assert str(look._accumulated(15)).startswith("15 x 17 = 255")
    look.exact = True
    assert str(look._accumulated(15)) == "8 x 32 = 256"
    with pytest.raises(InvalidValue, match="min_micro_batch: invalid value 5; expected from 1 to 4, a GPU's share"):
        what_fits("bert-base", gpu="T4", seq_len=64, target_batch_size=8, num_devices=2, min_micro_batch=5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_plan_with_smaller_micro_batches_is_not_taken(looking: Looking) -> None:
    """Neither as the answer nor as a runner-up; what is said to be needed is of the smallest that may be taken."""
    usual = looking("llama", "60MiB").find(KEPT)
    assert [fit.plan.micro_batch_size for fit in usual.fits] == [1, 2]
    look = looking("llama", "60MiB")
    look.min_micro_batch = 2
    found = look.find(KEPT)
    assert found.fits == usual.fits[1:]
    assert (found.min_micro_batch, found.sample_bytes > usual.sample_bytes) == (2, True)
    look.min_micro_batch = 4
    assert look.find(KEPT).fits == ()
