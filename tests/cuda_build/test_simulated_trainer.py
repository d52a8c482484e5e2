"""What `simulate` says of a Trainer is what PyTorch's CUDA build allocates when it trains."""

from __future__ import annotations

from typing import Any

import pytest

from batchfinder.testing import CudaStubFixture

pytestmark = pytest.mark.cuda_build

GPU, SIZE = "A100 80GB", 16
WORDS, LENGTH = 5000, 64


def trained(options: dict[str, Any]) -> tuple[int, int]:
    """The peaks of three steps of training, allocated and reserved."""
    import torch

    trainer = make_trainer(options, use_cpu=False)
    trainer.train()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def make_trainer(options: dict[str, Any], use_cpu: bool) -> Any:
    """A Trainer of a GPT-2 with texts of one length, which accumulates where it is not told otherwise."""
    from tempfile import mkdtemp

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        text = torch.tensor([sample["input_ids"] for sample in samples])
        return {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text}

    model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=WORDS, n_positions=LENGTH))
    usual: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(
        mkdtemp(),
        use_cpu=use_cpu,
        max_steps=3,
        per_device_train_batch_size=SIZE,
        **{**usual, "gradient_accumulation_steps": 3, **options},
    )
    data: Any = [{"input_ids": [1 + index % 29] * LENGTH, "labels": [1] * LENGTH} for index in range(256)]
    return Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"bf16": True}, marks=pytest.mark.exhaustive),
        pytest.param({"bf16": True, "label_smoothing_factor": 0.1}, marks=pytest.mark.exhaustive),
        pytest.param({"bf16": True, "activation_checkpointing": True}, marks=pytest.mark.exhaustive),
        {"gradient_accumulation_steps": 1, "optim": "adamw_torch"},
    ],
    ids=str,
)
def test_the_peaks_are_those_of_training(cuda_stub: CudaStubFixture, options: dict[str, Any]) -> None:
    """What is reserved to the byte, and what is allocated to 0.2 %: small scratch tensors of kernels are left out."""
    from batchfinder import simulate

    found = simulate(make_trainer(options, use_cpu=True), gpu=GPU, max_batch_size=SIZE)
    allocated, reserved = cuda_stub(gpu=GPU).run(trained, options).result
    assert found.peak_allocated_bytes == pytest.approx(allocated, rel=0.002)
    assert found.peak_reserved_bytes == reserved
