"""What a sweep's options ask for, checked before anything is built."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from batchfinder.cache import Store
from batchfinder.cli.options import (
    Card,
    allocator_settings,
    card,
    headroom_bytes,
    how_to_step,
    whole_number,
    workload_spec,
)
from batchfinder.devices import Device, find_instance, present_gpus
from batchfinder.devices.device import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.errors import UnknownName
from batchfinder.simulator.settings import AllocatorSettings
from batchfinder.tracing.job import WorkloadSpec
from batchfinder.tracing.simulation import HowToStep

DEFAULT_MODELS = ("bert-base", "bert-large")
DEFAULT_SEQ_LENS = (64, 128, 256, 320, 384, 512)
DEFAULT_IMAGE_SIDE = 224
DEFAULT_GPU = "titan x"
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
    def cells(self) -> int:
        """How many rows there will be, as far as is known before the models are built."""
        return len(self.models) * len(self.cards) * len(self.seq_lens or DEFAULT_SEQ_LENS)

    @property
    def title(self) -> str:
        """What the table is about."""
        what = {"train": "training", "forward": "forward", "inference": "inference"}[self.how.mode]
        extras = [self.how.precision, self.how.optimizer] if self.how.mode == "train" else [self.how.precision]
        extras += [f"{self.attention} attention"] if self.attention else []
        extras += ["gradient checkpointing"] if self.gradient_checkpointing else []
        return f"Largest {what} batch, simulated ({', '.join(extras)})"


def read_request(arguments: argparse.Namespace) -> SweepRequest:
    """Check the options.

    Args:
        arguments: of the command line.

    Raises:
        InvalidValue: an option has a value that cannot be meant.
        UnknownName: no such GPU or instance.
        CacheFailed: results cannot be kept where they should be.
    """
    target = (
        None
        if arguments.target_batch_size is None
        else whole_number("--target-batch-size", arguments.target_batch_size)
    )
    cap = None if arguments.max_batch_size is None else whole_number("--max-batch-size", arguments.max_batch_size)
    # With accumulation the gradients of one micro-batch are there while the next one runs.
    how = how_to_step(arguments, micro_batches=1 if target is None else 2)
    cards, notes = _cards(arguments)
    for one in cards:
        headroom_bytes(arguments.headroom, one.device.usable_bytes)
    cache = None if arguments.no_cache else Store(arguments.cache)
    if cache is not None:
        cache.check_writable()
    allocator = allocator_settings()
    if allocator.unmodelled:
        notes.append(f"allocator settings that are not modelled: {', '.join(allocator.unmodelled)}")
    return SweepRequest(
        models=tuple((model, workload_spec(model, arguments)) for model in arguments.model or DEFAULT_MODELS),
        seq_lens=tuple(dict.fromkeys(whole_number("--seq-len", seq_len) for seq_len in arguments.seq_len or ())),
        cards=tuple(cards),
        how=how,
        attention=arguments.attention,
        gradient_checkpointing=arguments.gradient_checkpointing,
        allocator=allocator,
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
        return cards, []
    if arguments.budget is not None:
        return [card(None, arguments.budget)], []
    present = present_gpus()
    if not present:
        return [card(DEFAULT_GPU, None)], []
    for gpu in present:
        try:
            cards.append(card(gpu.name, None))
        except UnknownName:
            capability = gpu.compute_capability or DEFAULT_COMPUTE_CAPABILITY
            usable = gpu.smi_total_bytes - _UNKNOWN_CONTEXT_BYTES
            cards.append(Card(Device(gpu.name, gpu.smi_total_bytes, usable, capability), gpu.name))
    cards = list({one.name: one for one in cards}.values())
    return cards, [f"this machine has {', '.join(one.name for one in cards)}; its figures are simulated, not measured"]
