"""Config files as people have them: keys and layout of public examples, which each comment names, in words of ours."""

from __future__ import annotations

# axolotl: examples/mistral/qlora.yml
AXOLOTL = """\
base_model: llama-3.1-8b
# the tokenizer is the model's own

load_in_8bit: false
load_in_4bit: true

datasets:
  - path: a/dataset   # 2 columns
    type: alpaca
val_set_size: 0.1

adapter: qlora
sequence_len: 8192
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true

wandb_project:

gradient_accumulation_steps: 4
micro_batch_size: 2      # what fits in 24 GB
num_epochs: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002

bf16: auto
tf32: false

gradient_checkpointing: true
attn_implementation: flash_attention_2
activation_offloading: true
"""

# LLaMA-Factory: examples/train_lora/llama3_lora_sft.yaml
LLAMA_FACTORY = """\
### model
model_name_or_path: meta-llama/Llama-3.1-8B
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all

### dataset
dataset: identity
template: llama3
cutoff_len: 4096

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
use_unsloth_gc: true
"""

# TRL's arguments: alignment-handbook, recipes/zephyr-7b-beta/sft/config_qlora.yaml
TRL = """\
# Model arguments
model_name_or_path: llama-3.1-8b
torch_dtype: bfloat16
attn_implementation: flash_attention_2

# LoRA arguments
load_in_4bit: true
use_peft: true
lora_r: 16
lora_target_modules:
- q_proj
- v_proj

# Trainer
bf16: true
gradient_accumulation_steps: 2
gradient_checkpointing: true
learning_rate: 2.0e-04
max_seq_length: 2048
per_device_train_batch_size: 4
report_to:
- tensorboard
use_dora: true
"""

# transformers: what `HfArgumentParser.parse_json_file` reads, as its examples/pytorch/language-modeling/run_clm.py does
TRAINING_ARGUMENTS = """\
{
    "model_name_or_path": "gpt2",
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "fp16": true,
    "optim": "adamw_torch",
    "gradient_checkpointing": true,
    "optim_args": null,
    "betas": [0.9, 0.999],
    "auto_find_batch_size": true
}
"""

# accelerate: examples/config_yaml_templates/fsdp.yaml
ACCELERATE = """\
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
"""

# torchtune: recipes/configs/llama3_1/8B_lora_single_device.yaml
TORCHTUNE = """\
output_dir: ./out # moved later

model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 8  # more takes more memory
  lora_alpha: 16

tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 4096

batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss

gradient_accumulation_steps: 8  # for an effective batch of 16
compile: False
device: cuda
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: True
"""

# torchtitan, before 2026: torchtitan/models/llama3/train_configs/llama3_8b.toml
TORCHTITAN = """\
# for one node
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 1   # on each GPU
seq_len = 8192
global_batch_size = 16

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 1

[compile]
enable=false

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""

# Lightning: docs of LightningCLI, a config with subclasses of model and data
LIGHTNING = """\
seed_everything: 0
trainer:
  accelerator: gpu
  devices: 4
  num_nodes: 2
  precision: bf16-mixed
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args:
      cpu_offload: true
  accumulate_grad_batches: 2
model:
  class_path: my_package.models.Classifier
data:
  class_path: my_package.data.Images
  init_args:
    batch_size: 32  # on each GPU
    num_workers: 8
optimizer:
  class_path: torch.optim.AdamW
"""

# DeepSpeed: docs/_pages/config-json.md, and examples of its tutorials
DEEPSPEED = """\
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu"}
  }
}
"""

EXAMPLES = {
    "axolotl.yml": AXOLOTL,
    "llama_factory.yaml": LLAMA_FACTORY,
    "trl.yaml": TRL,
    "training_arguments.json": TRAINING_ARGUMENTS,
    "accelerate.yaml": ACCELERATE,
    "torchtune.yaml": TORCHTUNE,
    "torchtitan.toml": TORCHTITAN,
    "lightning.yaml": LIGHTNING,
    "deepspeed.json": DEEPSPEED,
}
"""By the names of files."""
