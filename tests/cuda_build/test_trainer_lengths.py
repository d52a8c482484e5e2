"""`tune_trainer` where samples differ in length: the size trains an epoch's lengths, and segments are expandable for it."""

from __future__ import annotations

import pytest

from batchfinder.testing import CudaStubFixture

pytestmark = pytest.mark.cuda_build


def tuned_and_trained() -> tuple[int, list[int], bool, int]:
    """The size, the lengths of the micro-batches in its last try, whether segments are expandable, retries in training."""
    import random
    from tempfile import TemporaryDirectory
    from typing import Any

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from batchfinder import tune_trainer

    draw = random.Random(0)
    lengths = [min(256, max(4, int(draw.lognormvariate(4.2, 0.6)))) for _ in range(6000)]
    tried: list[list[int]] = []

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        ids = torch.ones(len(samples), longest, dtype=torch.long)
        mask = torch.tensor([[index < len(sample["input_ids"]) for index in range(longest)] for sample in samples])
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids}

    class Watched(Trainer):  # type: ignore[misc, unused-ignore]
        def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *rest: Any) -> torch.Tensor:
            tried[-1].append(inputs["input_ids"].shape[1])
            return super().training_step(model, inputs, *rest)

    def begin(*_: Any) -> None:
        tried.append([])

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=20000))
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "no",
        }
        arguments = TrainingArguments(folder, remove_unused_columns=False, max_steps=8, **options)
        data: Any = [{"input_ids": [1] * length} for length in lengths]
        trainer = Watched(model=model, args=arguments, train_dataset=data, data_collator=collate)
        begin()
        found = tune_trainer(trainer, cache=False, target_batch_size=1024, on_trial=begin)
        in_try = max(tried, key=len)  # the one that fails takes fewer steps
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        trainer.train()
    expandable = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    return found.batch_size, in_try, True in expandable, torch.cuda.memory_stats()["num_alloc_retries"] - before


def test_a_size_trains_the_lengths_of_an_epoch(cuda_stub: CudaStubFixture) -> None:
    """200 micro-batches and more without a cache given back; tries have other lengths, and the longest after each order."""
    size, lengths, expandable, retries = (
        cuda_stub(gpu="RTX 4090", memory="4GiB", values=False).run(tuned_and_trained).result
    )
    assert (expandable, retries) == (True, 0)
    assert len(set(lengths)) > 3
    assert lengths[-1] == max(lengths) == 256
    configured = cuda_stub(gpu="RTX 4090", memory="4GiB", values=False, allocator="expandable_segments:False")
    smaller, _, expandable, _ = configured.run(tuned_and_trained).result
    assert not expandable
    assert smaller < size
