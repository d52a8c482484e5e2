"""Options that several verbs share, and the checks that make clear messages of wrong values.

argparse would end with 2 and its own words for a wrong value; these are values, not usage, so they are taken as text
here and checked by us.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from batchfinder.devices import Device, device_for, device_with_budget, find_gpu
from batchfinder.errors import InvalidValue
from batchfinder.simulator.settings import AllocatorSettings
from batchfinder.tracing.job import WorkloadSpec
from batchfinder.tracing.simulation import HowToStep
from batchfinder.units import parse_bytes

MODES = ("train", "forward", "inference")
PRECISIONS = ("fp32", "bf16-mixed", "16-mixed", "bf16-true")
OPTIMIZERS = ("adamw", "adamw-fused", "adam", "sgd", "sgd-momentum", "adafactor")
ATTENTIONS = ("eager", "sdpa", "flash")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """How the step is taken."""
    group = parser.add_argument_group("the step")
    group.add_argument("--mode", default="train", metavar="|".join(MODES), help="default: train")
    group.add_argument("--precision", default="fp32", metavar="|".join(PRECISIONS), help="default: fp32")
    group.add_argument("--optimizer", default="adamw", metavar="|".join(OPTIMIZERS), help="default: adamw")
    group.add_argument("--attention", metavar="|".join(ATTENTIONS), help="default: the model's own")
    group.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations in the backward")


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """Results as JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def workload_spec(model: str, arguments: argparse.Namespace) -> WorkloadSpec:
    """How the recording process builds a model asked for on the command line."""
    return WorkloadSpec(
        builder="batchfinder.zoo:build_workload",
        arguments={
            "spec": model,
            "attention": arguments.attention,
            "gradient_checkpointing": arguments.gradient_checkpointing,
        },
        fingerprint="batchfinder.zoo.fingerprint:fingerprint",
    )


def how_to_step(arguments: argparse.Namespace, micro_batches: int = 1) -> HowToStep:
    """The step that the options ask for.

    Raises:
        InvalidValue: an option's value is none of the known ones.
    """
    return HowToStep(
        mode=one_of("--mode", arguments.mode, MODES),
        precision=one_of("--precision", arguments.precision, PRECISIONS),
        optimizer=one_of("--optimizer", arguments.optimizer, OPTIMIZERS),
        micro_batches=micro_batches,
        flash=arguments.attention is not None and one_of("--attention", arguments.attention, ATTENTIONS) == "flash",
    )


def allocator_settings() -> AllocatorSettings:
    """The caching allocator's settings, from the environment variables that PyTorch reads."""
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return AllocatorSettings.parse(conf)


@dataclass(frozen=True)
class Card:
    """A device to simulate.

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


def headroom_bytes(value: str, usable_bytes: int) -> int:
    """What has to stay free: a share such as 0.1 or 10%, or a size such as 1GiB.

    Args:
        value: as it was given.
        usable_bytes: what a share is a share of.

    Raises:
        InvalidValue: it is neither, or leaves nothing.
    """
    expected = "a share such as 0.1 or 10%, or a size such as 1GiB, smaller than the device"
    text = value.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        size = parse_bytes(text, option="--headroom")
    else:
        if not 0 <= share < 1:
            raise InvalidValue("--headroom", value, expected)
        size = int(share * usable_bytes)
    if size >= usable_bytes:
        raise InvalidValue("--headroom", value, expected)
    return size
