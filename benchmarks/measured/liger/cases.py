"""Liger's own benchmark functions, run on the fake GPU at the commits that have the rows.

Needs a clone of https://github.com/linkedin/Liger-Kernel, named by LIGER_KERNEL_CLONE, and the triton package. From the
clone each row's commit is taken: the library, the benchmark scripts, and the tests that some scripts have their PyTorch
versions in, as they were when the row was measured. Today's PyTorch, Triton and transformers stand in for those of the
time.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from batchfinder.simulator.trace import StageMark, Trace
from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import ALLOCATED, Case, read_rows

HERE = Path(__file__).parent
GPUS = {
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100 80GB",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
}
# What needs other packages, or a compiler that this benchmark does not stand in for.
# And one whose chunks are of one token, thousands of them.
LEFT_OUT = {"torch_compile", "megatron", "megatron_cross_entropy", "deepspeed_tiled", "distill_jsd_loss liger"}
SCRIPTS = {
    "distill_cosine_loss": "distill_cosine_loss",
    "tiled_geglu": "tiled_mlp",
    "tiled_swiglu": "tiled_mlp",
    "fused_linear_cpo_loss": "cpo_loss",
    "fused_linear_orpo_loss": "orpo_loss",
    "fused_linear_simpo_loss": "simpo_loss",
    "fused_linear_grpo_loss_token": "grpo_loss",
    "fused_linear_grpo_loss_sequence": "grpo_loss",
    "sparse_multi_token_attention": "sparse_multi_token_attention",
}
# What makes rows of a kernel, or of its Liger version alone, differ; README.md says how each was found.
NOTES = {
    "embedding": "12.0 or 13.5 GiB of earlier measurements in the same process, alike in all rows of a setting",
    "rms_norm liger": "the buffer of the sum over rows, which PyTorch makes in its reduction kernel",
    "fused_linear_cross_entropy liger": "measured with the fp32 copy of each chunk, which the row's commit removes",
}
FOLDERS = ("src", "benchmark/scripts", "test")
STEPS = 3
"""A benchmark function calls what it measures ten times and takes the median; the third is as every later one."""


@dataclass(frozen=True)
class KernelCase(Case):
    """A row, of which only what is measured counts: what was allocated and released before it does not."""

    def predicted_bytes(self, trace: Trace) -> int:
        """The peak of the last call, with the tensors that are there when it begins."""
        structure = trace.structure
        begin = max(mark.position for mark in structure.marks if mark.stage == "loss")
        end = min((mark.position for mark in structure.marks if mark.position > begin), default=len(structure.order))
        alive: dict[int, None] = {}
        for event in structure.order[:begin]:
            if event >= 0:
                alive[event] = None
            else:
                del alive[~event]
        order = (*alive, *structure.order[begin:end])
        marks = (StageMark(0, 0, "loss"),)
        return super().predicted_bytes(replace(trace, structure=replace(structure, order=order, marks=marks)))


def cases() -> Iterator[Case]:
    """The rows that can be run, those of one script together."""
    rows = [
        row
        for row in read_rows(HERE)
        if not {row["kernel_provider"], row["kernel_name"], f"{row['kernel_name']} {row['kernel_provider']}"} & LEFT_OUT
    ]
    for row in rows:
        yield KernelCase(
            name=" ".join(
                (row["kernel_name"], row["kernel_provider"], row["kernel_operation_mode"], row["liger_version"],
                 f"{row['x_name']}={row['x_value']}", row["extra_benchmark_config_str"], GPUS[row["gpu_name"]])
            ),
            technique=f"{row['kernel_name']}, {'Liger' if row['kernel_provider'].startswith('liger') else 'PyTorch'}",
            gpu=GPUS[row["gpu_name"]],
            statistic=ALLOCATED,
            published_bytes=round(float(row["y_value_50"]) * 2**20),
            workload=WorkloadSpec(
                "benchmarks.measured.liger.cases:workload",
                {
                    "kernel": row["kernel_name"],
                    "provider": row["kernel_provider"],
                    "mode": row["kernel_operation_mode"],
                    "commit": row["commit"],
                    "config": row["extra_benchmark_config_str"],
                },
            ),
            step=StepConfig(optimizer="sgd", steps=STEPS),
            without=("parameter", "gradient", "input"),  # of the module around the function, which has its own
            batch_size=int(float(row["x_value"])),
            seq_len=None,
            note=NOTES.get(row["kernel_name"], NOTES.get(f"{row['kernel_name']} {row['kernel_provider']}", "")),
        )  # fmt: skip


def checkout(commit: str) -> Path:
    """The library and the benchmark scripts of one commit, in a folder that later runs find."""
    clone = os.environ.get("LIGER_KERNEL_CLONE")
    if clone is None:
        raise RuntimeError("set LIGER_KERNEL_CLONE to a clone of https://github.com/linkedin/Liger-Kernel")
    folder = Path(tempfile.gettempdir()) / f"liger-kernel-{commit}"
    if not folder.exists():
        git = ("git", "-C", clone)
        listed = subprocess.run(
            [*git, "ls-tree", "-r", "--name-only", commit, *FOLDERS], check=True, capture_output=True
        )
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        for name in listed.stdout.decode().splitlines():
            if name.endswith(".py"):
                text = subprocess.run([*git, "show", f"{commit}:{name}"], check=True, capture_output=True).stdout
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes(text)
        # The scripts ask for its version.
        information = partial / "src" / "liger_kernel-0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0\n")
        with contextlib.suppress(OSError):  # another process was first
            partial.rename(folder)
    return folder


def stand_in_for_names(folder: Path) -> None:
    """Let a library of then import what transformers no longer has, or no longer has there: texts and decorators."""

    def absent(*args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) and args[0] is not absent else absent

    for path in folder.rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if not isinstance(statement, ast.ImportFrom) or not (statement.module or "").startswith("transformers"):
                continue
            try:
                module = importlib.import_module(statement.module or "")
            except ImportError:
                module = sys.modules[statement.module or ""] = ModuleType(statement.module or "")
            for alias in statement.names:
                if not hasattr(module, alias.name):
                    setattr(module, alias.name, "" if alias.name.isupper() else absent)


def rotary_embedding(head: Any, device: Any = None, **settings: Any) -> Any:
    """transformers' class, which was given the size of a head once, and a config today."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=head) if isinstance(head, int) else head
    return with_product(LlamaRotaryEmbedding(settings.get("config", config)).to(device))


