"""Tests of LoRA and quantized weights on named models: what peft makes of them, on the fake GPU as for real."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.models.build import build_workload
from batchfinder.models.quantization import Linear4bit, Linear8bit
from batchfinder.recording.fake_device import FakeDeviceMode
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step, Workload
from tests.builders.tiny_llama import FIGURES, config_file

pytest.importorskip("peft")
Record = Callable[..., Trace]
"""Recordings of a Llama of two layers, 64 wide, with query, key, value and MLP layers under their usual names."""


def tiny(folder: Path, **options: Any) -> Workload:
    """That model, with these options of `build_workload`."""
    return build_workload(config_file(folder), **options)


def types(model: nn.Module, trains: bool) -> set[torch.dtype]:
    """Of the parameters that train, or of those that do not."""
    return {parameter.dtype for parameter in model.parameters() if parameter.requires_grad is trains}


def adapted(model: nn.Module) -> set[str]:
    """The last names of the layers that have adapters."""
    return {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}


def test_only_adapters_train(tmp_path: Path) -> None:
    """By default on peft's layers for this kind of model: the query and value projections of a Llama."""
    model = tiny(tmp_path, lora=4).model
    assert adapted(model) == {"q_proj", "v_proj"}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 2 * 4 * (
        (64 + 64) + (64 + 32)
    )


def test_targets(tmp_path: Path) -> None:
    """Layers by name, or all linear ones but the head."""
    assert adapted(tiny(tmp_path, lora=4, lora_targets="q_proj,o_proj").model) == {"q_proj", "o_proj"}
    everything = adapted(tiny(tmp_path, lora=4, lora_targets="all-linear").model)
    assert everything == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_new_head_trains_too(tmp_path: Path) -> None:
    """A classifier's head has no trained weights to freeze."""
    figures = {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**figures, "architectures": ["BertForSequenceClassification"]}))
    model = build_workload(str(tmp_path), lora=4).model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("classifier" in name for name in trained)


def test_types(tmp_path: Path) -> None:
    """Adapters are fp32 on a bf16 model, and a precision does not change that."""
    workload = tiny(tmp_path, lora=4, precision="bf16-true")
    assert types(workload.model, trains=True) == {torch.float32}
    assert types(workload.model, trains=False) == {torch.bfloat16}
    step = Step(workload, StepConfig(precision="bf16-true"), torch.device("cpu"))
    assert step.weights_dtype is None
    mixed = tiny(tmp_path, lora=4, precision="bf16-mixed")
    assert types(mixed.model, trains=False) == {torch.float32}


@pytest.mark.parametrize(("name", "layer"), [("nf4", Linear4bit), ("nf4-double", Linear4bit), ("int8", Linear8bit)])
def test_quantized_weights(name: str, layer: type[nn.Module], tmp_path: Path) -> None:
    """Every linear layer but the head; what is left is fp32, as prepare_model_for_kbit_training has it."""
    with FakeDeviceMode(allow_non_fake_inputs=True):
        model = tiny(tmp_path, lora=4, quantization=name, precision="bf16-true").model
    packed = [module for module in model.modules() if isinstance(module, layer)]
    assert len(packed) == 2 * 7
    assert types(model, trains=False) == {torch.float32, torch.uint8 if name != "int8" else torch.int8}
    assert types(model, trains=True) == {torch.float32}
    assert type(model.get_output_embeddings()) is nn.Linear


def test_a_head_that_would_be_quantized_is_refused() -> None:
    """BERT's classifier has a bias, so that transformers quantizes it, and peft trains it: which fails for real too."""
    mode = FakeDeviceMode(allow_non_fake_inputs=True)
    with pytest.raises(InvalidValue, match="a head that trains beside adapters") as caught, mode:
        build_workload("bert-base", lora=4, quantization="nf4")
    assert caught.value.option == "quantization"


def test_checkpointing_lets_gradients_through(tmp_path: Path) -> None:
    """With checkpointing the embeddings' output requires a gradient, which peft asks the model for."""
    for checkpointing in (False, True):
        workload = tiny(tmp_path, lora=4, gradient_checkpointing=checkpointing)
        embedded = workload.model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.long))
        assert embedded.requires_grad is checkpointing


