"""Scaled traces against recorded ones, for models of the zoo, at sizes that no fit has seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload

os.environ["HF_HUB_OFFLINE"] = "1"

pytestmark = pytest.mark.slow

Record = Callable[..., Trace]
TEXT = ((64, 384), (3, 128), (6, 320))
SHORT, LONG = ((64, 384), (3, 128)), ((64, 384), (6, 320))
FIXED = ((224,), (3, 224))
UNALIGNED = ((100, 250), (3, 100), (6, 132))

# What is built, how it steps, and the sizes: the lengths announced, and what is to be compared.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "bert": ({"spec": "bert-base"}, {}, TEXT),
    "bert-unaligned": ({"spec": "bert-base"}, {"capability": (6, 1)}, UNALIGNED),
    "bert-eager-bf16-mixed": ({"spec": "bert-base", "attention": "eager"}, {"precision": "bf16-mixed"}, SHORT),
    "bert-accumulated": ({"spec": "bert-base"}, {"micro_batches": 2, "optimizer": "sgd-momentum", "steps": 1}, LONG),
    "bert-checkpointed-16-mixed": (
        {"spec": "bert-base", "gradient_checkpointing": True},
        {"precision": "16-mixed", "optimizer": "adam"},
        SHORT,
    ),
    "distilbert": ({"spec": "distilbert"}, {"optimizer": "adamw-fused", "precision": "bf16-true"}, LONG),
    "roberta": ({"spec": "roberta-base"}, {"precision": "16-mixed", "capability": (8, 0)}, SHORT),
    "gpt2-flash": (
        {"spec": "gpt2", "attention": "flash"},
        {"precision": "bf16-mixed", "capability": (8, 0), "flash": True, "micro_batches": 2, "steps": 1},
        LONG,
    ),
    "t5": ({"spec": "t5-small"}, {"optimizer": "adafactor", "steps": 1}, SHORT),
    "llama": ({"spec": "llama-3.2-1b"}, {"precision": "bf16-true", "capability": (8, 0)}, TEXT),
    "llama-hopper": (
        {"spec": "llama-3.2-1b", "gradient_checkpointing": True},
        {"precision": "bf16-mixed", "capability": (9, 0), "optimizer": "sgd-momentum"},
        LONG,
    ),
    "qwen-eager": ({"spec": "qwen2.5-0.5b", "attention": "eager"}, {"optimizer": "adam", "steps": 1}, SHORT),
    "vit": ({"spec": "vit-base"}, {"precision": "bf16-mixed", "capability": (8, 0)}, FIXED),
    "resnet": ({"spec": "resnet50"}, {"optimizer": "sgd-momentum", "precision": "16-mixed"}, FIXED),
    "bert-forward": ({"spec": "bert-base", "attention": "eager"}, {"mode": "forward"}, LONG),
    "gpt2-inference": ({"spec": "gpt2"}, {"mode": "inference", "precision": "bf16-true"}, SHORT),
}


def build(**arguments: Any) -> Workload:
    """Imported late: transformers takes seconds."""
    from tests.builders.few_layers import build as build_few_layers

    return build_few_layers(**arguments)


@pytest.mark.parametrize("case", CASES)
def test_scaled_equals_recorded(record: Record, case: str) -> None:
    """Event by event and byte by byte the same, from at most three recordings; nothing of these is unscaled."""
    arguments, how, (seq_lens, *sizes) = CASES[case]
    import transformers  # noqa: F401  # so that the forks need not

    with ThreadPoolExecutor(2) as pool:

        def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
            return pool.submit(record, partial(build, **arguments), batch_size, seq_len, **how)

        source = TraceSource(submit, dict.fromkeys((*seq_lens, *(seq_len for _, seq_len in sizes))))
        source.prefetch()
        exact = {size: submit(*size) for size in sizes}
        for size in sizes:
            scaled, recorded = source.at(*size), exact[size].result()
            assert scaled.structure == recorded.structure
            assert scaled.sizes == recorded.sizes
            assert scaled == recorded
    assert source.unscaled == []
    assert source.recordings <= 3
