"""LightningCLI's YAML: https://lightning.ai/docs/pytorch/stable/cli/lightning_cli.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchfinder.configs.record import TrainingConfig
from batchfinder.errors import InvalidValue
from batchfinder.training.spec import PRECISION_NAMES, STRATEGIES
from batchfinder.training.synonyms import one_of

TOOL = "LightningCLI"
_BATCH_SIZE = ("data.init_args.batch_size", "data.batch_size", "model.init_args.batch_size", "model.batch_size")
_CLASSES = {"DDPStrategy": "ddp", "FSDPStrategy": "fsdp", "SingleDeviceStrategy": "auto"}


def read(config: TrainingConfig, folder: Path) -> None:
    """The trainer's options, and the size where the data or the model has one."""
    model = config.get("model")
    path = model.get("class_path") if isinstance(model, Mapping) else None
    if isinstance(path, str) and "." in path and not model.get("init_args"):
        module, _, name = path.rpartition(".")
        config.set("model", f"{module}:{name}", "model.class_path")
    config.micro_batch = config.size(config.key_of(*_BATCH_SIZE))
    config.accumulation = config.size("trainer.accumulate_grad_batches", 1)
    precision = config.get("trainer.precision")
    stated = config.stated("trainer.precision")
    if precision == "16-true":
        config.precision("fp16", True, stated)
    else:
        try:
            config.set("precision", one_of("precision", str(precision or "32-true"), PRECISION_NAMES), stated)
        except InvalidValue:
            config.left_out[stated] = f"the precision {precision} is not known here, and fp32 is taken: --precision"
    devices, nodes = config.get("trainer.devices"), config.size("trainer.num_nodes", 1).value or 1
    count = len(devices) if isinstance(devices, list) else config.size("trainer.devices").value
    config.gpus = count and count * nodes
    if (optimizer := config.get("optimizer.class_path")) is not None:
        config.optimizer(str(optimizer), "optimizer.class_path")
    else:
        config.notes.append("a LightningModule's own optimizer is not in the file: --optimizer")
    _read_strategy(config)


def _read_strategy(config: TrainingConfig) -> None:
    asked = config.get("trainer.strategy")
    name = str((asked.get("class_path") if isinstance(asked, Mapping) else asked) or "auto")
    name = _CLASSES.get(name.rpartition(".")[2], name)
    key = "trainer.strategy"
    if name.startswith("deepspeed_stage_"):
        config.zero(int(name.split("_")[2]), key)
        if "offload" in name:
            config.left_out[key] = "states in the CPU's memory; here on the GPU"
    elif name.startswith("ddp"):
        config.set("strategy", "ddp", key)
    elif name == "auto":
        if (config.gpus or 1) > 1:
            config.set("strategy", "ddp")
    else:
        try:
            config.set("strategy", one_of("strategy", name, tuple(STRATEGIES)), key)
        except InvalidValue:
            config.left_out[key] = f"the strategy {name} is not known here: --strategy"
    if isinstance(asked, Mapping) and config.get("trainer.strategy.init_args.cpu_offload") is True:
        config.left_out["trainer.strategy.init_args.cpu_offload"] = "parameters in the CPU's memory; here on the GPU"