def test_a_real_step_runs(tmp_path: Path) -> None:
    """Adapters change and the rest does not."""
    workload = tiny(tmp_path, lora=4)
    before = {name: parameter.detach().clone() for name, parameter in workload.model.named_parameters()}
    Step(workload, StepConfig(), torch.device("cpu")).run(2, 8)
    changed = {name for name, each in workload.model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == {name for name in before if "lora_" in name}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nf4-double", "int8"])
def test_a_real_step_runs_on_bitsandbytes(name: str, tmp_path: Path) -> None:
    """On a real device bitsandbytes' layers hold the weights, and the adapters train."""
    pytest.importorskip("bitsandbytes")
    workload = tiny(tmp_path, lora=4, quantization=name)
    workload.model.to("cpu")
    Step(workload, StepConfig(), torch.device("cpu")).run(2, 8)
    layers = {type(module).__module__.partition(".")[0] for module in workload.model.modules()}
    assert "bitsandbytes" in layers


def kind_bytes(trace: Trace, *kinds: str) -> int:
    """Bytes of all blocks of these kinds."""
    return sum(n for n, kind in zip(trace.sizes, trace.structure.kinds, strict=True) if kind in kinds)


def test_a_recording(tmp_path: Path, record: Record) -> None:
    """AdamW holds two states of the adapters, and nothing of what is frozen."""
    trace = record(lambda: tiny(tmp_path, lora=4), 1, 8)
    assert kind_bytes(trace, "optimizer") - 8 * 4 * 2 <= 2 * 4 * 2 * 4 * ((64 + 64) + (64 + 32)) + 64
    assert kind_bytes(trace, "gradient") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "quantization"),
    [
        ("bf16-true", "nf4-double"),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("bf16-true", "nf4"),
                ("bf16-mixed", "nf4"),
                ("bf16-mixed", "nf4-double"),
                ("bf16-true", "int8"),
                ("bf16-mixed", "int8"),
            )
        ),
    ],
)
def test_pefts_own_layers_allocate_the_same(
    quantization: str, precision: str, tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft's adapters for bitsandbytes' classes, over stand-ins that pass for these, leave the same recording."""
    bnb = pytest.importorskip("bitsandbytes")
    options = {"lora": 4, "quantization": quantization, "precision": precision}

    def theirs() -> Workload:
        from peft.tuners.lora import bnb as layers

        import batchfinder.models.pretrained as pretrained

        def wrapped(kind: Any) -> Any:
            return lambda target, name, config, **more: kind(target, name, config=config, **more)

        pretrained._lora_layers = lambda: {
            Linear4bit: wrapped(layers.Linear4bit),
            Linear8bit: wrapped(layers.Linear8bitLt),
        }
        return tiny(tmp_path, **options)

    assert bnb is not None
    ours = record(lambda: tiny(tmp_path, **options), 1, 8, precision=precision)
    real = record(theirs, 1, 8, precision=precision)
    assert ours.sizes == real.sizes
    assert ours.structure.order == real.structure.order


def test_unknown_layers(tmp_path: Path) -> None:
    """The error says which option to change, and where layers were named has peft's words."""
    with pytest.raises(InvalidValue, match="lora_targets: invalid value 'nothing'; expected names of layers of "):
        tiny(tmp_path, lora=4, lora_targets="nothing")
    with pytest.raises(InvalidValue, match="lora: invalid value 4; expected --lora-targets with it, such as all-"):
        build_workload("resnet50", lora=4)


def test_factories_make_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory's model is not changed: the error says so."""
    (tmp_path / "own_lora.py").write_text("import torch\ndef net():\n    return torch.nn.Embedding(2, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidValue, match="expected no --lora: own_lora:net makes its model"):
        build_workload("own_lora:net", lora=4)


def test_peft_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the error names the package and the extra."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra) as caught:
        tiny(tmp_path, lora=4)
    assert "--lora needs peft, which " in str(caught.value)
    assert "batchfinder[lora]" in str(caught.value)


def test_a_factory_with_peft_is_built_without_memory(record: Record) -> None:
    """A user's get_peft_model runs on fake tensors: a layer of 4 GiB of weights is adapted, and none of it is there."""

    def build() -> Workload:
        from peft import LoraConfig, get_peft_model

        net = nn.Sequential(nn.Linear(1 << 15, 1 << 15, bias=False))
        model: Any = get_peft_model(net, LoraConfig(r=4, target_modules=["0"]))
        return replace(Workload(model, lambda batch_size, seq_len: (torch.zeros(batch_size, 1 << 15),)))

    trace = record(build, 1)
    assert kind_bytes(trace, "parameter") == 4 << 30 | 2 * 4 * 4 << 15


@pytest.mark.parametrize("length", [8, 16])
def test_flash_attention_within_a_window(length: int, tmp_path: Path, record: Record) -> None:
    """A window that is as long as the sequence hides nothing, and so there is a flash kernel."""
    figures = {**FIGURES, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(figures))
    trace = record(
        lambda: build_workload(str(tmp_path), attention="flash"), 1, length, (8, 0), flash=True, precision="bf16-true"
    )
    assert any("flash_attention" in name for name in trace.structure.operators)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_prepared_by_trl_records_as_it_is(checkpointing: bool, tmp_path: Path, record: Record) -> None:
    """SFTTrainer's model, adapters, loss and batches, in a factory: states as large as those of `--lora`."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import peft
    import tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, **{str(number): number for number in range(2, 100)}}

    def factory() -> Workload:
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_config(LlamaConfig(**{**FIGURES, "pad_token_id": 0, "eos_token_id": 1})),
            args=trl.SFTConfig(
                output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", max_steps=1,
                gradient_checkpointing=checkpointing, dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=datasets.IterableDataset.from_generator(lambda: iter([{"input_ids": [5] * 32}])),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>")),
                pad_token="<pad>", eos_token="</s>",
            ),
            peft_config=peft.LoraConfig(r=4, task_type="CAUSAL_LM"),
        )  # fmt: skip
        if checkpointing:  # as Trainer.train does
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})

        def make_batch(batch_size: int, seq_len: int | None) -> Any:
            return trainer.data_collator([{"input_ids": [5] * int(seq_len or 32)} for _ in range(batch_size)])

        return Workload(trainer.model, make_batch)

    theirs = record(factory, 2, 32)
    ours = record(lambda: tiny(tmp_path, lora=4, gradient_checkpointing=checkpointing), 2, 32)
    for kind in ("parameter", "gradient", "optimizer"):
        assert kind_bytes(theirs, kind) == kind_bytes(ours, kind) > 0
    assert any("lora_A" in module for module in theirs.structure.modules)
