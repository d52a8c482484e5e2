"""Tests of batchfinder/training/synonyms.py."""

from __future__ import annotations

import pytest
from transformers.training_args import OptimizerNames

from batchfinder.errors import InvalidValue
from batchfinder.training.spec import (
    ATTENTION_NAMES,
    CHECKPOINTING_NAMES,
    OPTIMIZER_NAMES,
    PRECISION_NAMES,
    QUANTIZATION_NAMES,
    STRATEGIES,
)
from batchfinder.training.synonyms import SYNONYMS, one_of

NAMES = {
    "precision": PRECISION_NAMES,
    "optimizer": OPTIMIZER_NAMES,
    "quantization": QUANTIZATION_NAMES,
    "attention": ATTENTION_NAMES,
    "strategy": tuple(STRATEGIES),
    "gradient_checkpointing": (*CHECKPOINTING_NAMES, "none"),
}


@pytest.mark.parametrize(
    ("option", "typed", "ours"),
    [
        ("--precision", "bf16", "bf16-mixed"),
        ("--precision", "fp16", "16-mixed"),
        ("--precision", "16", "16-mixed"),
        ("--precision", "32-true", "fp32"),
        ("--precision", "no", "fp32"),
        ("precision", "BF16_Mixed", "bf16-mixed"),
        ("--optimizer", OptimizerNames.ADAMW_TORCH.value, "adamw"),
        ("--optimizer", OptimizerNames.ADAMW_TORCH_FUSED.value, "adamw-fused"),
        ("--optimizer", OptimizerNames.ADAMW_BNB.value, "adamw-8bit"),
        ("--optimizer", OptimizerNames.ADAMW_8BIT.value, "adamw-8bit"),
        ("--optimizer", OptimizerNames.PAGED_ADAMW_8BIT.value, "paged-adamw-8bit"),
        ("--optimizer", OptimizerNames.ADAMW_TORCH_4BIT.value, "adamw-4bit"),
        ("--optimizer", OptimizerNames.LION.value, "lion"),
        ("--optimizer", OptimizerNames.SCHEDULE_FREE_ADAMW.value, "schedule-free"),
        ("--quantization", "load_in_4bit", "nf4"),
        ("--quantization", "bnb_4bit", "nf4"),
        ("--quantization", "8bit", "int8"),
        ("--attention", "flash_attention_2", "flash"),
        ("--strategy", "deepspeed_stage_2", "zero2"),
        ("--gradient-checkpointing", "true", "full"),
    ],
)
def test_the_words_of_the_field(option: str, typed: str, ours: str) -> None:
    """What other tools call a value is taken, however it is written."""
    allowed = NAMES[option.removeprefix("--").replace("-", "_")]
    assert one_of(option, typed, allowed) == ours
    assert one_of(option, ours, allowed) == ours


def test_a_word_stands_for_one_of_our_names() -> None:
    """None stands for two names, or for one that there is not, or is one of our names for something else."""
    for option, others in SYNONYMS.items():
        words = [word for listed in others.values() for word in listed]
        assert set(others) <= set(NAMES[option])
        assert len(words) == len(set(words))
        assert not set(words) & set(NAMES[option])


@pytest.mark.parametrize(
    ("option", "typed", "nearest"),
    [
        ("--precision", "bf16-mxied", " Did you mean bf16-mixed or 16-mixed?"),
        ("--optimizer", "adamw_torc", " Did you mean adamw or adam?"),
        ("--quantization", "magic", ""),
    ],
)
def test_a_wrong_word(option: str, typed: str, nearest: str) -> None:
    """It is refused with all names, and with our names for the words that are most like it."""
    allowed = NAMES[option.removeprefix("--")]
    with pytest.raises(InvalidValue) as caught:
        one_of(option, typed, allowed)
    assert str(caught.value) == f"{option}: invalid value {typed!r}; expected one of {', '.join(allowed)}.{nearest}"


def test_a_word_for_a_name_that_is_not_allowed_here() -> None:
    """A synonym leads nowhere else."""
    with pytest.raises(InvalidValue, match="expected one of fp32"):
        one_of("--precision", "bf16", ("fp32",))
