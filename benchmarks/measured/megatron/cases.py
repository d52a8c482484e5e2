"""Megatron-LM's functional tests in plain PyTorch, without pipeline parallelism; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import ALLOCATED, Case, read_rows
from benchmarks.measured.megatron.model import LAYERS, WIDTH, WORDS, padded

# The factory, its arguments, micro-batches of a step, and the tokens of a sample.
CASES: dict[str, tuple[str, dict[str, int | bool], int, int]] = {
    "gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather": (
        "gpt", {"optimizers": 8}, 1, 1024,
    ),
    "gpt3_mcore_tp4_pp1": ("gpt", {"ranks": 4, "wide": True}, 2, 1024),
    "gpt3_mcore_tp4_pp1_resume_torch": ("gpt", {"ranks": 4}, 2, 1024),
    "gpt3_mcore_tp4_pp1_resume_torch_dist": ("gpt", {"ranks": 4}, 2, 1024),
    "t5_mcore_tp1_pp1_vp1": ("t5", {}, 1, 512),
    "t5_mcore_tp2_pp1_vp1": ("t5", {"ranks": 2}, 2, 512),
}  # fmt: skip
_CARDS = {"h100": "H100 80GB", "gb200": "B200"}
# CUBLAS_WORKSPACE_CONFIG=:4096:8, of the forward's thread and the backward's, where PyTorch takes less on its own.
_WORKSPACES = 2 * (8 * 4096 * 1024 - 8519680)


def cases() -> list[Case]:
    """All rows, each the most allocated by the last iteration."""
    found = []
    for row in read_rows(Path(__file__).parent):
        case = row["case"].partition("/")[2]
        builder, arguments, micro_batches, length = CASES[case]
        card = next((card for name, card in _CARDS.items() if f"dgx_{name}" in row["gpu"]), "A100 80GB")
        found.append(
            Case(
                name=f"{case}, {row['golden'].removeprefix('golden_values_').removesuffix('.json')}",
                technique="eager" if row["tensor_parallel"] == "1" else "tensor parallel",
                gpu=card,
                statistic=ALLOCATED,
                published_bytes=int(row["mem_max_allocated_last"]),
                workload=WorkloadSpec(f"benchmarks.measured.megatron.model:{builder}", arguments),
                step=StepConfig(precision="bf16-true", micro_batches=micro_batches),
                batch_size=4,
                seq_len=length,
                outside_bytes=_WORKSPACES if card.startswith("A100") else 0,
            )
        )
    return found


def others() -> dict[str, list[dict[str, Any]]]:
    """What Megatron-LM's own formula says of the rows of GPT, as rows for `scores.of_rows`; of T5 it says nothing.

    Without sequence parallelism: 18 bytes for a parameter on this rank, or 6 and 12 over the GPUs with the distributed
    optimizer; activations of 10 + 24 / ranks bytes for each token, channel and layer, of the embedding and of the
    logits, and 5 % more.

    Source: `compute_weight_and_optimizer_memory` and `compute_activation_memory_without_sp` in
    https://github.com/NVIDIA/Megatron-LM/blob/00caa53af30912914981c86f39db123961678bbd/megatron/training/theoretical_memory_usage.py.
    """
    answers = []
    for case, row in zip(cases(), read_rows(Path(__file__).parent), strict=True):
        builder, arguments, _, length = CASES[row["case"].partition("/")[2]]
        if builder == "gpt":
            ranks = int(row["tensor_parallel"])
            logits, embedding = padded(WORDS, ranks), ranks * padded(WORDS, ranks) * WIDTH
            parameters = (LAYERS * (12 * WIDTH * WIDTH + 4 * WIDTH) + 2 * WIDTH + embedding) / ranks
            of_parameter = 6 + 12 / arguments["optimizers"] if "optimizers" in arguments else 18
            of_channel = LAYERS * (10 + 24 / ranks) + 1 + 2  # of the layers, the embedding's dropout and the last norm
            tokens = 4 * length
            activations = 1.05 * tokens * (of_channel * WIDTH + 8 + 2 * logits)
            predicted = round(parameters * of_parameter + activations)
            published = int(row["mem_max_allocated_last"])
            error = predicted / published - 1
            answers.append(
                {"name": case.name, "published_bytes": published, "predicted_bytes": predicted, "error": error}
            )
    return {"Megatron-LM's formula": answers}
