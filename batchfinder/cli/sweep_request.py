"""What a sweep's options ask for, checked before anything is built."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace

from batchfinder.cache import Store
from batchfinder.cli.options import (
    DEFAULT_GPU,
    Card,
    allocator_settings,
    card,
    check_model_name,
    headroom_bytes,
    how_to_step,
    optional_number,
    whole_number,
    workload_spec,
)
from batchfinder.devices import Device, find_instance, present_gpus
from batchfinder.devices.device import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.devices.present import PresentGpu
from batchfinder.errors import UnknownName
from batchfinder.simulator.settings import AllocatorSettings
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.simulation import HowToStep

DEFAULT_MODELS = ("bert-base", "bert-large")
DEFAULT_SEQ_LENS = (64, 128, 256, 320, 384, 512)
# What the CUDA context of a card that is not in the catalogue is taken to need.
_UNKNOWN_CONTEXT_BYTES = 600 << 20


@dataclass(frozen=True)
class SweepRequest:
    """A sweep to be run.

    Attributes:
        models: as they were asked for, each with how to build it.
        seq_lens: as they were asked for; empty for the defaults that suit the model.
        cards: what to simulate.
        how: the step.
        attention: as it was asked for; None for the model's own.
        gradient_checkpointing: whether activations are recomputed.
        allocator: the caching allocator's settings.
        target_batch_size: the effective batch to plan for; None without one.
        max_batch_size: the search's cap; None without one.
        headroom: what stays free, as it was given.
        cache: where results are kept; None for nowhere.
        notes: what the user should know first.
    """

    models: tuple[tuple[str, WorkloadSpec], ...]
    seq_lens: tuple[int, ...]
    cards: tuple[Card, ...]
    how: HowToStep
    attention: str | None
    gradient_checkpointing: bool
    allocator: AllocatorSettings
    target_batch_size: int | None
    max_batch_size: int | None
    headroom: str
    cache: Store | None
    notes: tuple[str, ...]

    @property
    def conditions(self) -> tuple[str, ...]:
        """What the figures hold under, beyond what each row says, in words."""
        words = [] if self.headroom == "0" else [f"headroom {self.headroom}"]
        words += [] if self.max_batch_size is None else [f"at most {self.max_batch_size}"]
        words += [] if self.target_batch_size is None else [f"for an effective batch of {self.target_batch_size}"]
        given = {name: value for name, value in asdict(self.allocator).items() if name != "unmodelled"}
        usual = asdict(AllocatorSettings())
        words += [f"{name}={value}" for name, value in given.items() if value != usual[name]]
        return tuple(words)


def read_request(arguments: argparse.Namespace) -> SweepRequest:
    """Check the options.

    Args:
        arguments: of the command line.

    Raises:
        InvalidValue: an option has a value that cannot be meant.
        UnknownName: no such GPU, instance or model.
        CacheFailed: results cannot be kept where they should be.
    """
    target = optional_number("--target-batch-size", arguments.target_batch_size)
    cap = optional_number("--max-batch-size", arguments.max_batch_size)
    # With accumulation the gradients of one micro-batch are there while the next one runs.
    how = how_to_step(arguments, micro_batches=1 if target is None else 2)
    cards, notes = _cards(arguments)
    for one in cards:
        headroom_bytes(arguments.headroom, one.device.usable_bytes)
    seq_lens = dict.fromkeys(whole_number("--seq-len", seq_len) for seq_len in arguments.seq_len or ())
    models = dict.fromkeys(arguments.model or DEFAULT_MODELS)
    for model in models:
        check_model_name(model)
    cache = None if arguments.no_cache else Store(arguments.cache)
    if cache is not None:
        cache.check_writable()
    return SweepRequest(
        models=tuple((model, workload_spec(model, arguments)) for model in models),
        seq_lens=tuple(seq_lens),
        cards=tuple(cards),
        how=how,
        attention=arguments.attention,
        gradient_checkpointing=arguments.gradient_checkpointing,
        allocator=allocator_settings(),
        target_batch_size=target,
        max_batch_size=cap,
        headroom=arguments.headroom,
        cache=cache,
        notes=tuple(notes),
    )


def _cards(arguments: argparse.Namespace) -> tuple[list[Card], list[str]]:
    cards = [card(gpu, arguments.budget) for gpu in arguments.gpu or ()]
    if arguments.instance is not None:
        instance = find_instance(arguments.instance)
        one = card(instance.gpu.name, arguments.budget)
        cards.append(replace(one, name=f"{instance.name}: {instance.num_gpus} x {one.name}", count=instance.num_gpus))
    if cards:
        return _each_once(cards), []
    if arguments.budget is not None:
        return [card(None, arguments.budget)], []
    present = present_gpus()
    if not present:
        return [card(DEFAULT_GPU, None)], []
    cards = _each_once([_present_card(gpu) for gpu in present])
    return cards, [f"this machine has {', '.join(one.name for one in cards)}; its figures are simulated, not measured"]


def _present_card(gpu: PresentGpu) -> Card:
    try:
        return card(gpu.name, None)
    except UnknownName:
        capability = gpu.compute_capability or DEFAULT_COMPUTE_CAPABILITY
        # nvidia-smi counts what the driver keeps: up to 3 % more than CUDA's total.
        total = int(0.97 * gpu.smi_total_bytes)
        usable = max(0, total - _UNKNOWN_CONTEXT_BYTES)
        return Card(Device(gpu.name, total, usable, capability, gpu.compute_capability is None), gpu.name)


def _each_once(cards: list[Card]) -> list[Card]:
    return list({one.name: one for one in cards}.values())
