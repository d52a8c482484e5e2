"""Tests of batchfinder/configs/formats.py, and of all formats alike: what each public example says."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import pytest

from batchfinder.configs import TrainingConfig, read_config, read_mapping
from batchfinder.errors import InvalidValue
from tests.configs.examples import EXAMPLES

MLP = "gate_proj,up_proj,down_proj"


@dataclass
class Expected:
    """What a file says: options with their keys, sizes, GPUs, and keys left out."""

    tool: str
    options: dict[str, tuple[str | bool, str]]
    sizes: tuple[int | None, int | None, int | None]
    left_out: set[str]
    gpus: int | None = None


EXPECTED = {
    "axolotl.yml": Expected(
        "axolotl",
        {
            "model": ("llama-3.1-8b", "base_model"),
            "seq_len": ("8192", "sequence_len"),
            "lora": ("32", "lora_r"),
            "lora_targets": ("all-linear", "lora_target_linear"),
            "quantization": ("nf4-double", "load_in_4bit"),
            "precision": ("bf16-mixed", "bf16"),
            "optimizer": ("adamw-8bit", "optimizer"),
            "gradient_checkpointing": ("full", "gradient_checkpointing"),
            "attention": ("flash", "attn_implementation"),
            "packed": (True, "sample_packing"),
        },
        (2, 4, None),
        {"activation_offloading"},
    ),
    "llama_factory.yaml": Expected(
        "LLaMA-Factory",
        {
            "model": ("meta-llama/Llama-3.1-8B", "model_name_or_path"),
            "optimizer": ("adamw-fused", ""),
            "seq_len": ("4096", "cutoff_len"),
            "lora": ("16", "lora_rank"),
            "lora_targets": ("all-linear", "lora_target"),
            "gradient_checkpointing": ("full", ""),
            "precision": ("bf16-true", "bf16"),
        },
        (1, 8, None),
        {"use_unsloth_gc"},
    ),
    "trl.yaml": Expected(
        "TRL",
        {
            "model": ("llama-3.1-8b", "model_name_or_path"),
            "optimizer": ("adamw-fused", ""),
            "seq_len": ("2048", "max_seq_length"),
            "lora": ("16", "lora_r"),
            "lora_targets": ("q_proj,v_proj", "lora_target_modules"),
            "quantization": ("nf4", "load_in_4bit"),
            "gradient_checkpointing": ("full", "gradient_checkpointing"),
            "attention": ("flash", "attn_implementation"),
            "precision": ("bf16-mixed", "torch_dtype"),
        },
        (4, 2, None),
        {"use_dora"},
    ),
    "training_arguments.json": Expected(
        "TrainingArguments",
        {
            "model": ("gpt2", "model_name_or_path"),
            "optimizer": ("adamw", "optim"),
            "gradient_checkpointing": ("full", "gradient_checkpointing"),
            "precision": ("16-mixed", "fp16"),
        },
        (4, 1, None),
        {"auto_find_batch_size"},
    ),
    "accelerate.yaml": Expected(
        "accelerate",
        {
            "precision": ("bf16-mixed", "mixed_precision"),
            "strategy": ("fsdp-shard-grad-op", "distributed_type"),
            "gradient_checkpointing": ("full", "fsdp_config.fsdp_activation_checkpointing"),
        },
        (None, None, None),
        {"fsdp_config.fsdp_offload_params"},
        gpus=2,
    ),
    "torchtune.yaml": Expected(
        "torchtune",
        {
            "model": ("llama-3.1-8b", "model._component_"),
            "seq_len": ("4096", "tokenizer.max_seq_len"),
            "lora": ("8", "model.lora_rank"),
            "lora_targets": (f"q_proj,v_proj,o_proj,{MLP}", "model.lora_attn_modules"),
            "precision": ("bf16-true", "dtype"),
            "optimizer": ("adamw-fused", "optimizer.fused"),
            "gradient_checkpointing": ("full", "enable_activation_checkpointing"),
            "loss": ("chunked", "loss._component_"),
        },
        (2, 8, None),
        {"enable_activation_offloading"},
    ),
    "torchtitan.toml": Expected(
        "torchtitan",
        {
            "model": ("llama-3.1-8b", "model.hf_assets_path"),
            "seq_len": ("8192", "training.seq_len"),
            "strategy": ("fsdp2", "parallelism.data_parallel_shard_degree"),
            "precision": ("bf16-mixed", ""),
            "optimizer": ("adamw-fused", "optimizer.name"),
            "gradient_checkpointing": ("selective", "activation_checkpoint.mode"),
        },
        (1, 2, 16),
        {"model.converters"},
        gpus=8,
    ),
    "lightning.yaml": Expected(
        "LightningCLI",
        {
            "model": ("my_package.models:Classifier", "model.class_path"),
            "precision": ("bf16-mixed", "trainer.precision"),
            "optimizer": ("adamw", "optimizer.class_path"),
            "strategy": ("fsdp", "trainer.strategy"),
        },
        (32, 2, None),
        {"trainer.strategy.init_args.cpu_offload"},
        gpus=8,
    ),
    "deepspeed.json": Expected(
        "DeepSpeed",
        {
            "precision": ("bf16-mixed", "bf16.enabled"),
            "optimizer": ("adamw", "optimizer.type"),
            "strategy": ("zero2", "zero_optimization.stage"),
        },
        (4, 2, 64),
        {"zero_optimization.offload_optimizer"},
        gpus=8,
    ),
}


def test_every_example_has_its_answer() -> None:
    """None of the formats goes without."""
    assert EXPECTED.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_an_example_says(name: str) -> None:
    """The tool is told by the keys, and each option has the key that says it, if any does."""
    config, expected = read_config(EXAMPLES[name], name), EXPECTED[name]
    assert config.tool == expected.tool
    assert {option: (each.value, each.key) for option, each in config.options.items()} == expected.options
    assert (config.micro_batch.value, config.accumulation.value, config.effective.value) == expected.sizes
    assert (config.gpus, set(config.left_out)) == (expected.gpus, expected.left_out)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_key_that_is_named_is_in_the_file(name: str) -> None:
    """So that a message can be followed to its line."""
    config = read_config(EXAMPLES[name], name)
    named = [each.key for each in config.options.values() if each.key] + list(config.left_out)
    named += [size.key for size in (config.micro_batch, config.accumulation, config.effective) if size.stated]
    assert named
    assert all(config.get(key) is not None for key in named)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("a: 1\n", "cfg.yaml", "a config of one of these, by the keys they are known by: axolotl (base_model and "),
        ("- 1\n", "cfg.yaml", "a .yaml, .json or .toml file that can be read (it is not a mapping of keys to values)"),
        ("a = 1", "cfg.ini", "a .yaml, .json or .toml file that can be read (its name ends in none of .yaml, .yml"),
        ("{", "cfg.json", "a .yaml, .json or .toml file that can be read (Expecting property name"),
        ("base_model: merged/of-two\nmerge_method: slerp\n", "cfg.yaml", "a config of one of these"),
    ],
)
def test_what_is_no_config_of_a_tool(text: str, name: str, said: str) -> None:
    """It is told what was looked for."""
    with pytest.raises(InvalidValue) as caught:
        read_config(text, name, "--from")
    assert str(caught.value).startswith(f"--from: invalid value '{name}'; expected {said}")


def of(config: TrainingConfig, option: str) -> Any:
    """The value that was read for an option; None where the file does not say it."""
    return config.options[option].value if option in config.options else None


def changed(name: str, *pairs: tuple[str, str]) -> TrainingConfig:
    """What an example says with some of its text replaced; an empty old text adds a line at the end."""
    text = EXAMPLES[name]
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1) if old else f"{text}{new}\n"
    return read_config(text, name)


@pytest.mark.parametrize(
    ("name", "old", "new", "option", "value"),
    [
        ("axolotl.yml", "sequence_len: 8192\n", "", "seq_len", "512"),
        ("axolotl.yml", "optimizer: adamw_bnb_8bit\n", "", "optimizer", "adamw-fused"),
        ("axolotl.yml", "load_in_4bit: true", "load_in_4bit: false", "precision", "bf16-true"),
        ("axolotl.yml", "load_in_4bit: true", "load_in_4bit:", "quantization", None),
        ("axolotl.yml", "load_in_8bit: false\nload_in_4bit: true", "load_in_8bit: true", "quantization", "int8"),
        ("axolotl.yml", "bf16: auto", "fp16: true", "precision", "16-mixed"),
        ("axolotl.yml", "bf16: auto", "bf16: false", "precision", "fp32"),
        ("axolotl.yml", "attn_implementation: flash_attention_2", "sdp_attention: true", "attention", "sdpa"),
        ("axolotl.yml", "adapter: qlora", "adapter:", "lora", None),
        ("axolotl.yml", "lora_target_linear: true", "lora_target_modules: [a, b]", "lora_targets", "a,b"),
        ("axolotl.yml", "", "liger_fused_linear_cross_entropy: true", "loss", "liger"),
        ("axolotl.yml", "", "fsdp_version: 2\nfsdp_config: {reshard: true}", "strategy", "fsdp2"),
        ("axolotl.yml", "", "fsdp: [full_shard]", "strategy", "fsdp"),
        ("axolotl.yml", "adamw_bnb_8bit", "paged_adamw_32bit", "optimizer", "paged-adamw-8bit"),
        ("llama_factory.yaml", "finetuning_type: lora", "finetuning_type: full", "precision", "bf16-mixed"),
        ("llama_factory.yaml", "finetuning_type: lora", "finetuning_type: full", "lora", None),
        ("llama_factory.yaml", "bf16: true", "pure_bf16: true", "precision", "bf16-true"),
        ("llama_factory.yaml", "bf16: true", "", "precision", "fp32"),
        ("llama_factory.yaml", "lora_rank: 16\n", "", "lora", "8"),
        ("llama_factory.yaml", "lora_target: all", "lora_target: q_proj, v_proj", "lora_targets", "q_proj,v_proj"),
        ("llama_factory.yaml", "cutoff_len: 4096\n", "", "seq_len", "2048"),
        ("llama_factory.yaml", "", "quantization_bit: 4", "quantization", "nf4-double"),
        ("llama_factory.yaml", "", "quantization_bit: 4", "precision", "bf16-mixed"),
        ("llama_factory.yaml", "", "quantization_bit: 4\ndouble_quantization: false", "quantization", "nf4"),
        ("llama_factory.yaml", "", "quantization_bit: 8", "quantization", "int8"),
        ("llama_factory.yaml", "", "flash_attn: disabled", "attention", "eager"),
        ("llama_factory.yaml", "", "flash_attn: fa2", "attention", "flash"),
        ("llama_factory.yaml", "", "disable_gradient_checkpointing: true", "gradient_checkpointing", None),
        ("llama_factory.yaml", "", "enable_liger_kernel: true", "loss", "liger"),
        ("trl.yaml", "max_seq_length: 2048\n", "", "seq_len", "1024"),
        ("trl.yaml", "gradient_checkpointing: true", "gradient_checkpointing: false", "gradient_checkpointing", None),
        ("trl.yaml", "use_peft: true", "use_peft: false", "lora", None),
        ("trl.yaml", "load_in_4bit: true\n", "", "precision", "bf16-true"),
        ("trl.yaml", "torch_dtype: bfloat16", "", "precision", "bf16-mixed"),
        ("trl.yaml", "", "packing: true", "packed", True),
        ("trl.yaml", "", "use_bnb_nested_quant: true", "quantization", "nf4-double"),
        ("trl.yaml", "", "fsdp: hybrid_shard auto_wrap", "strategy", "hsdp"),
        ("training_arguments.json", '"optim": "adamw_torch",\n', "", "optimizer", "adamw-fused"),
        ("training_arguments.json", '"fp16": true,', '"bf16": true,', "precision", "bf16-mixed"),
        ("training_arguments.json", '"fp16": true,', "", "precision", "fp32"),
        ("training_arguments.json", '"fp16"', '"torch_compile": true, "fp16"', "compile", "model"),
        ("training_arguments.json", '"fp16"', '"fsdp": "shard_grad_op", "fp16"', "strategy", "fsdp-shard-grad-op"),
        ("training_arguments.json", '"fp16"', '"fsdp": true, "fp16"', "strategy", "fsdp2"),
        (
            "training_arguments.json",
            '"fp16"',
            '"deepspeed": {"zero_optimization": {"stage": 3}}, "fp16"',
            "strategy",
            "fsdp2",
        ),
        ("accelerate.yaml", "'bf16'", "'no'", "precision", "fp32"),
        ("accelerate.yaml", "'bf16'", "no", "precision", "fp32"),
        ("accelerate.yaml", "'bf16'", "fp16", "precision", "16-mixed"),
        ("accelerate.yaml", "SHARD_GRAD_OP", "1", "strategy", "fsdp"),
        ("accelerate.yaml", "SHARD_GRAD_OP", "FULL_SHARD\n  fsdp_version: 2", "strategy", "fsdp2"),
        ("accelerate.yaml", "distributed_type: FSDP", "distributed_type: MULTI_GPU", "strategy", "ddp"),
        ("accelerate.yaml", "FSDP", "DEEPSPEED\ndeepspeed_config: {zero_stage: 1}", "strategy", "zero1"),
        ("torchtune.yaml", "lora_llama3_1_8b", "qlora_llama3_1_8b", "quantization", "nf4-double"),
        ("torchtune.yaml", "lora_llama3_1_8b", "qlora_llama3_1_8b", "precision", "bf16-mixed"),
        ("torchtune.yaml", "lora_llama3_1_8b", "llama3_1_8b", "lora", None),
        ("torchtune.yaml", "llama3_1.lora_llama3_1_8b", "qwen2_5.lora_qwen2_5_7b_instruct", "model", "qwen2.5-7b"),
        ("torchtune.yaml", "llama3_1.lora_llama3_1_8b", "phi4.lora_phi4_14b", "model", None),
        ("torchtune.yaml", "torch.optim.AdamW\n  fused: True", "torch.optim.AdamW", "optimizer", "adamw"),
        ("torchtune.yaml", "torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", "optimizer", "paged-adamw-8bit"),
        ("torchtune.yaml", "max_seq_len: 4096", "max_seq_len: null", "seq_len", None),
        ("torchtune.yaml", "compile: False", "compile: True", "compile", "layers"),
        ("torchtune.yaml", "dtype: bf16", "dtype: fp32", "precision", "fp32"),
        ("torchtune.yaml", "", "optimizer_in_bwd: True", "optimizer_in_backward", True),
        ("torchtitan.toml", 'mode = "selective"\nselective_ac_option = "op"', "", "gradient_checkpointing", "every-2"),
        ("torchtitan.toml", 'mode = "selective"', 'mode = "none"', "gradient_checkpointing", None),
        ("torchtitan.toml", 'mode = "selective"', 'mode = "full"', "gradient_checkpointing", "full"),
        ("torchtitan.toml", "seq_len = 8192\n", "", "seq_len", "2048"),
        ("torchtitan.toml", "seq_len = 8192", 'dtype = "bfloat16"', "precision", "bf16-true"),
        ("torchtitan.toml", 'hf_assets_path = "./assets/hf/Llama-3.1-8B"', "", "model", "llama-3.1-8b"),
        ("torchtitan.toml", 'name = "AdamW"', 'name = "AdamW"\nimplementation = "foreach"', "optimizer", "adamw"),
        ("torchtitan.toml", "tensor_parallel_degree = 1", "tensor_parallel_degree = 2", "strategy", "fsdp2-tp"),
        ("torchtitan.toml", "tensor_parallel_degree = 1", "context_parallel_degree = 2", "context_parallel", "2"),
        ("torchtitan.toml", "replicate_degree = 1", "replicate_degree = 2", "strategy", "hsdp"),
        ("torchtitan.toml", "enable=false", "enable=true", "compile", "layers"),
        ("lightning.yaml", "precision: bf16-mixed", "precision: 16", "precision", "16-mixed"),
        ("lightning.yaml", "precision: bf16-mixed", "precision: 16-true", "precision", "bf16-true"),
        ("lightning.yaml", "  precision: bf16-mixed\n", "", "precision", "fp32"),
        ("lightning.yaml", "Classifier", "Classifier\n  init_args: {width: 8}", "model", None),
        ("lightning.yaml", "class_path: torch.optim.AdamW", "class_path: torch.optim.SGD", "optimizer", "sgd"),
        ("deepspeed.json", '"bf16": {"enabled": true}', '"fp16": {"enabled": true}', "precision", "16-mixed"),
        ("deepspeed.json", '"bf16": {"enabled": true}', '"bf16": {"enabled": "auto"}', "precision", None),
        ("deepspeed.json", '"stage": 2', '"stage": 0', "strategy", None),
        ("deepspeed.json", '"AdamW"', '"Adam"', "optimizer", "adamw"),
    ],
)
def test_one_key_more_or_less(name: str, old: str, new: str, option: str, value: object) -> None:
    """What a key changes, and what each tool does where it is not told."""
    assert of(changed(name, (old, new)), option) == value


@pytest.mark.parametrize(
    ("strategy", "ours", "left_out"),
    [
        ("ddp_find_unused_parameters_true", "ddp", False),
        ("deepspeed_stage_2", "zero2", False),
        ("deepspeed_stage_3_offload", "fsdp2", True),
        ("auto", "ddp", False),
        ("xla", None, True),
    ],
)
def test_lightnings_strategies(strategy: str, ours: str | None, left_out: bool) -> None:
    """By their names, too; one that is not known is told."""
    asked = EXAMPLES["lightning.yaml"].partition("  strategy:")[0] + f"  strategy: {strategy}\nmodel: {{}}\n"
    config = read_config(asked, "lightning.yaml")
    assert of(config, "strategy") == ours
    assert ("trainer.strategy" in config.left_out) == left_out


@pytest.mark.parametrize(
    ("name", "old", "new", "key"),
    [
        ("axolotl.yml", "adamw_bnb_8bit", "lion_8bit", "optimizer"),
        ("axolotl.yml", "adapter: qlora", "adapter: ia3", "adapter"),
        ("axolotl.yml", "gradient_checkpointing: true", "gradient_checkpointing: offload", "gradient_checkpointing"),
        ("axolotl.yml", "flash_attention_2", "xformers", "attn_implementation"),
        ("axolotl.yml", "", "context_parallel_size: 4", "context_parallel_size"),
        ("axolotl.yml", "", "deepspeed: no/such.json", "deepspeed"),
        ("llama_factory.yaml", "stage: sft", "stage: dpo", "stage"),
        ("llama_factory.yaml", "finetuning_type: lora", "finetuning_type: oft", "finetuning_type"),
        ("llama_factory.yaml", "", "quantization_bit: 3", "quantization_bit"),
        ("trl.yaml", "", "beta: 0.1", "beta"),
        ("torchtitan.toml", 'mode = "selective"', 'mode = "memory_budget"', "activation_checkpoint.mode"),
        ("accelerate.yaml", "FSDP", "MEGATRON_LM", "distributed_type"),
        ("accelerate.yaml", "'bf16'", "fp8", "mixed_precision"),
        ("lightning.yaml", "precision: bf16-mixed", "precision: 64-true", "trainer.precision"),
    ],
)
def test_what_is_left_out(name: str, old: str, new: str, key: str) -> None:
    """It is named with what it would change."""
    assert changed(name, (old, new)).left_out[key]


def test_one_is_no_degree_of_parallelism() -> None:
    """What is switched off, or is of one GPU, is not named."""
    config = changed("axolotl.yml", ("", "context_parallel_size: 1\nrl: none\nlayer_offloading: false"))
    assert set(config.left_out) == {"activation_offloading"}


def _paths(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested mappings."""
    here = [path] if path else []
    inside = values if isinstance(values, dict) else {}
    return here + [each for key in inside for each in _paths(inside[key], (*path, key))]


@pytest.mark.parametrize("odd", [None, "odd words", -1, 0, 2.5, [], [1, "a"], {}, {"a": {}}, True, False, "auto"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_odd_values(name: str, odd: object) -> None:
    """Whatever stands under a key, the rest of the file is read, or the file is refused; nothing else is raised."""
    whole = read_mapping(EXAMPLES[name], name)
    for *folder, last in _paths(whole):
        values = copy.deepcopy(whole)
        holder = values
        for key in folder:
            holder = holder[key]
        holder[last] = odd
        try:
            config = read_config(json.dumps(values), "odd.json")
        except InvalidValue:
            continue
        assert all(isinstance(each.value, str | bool) for each in config.options.values())
