"""Which tool a config file is for, told by its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchfinder.configs import accelerate, axolotl, deepspeed, lightning, torchtitan, torchtune, trainer
from batchfinder.configs.files import read_mapping
from batchfinder.configs.record import TrainingConfig
from batchfinder.errors import InvalidValue

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """One tool's config files.

    Attributes:
        known_by: the keys that tell it, in words.
        fits: whether a file has them.
        read: fills in what a file says; the folder is the file's.
    """

    tool: str
    known_by: str
    fits: Callable[[Values], bool]
    read: Callable[[TrainingConfig, Path], None]


def _has(values: Values, *keys: str) -> bool:
    return any(key in values for key in keys)


def _under(values: Values, key: str, *keys: str) -> bool:
    return isinstance(values.get(key), Mapping) and _has(values[key], *keys)


FORMATS = (
    Format(
        axolotl.TOOL,
        "base_model and micro_batch_size",
        lambda values: _has(values, "base_model") and _has(values, *axolotl.KEYS),
        axolotl.read,
    ),
    Format(torchtune.TOOL, "model._component_", lambda values: _under(values, "model", "_component_"), torchtune.read),
    Format(
        torchtitan.TOOL,
        "model.flavor and training.seq_len",
        lambda values: (
            _under(values, "training", "seq_len", "local_batch_size", "batch_size", "steps")
            and _under(values, "model", "flavor", "name")
        ),
        torchtitan.read,
    ),
    Format(
        lightning.TOOL, "trainer and model", lambda values: isinstance(values.get("trainer"), Mapping), lightning.read
    ),
    Format(
        accelerate.TOOL,
        "distributed_type or num_processes",
        lambda values: _has(values, *accelerate.KEYS),
        accelerate.read,
    ),
    Format(
        deepspeed.TOOL,
        "zero_optimization or train_micro_batch_size_per_gpu",
        lambda values: _has(values, *deepspeed.KEYS),
        lambda config, folder: deepspeed.read(config),
    ),
    Format(
        trainer.LLAMA_FACTORY,
        "finetuning_type or cutoff_len",
        lambda values: _has(values, *trainer.LLAMA_FACTORY_KEYS),
        trainer.read_llama_factory,
    ),
    Format(
        trainer.TRL,
        "use_peft or max_length beside the Trainer's",
        lambda values: _has(values, *trainer.KEYS) and _has(values, *trainer.TRL_KEYS),
        trainer.read_trl,
    ),
    Format(
        trainer.TRAINING_ARGUMENTS,
        "per_device_train_batch_size",
        lambda values: _has(values, *trainer.KEYS),
        trainer.read_training_arguments,
    ),
)
"""The first that fits is taken."""


def read_config(text: str, path: str, option: str = "config") -> TrainingConfig:
    """What a config file says.

    Args:
        text: the file's.
        path: its, whose end says of what kind it is, and in whose folder others lie that it names.
        option: what messages call it.

    Raises:
        InvalidValue: it cannot be read, or is of no tool that is known.
    """
    try:
        values = read_mapping(text, path)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(option, path, f"a .yaml, .json or .toml file that can be read ({error})") from error
    for one in FORMATS:
        if one.fits(values):
            config = TrainingConfig(one.tool, values)
            one.read(config, Path(path).parent)
            return config
    known = "; ".join(f"{one.tool} ({one.known_by})" for one in FORMATS)
    raise InvalidValue(option, path, f"a config of one of these, by the keys they are known by: {known}")
