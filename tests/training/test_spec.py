"""Options of a step, checked, and lengths that suit a model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.training.spec import StepOptions, WorkloadFacts, seq_lens_of

FACTS = WorkloadFacts("f" * 64, 512, "tokens", False, {"torch": "2.13.0"})


def test_options_in_other_words() -> None:
    """Names of other tools are ours, and None is what there is without the option."""
    asked = StepOptions.checked(precision="bf16", optimizer="adamw_torch_fused", attention=None, lora=8, mode=None)
    assert asked == StepOptions(precision="bf16-mixed", optimizer="adamw-fused", lora=8)
    how = [True, False, "full", "none", "every-3", "selective"]
    found = [StepOptions.checked(gradient_checkpointing=each).gradient_checkpointing for each in how]
    assert found == [True, False, True, False, "every-3", "selective"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precison": "bf16"}, "precison: invalid value 'bf16'; expected none of this name, but mode, precision, "),
        ({"recorder": "cuda-build"}, "recorder: invalid value 'cuda-build'; expected none of this name, but mode,"),
        ({"precision": "fp8"}, "precision: invalid value 'fp8'; expected one of fp32, bf16-mixed,"),
        ({"lora": 0}, "lora: invalid value 0; expected a whole number of at least 1."),
        ({"lora": True}, "lora: invalid value True; expected a whole number of at least 1."),
        ({"gpus": 1 << 50}, f"gpus: invalid value {1 << 50}; expected a whole number from 1 to {1 << 40}."),
        ({"packed": "no"}, "packed: invalid value 'no'; expected True or False."),
        (
            {"gradient_checkpointing": "every-x"},
            "gradient_checkpointing: invalid value 'every-x'; expected one of",
        ),
        ({"gradient_checkpointing": 2}, "gradient_checkpointing: invalid value 2; expected one of full, every-2,"),
        ({"lora_targets": "q_proj"}, "lora_targets: invalid value 'q_proj'; expected a --lora rank for them."),
        ({"quantization": "nf4"}, "quantization: invalid value 'nf4'; expected a --lora rank with it"),
        (
            {"optimizer_in_backward": True, "precision": "fp16"},
            "optimizer_in_backward: invalid value True; expected",
        ),
        ({"strategy": "fsdp2"}, "gpus: invalid value 1; expected at least 2 with fsdp2."),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], said: str) -> None:
    """Each is one error that names the option as Python has it."""
    with pytest.raises(InvalidValue) as caught:
        StepOptions.checked(**given)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("most", "unit", "seq_lens"),
    [
        (None, "tokens", (64, 128, 256, 320, 384, 512)),
        (256, "tokens", (64, 128, 256)),
        (32, "tokens", (32,)),
        (None, "pixels", (224,)),
        (None, "none", (None,)),
    ],
)
def test_usual_lengths(most: int | None, unit: str, seq_lens: tuple[int | None, ...]) -> None:
    """Where no length is asked for, a model gets those that suit it."""
    facts = replace(FACTS, max_seq_len=most, seq_len_unit=unit)
    assert seq_lens_of("model", (), facts, (64, 128, 256, 320, 384, 512)) == seq_lens


def test_the_usual_side_of_images() -> None:
    """That which the model is made for, where it says so."""
    facts = replace(FACTS, max_seq_len=None, seq_len_unit="pixels", side=384)
    assert seq_lens_of("model", (), facts) == (384,)


def test_a_length_for_samples_of_one_shape() -> None:
    """One row, whatever lengths are asked for; a warning says why, but only where lengths were asked for."""
    fixed = replace(FACTS, seq_len_unit="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seq_lens_of("mine:net", (), fixed, (64, 128)) == (None,)
    with pytest.warns(UserWarning, match="^samples of mine:net have one shape: a seq_len makes no difference to them$"):
        assert seq_lens_of("mine:net", (64, 1024), fixed, (64, 128)) == (None,)


def test_a_length_beyond_the_positions() -> None:
    """A length asked for that the model does not allow is an error, never silently left out."""
    expected = "^seq_len: invalid value 513; expected at most 512 tokens, the most that model allows"
    with pytest.raises(InvalidValue, match=expected):
        seq_lens_of("model", (64, 513), FACTS)
