"""From the text of an option to what it means, with a clear message where it means nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchfinder.cli.parser import ATTENTIONS, MODES, OPTIMIZERS, PRECISIONS
from batchfinder.devices import Device, device_for, device_with_budget, find_gpu
from batchfinder.errors import InvalidValue
from batchfinder.models.catalog import find_model
from batchfinder.recording.simulation import StepConfig
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.training.spec import WorkloadFacts, WorkloadSpec
from batchfinder.units import parse_bytes

DEFAULT_GPU = "titan x"
DEFAULT_IMAGE_SIDE = 224
DEFAULT_SEQ_LEN = 128


def workload_spec(model: str, arguments: argparse.Namespace) -> WorkloadSpec:
    """How the recording process builds a model asked for on the command line."""
    return WorkloadSpec(
        builder="batchfinder.models:build_workload",
        arguments={
            "spec": model,
            "attention": arguments.attention,
            "gradient_checkpointing": arguments.gradient_checkpointing,
        },
        fingerprint="batchfinder.models.fingerprint:fingerprint",
    )


def check_model_name(model: str) -> None:
    """Find a misspelt name at once; whatever else a model may be given as is looked at where it is built.

    Raises:
        UnknownName: it can be nothing but a name, and there is no such model.
    """
    if not (":" in model or os.sep in model or model.endswith(".json") or Path(model).exists()):
        find_model(model)


def how_to_step(arguments: argparse.Namespace, micro_batches: int = 1) -> StepConfig:
    """The step that the options ask for.

    Raises:
        InvalidValue: an option's value is none of the known ones.
    """
    return StepConfig(
        mode=one_of("--mode", arguments.mode, MODES),
        precision=one_of("--precision", arguments.precision, PRECISIONS),
        optimizer=one_of("--optimizer", arguments.optimizer, OPTIMIZERS),
        micro_batches=micro_batches,
        flash=arguments.attention is not None and one_of("--attention", arguments.attention, ATTENTIONS) == "flash",
    )


def allocator_settings() -> AllocatorSettings:
    """The caching allocator's settings, from the environment variables that PyTorch reads.

    Raises:
        InvalidValue: PyTorch would refuse them as well.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if conf := os.environ.get(name):
            return AllocatorSettings.parse(conf, option=name)
    return AllocatorSettings()


def allocator_notes(settings: AllocatorSettings) -> tuple[str, ...]:
    """The allocator's settings that a simulated figure leaves out, in words."""
    return tuple(f"the allocator's setting {setting}" for setting in settings.unmodelled)


@dataclass(frozen=True)
class Card:
    """A device that is simulated, or measured on.

    Attributes:
        device: with what of it may be used.
        name: as it stands in tables.
        count: how many of it train side by side.
    """

    device: Device
    name: str
    count: int = 1


def card(gpu: str | None, budget: str | None, count: int = 1) -> Card:
    """A card by name, by budget, or a budget on a card.

    Raises:
        UnknownName: no such GPU.
        InvalidValue: the budget is no size.
    """
    found = find_gpu(gpu) if gpu is not None else None
    if budget is not None:
        device = device_with_budget(parse_bytes(budget, option="--budget"), found)
    elif found is not None:
        device = device_for(found)
    else:
        raise InvalidValue("--gpu", None, "a GPU's name or a --budget")
    return Card(device, device.name, count)


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """The value, if it is allowed.

    Raises:
        InvalidValue: it is not.
    """
    if value not in allowed:
        raise InvalidValue(option, value, f"one of {', '.join(allowed)}")
    return value


def whole_number(option: str, value: str, least: int = 1) -> int:
    """The value as a number.

    Raises:
        InvalidValue: it is no whole number, or a smaller one.
    """
    if not value.isdecimal() or int(value) < least:
        raise InvalidValue(option, value, f"a whole number of at least {least}")
    return int(value)


def optional_number(option: str, value: str | None) -> int | None:
    """The value as a number of at least 1; None where there is none.

    Raises:
        InvalidValue: it is no whole number, or a smaller one.
    """
    return None if value is None else whole_number(option, value)


def one_seq_len(asked: int | None, facts: WorkloadFacts) -> int | None:
    """The length asked for, which the model must allow, or the usual one.

    Raises:
        InvalidValue: it is beyond the model's positions.
    """
    most = facts.max_seq_len
    if asked is not None:
        if most is not None and asked > most:
            raise InvalidValue("--seq-len", asked, f"at most {most} {facts.seq_len_unit}")
        return asked
    usual = {"pixels": DEFAULT_IMAGE_SIDE, "none": None}.get(facts.seq_len_unit, DEFAULT_SEQ_LEN)
    return usual if usual is None or most is None else min(usual, most)


def share(option: str, value: str) -> float:
    """The value as a share from 0 to below 1, given as 0.01 or 1%.

    Raises:
        InvalidValue: it is none.
    """
    text = value.strip()
    try:
        number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise InvalidValue(option, value, "a share from 0 to below 1, such as 0.01 or 1%")
    return number


def headroom_bytes(value: str, usable_bytes: int) -> int:
    """What has to stay free: a share such as 0.1 or 10%, or a size such as 1GiB.

    Args:
        value: as it was given.
        usable_bytes: what a share is a share of.

    Raises:
        InvalidValue: it is neither, or leaves nothing.
    """
    size = _share_or_size(value.strip(), usable_bytes)
    if size is None or not 0 <= size < usable_bytes:
        raise InvalidValue(
            "--headroom", value, "a share such as 0.1 or 10%, or a size such as 1GiB, smaller than the device"
        )
    return size


def _share_or_size(text: str, usable_bytes: int) -> int | None:
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        return int(share * usable_bytes)
    except (ValueError, OverflowError):
        pass
    try:
        return parse_bytes(text)
    except InvalidValue:
        return None