def with_product(rotary: Any) -> Any:
    """A rotary embedding that multiplies matrices for its angles, as transformers did then, and takes a workspace so.

    Source: https://github.com/huggingface/transformers/blob/v4.55.0/src/transformers/models/llama/modeling_llama.py and
    modeling_llama4.py beside it.
    """

    def multiply(module: Any, inputs: Any) -> None:
        module.inv_freq[None, :, None].float() @ inputs[1][:1, None, :].float()

    rotary.register_forward_pre_hook(multiply)
    return rotary


def workload(kernel: str, provider: str, mode: str, commit: str, config: str) -> Any:
    """What one benchmark function measures, as the loss of a model that has it set up in its first forward.

    The batch size stands for what the function calls `x`.
    """
    import torch

    from batchfinder import Workload
    from batchfinder.recording import fake_values

    fake_values._KNOWN_BYTES = 512 << 20  # the places of 32,768 tokens among 128 experts, as PyTorch's mixture has them
    folder = checkout(commit)
    sys.path[:0] = [str(folder / "src"), str(folder / "benchmark" / "scripts"), str(folder)]
    # Python's own `test`, and what a row of another commit, or before it in this process, has imported.
    for name in [
        name for name in sys.modules if name.split(".")[0].startswith(("test", "liger_kernel", "utils", "benchmark_"))
    ]:
        del sys.modules[name]
    stand_in_for_names(folder / "src")
    with contextlib.suppress(ImportError):
        # The scripts make their tensors where this says; it looks for a real GPU.
        importlib.import_module("liger_kernel.utils").infer_device = lambda: "cuda"
    utils = importlib.import_module("utils")
    held: list[Any] = []

    def keep(measured: Callable[[], Any], *_: Any, **__: Any) -> tuple[float, ...]:
        # With the tensors of the benchmark function, which is still running when it measures.
        held.extend((measured, dict(sys._getframe(1).f_locals), dict(sys._getframe(2).f_locals)))
        return (0.0, 0.0, 0.0)

    utils._test_memory = keep
    script = importlib.import_module(f"benchmark_{SCRIPTS.get(kernel, kernel)}")
    if hasattr(script, "LlamaRotaryEmbedding"):
        script.LlamaRotaryEmbedding = rotary_embedding
    if hasattr(script, "Llama4TextRotaryEmbedding"):  # it was given a device as well
        rotary = script.Llama4TextRotaryEmbedding
        script.Llama4TextRotaryEmbedding = lambda config, device=None: with_product(rotary(config).to(device))
    if hasattr(script, "apply_rotary_pos_emb"):  # it was given the positions as well
        rotate = script.apply_rotary_pos_emb
        script.apply_rotary_pos_emb = lambda q, k, cos, sin, *_: rotate(q, k, cos, sin)
    if hasattr(script, "TorchNeighborhoodAttention"):  # whose mask is filled one element at a time
        script.TorchNeighborhoodAttention._create_neighborhood_mask = lambda _, length, device: torch.zeros(
            length, length, device=device, dtype=torch.bool
        )
    names = [name for name in vars(script) if name.startswith("bench_memory_")]
    name = f"bench_memory_{kernel}" if f"bench_memory_{kernel}" in names else names[0]

    class Measured(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if not held:
                settings = {
                    key: getattr(torch, value.removeprefix("torch.")) if str(value).startswith("torch.") else value
                    for key, value in json.loads(config).items()
                }
                if kernel == "fused_moe":  # the script first tries PyTorch's version, which takes both workspaces
                    tried = {**settings, "sweep_dim": "T", "E": settings["K"]}
                    script._setup_fused_moe(utils.SingleBenchmarkRunInput(1, "huggingface", mode, tried))[
                        0
                    ]().sum().backward()
                asked = utils.SingleBenchmarkRunInput(batch.size(0), provider, mode, settings)
                getattr(script, name)(asked)
            return self.unused.view(())

    def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
        held[0]()
        return output

    return Workload(Measured(), lambda batch_size, seq_len: torch.zeros(()).expand(batch_size), loss)  # of 4 bytes
