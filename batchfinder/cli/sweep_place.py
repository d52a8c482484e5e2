"""Where a sweep's figures come from: simulated cards, the card that is here, or this machine's CPU."""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass, field, replace

from batchfinder.cli.options import DEFAULT_GPU, Card, card
from batchfinder.devices import Budget, Device, driver_version, find_gpu, find_instance, host_name, present_gpus
from batchfinder.devices.device import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.devices.present import PresentGpu
from batchfinder.errors import BatchFinderError, InvalidValue, UnknownName
from batchfinder.probing.card import CardFacts, look_at
from batchfinder.probing.proc import cgroup, meminfo
from batchfinder.units import GIB, MIB, format_bytes

SIMULATED, CPU = "simulated", "cpu"
_CUDA = re.compile(r"cuda(:\d+)?")
_EXPECTED = "auto, simulated, cuda, cuda:1 (or another number) or cpu"
# What the CUDA context of a card that is not in the catalogue is taken to need.
_UNKNOWN_CONTEXT_BYTES = 600 << 20
_LEFT_TO_THE_KERNEL = 0.9


@dataclass(frozen=True)
class Place:
    """Where the figures come from.

    Attributes:
        device: `simulated`, or what takes real steps, as `torch.device` takes it.
        cards: what the figures are for.
        facts: of the card that takes the steps; None where none does.
        versions: of the card's driver and libraries.
        budget: the most that may be used; None for all there is.
        notes: what the user should know first.
    """

    device: str
    cards: tuple[Card, ...]
    facts: CardFacts | None = None
    versions: dict[str, str] = field(default_factory=dict)
    budget: Budget | None = None
    notes: tuple[str, ...] = ()

    @property
    def allowance_bytes(self) -> int:
        """Of the one card that takes the steps, what may be used at most, whatever is free of it now."""
        total = self.cards[0].device.total_bytes
        return total if self.budget is None else self.budget.of(total)


def choose_place(arguments: argparse.Namespace) -> Place:
    """Decide by the options, and by what is here.

    Raises:
        InvalidValue: an option has a value that cannot be meant, or there is no such device here.
        UnknownName: no such GPU or instance.
    """
    asked = arguments.device
    if asked not in ("auto", SIMULATED, CPU) and not _CUDA.fullmatch(asked):
        raise InvalidValue("--device", asked, _EXPECTED)
    named = _named_cards(arguments)
    if named:
        if asked not in ("auto", SIMULATED):
            raise InvalidValue("--device", asked, "simulated or auto where --gpu or --instance names what to simulate")
        return Place(SIMULATED, named)
    budget = None if arguments.budget is None else Budget.parse(arguments.budget)
    if asked == CPU:
        return _on_the_cpu(budget)
    if asked not in ("auto", SIMULATED):
        return _on_the_card(asked, budget)
    # Cards that are hidden from PyTorch are not meant.
    present = () if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else present_gpus()
    unusable = ""
    if asked == "auto" and present:
        try:
            place = _on_the_card("cuda", budget)
        except BatchFinderError as error:
            unusable = f". {error}"
        else:
            others = f"this machine has {len(present)} cards; --device cuda:1 measures on another one"
            return replace(place, notes=(others,) if len(present) > 1 else ())
    return _simulated(arguments.budget, present, unusable)


def _named_cards(arguments: argparse.Namespace) -> tuple[Card, ...]:
    cards = [card(gpu, arguments.budget) for gpu in arguments.gpu or ()]
    if arguments.instance is not None:
        instance = find_instance(arguments.instance)
        one = card(instance.gpu.name, arguments.budget)
        cards.append(replace(one, name=f"{instance.name}: {instance.num_gpus} x {one.name}", count=instance.num_gpus))
    return _each_once(cards)


def _simulated(budget: str | None, present: tuple[PresentGpu, ...], unusable: str) -> Place:
    if budget is not None:
        return Place(SIMULATED, (card(None, budget),))
    if not present:
        return Place(SIMULATED, (card(DEFAULT_GPU, None),))
    cards = _each_once([_present_card(gpu) for gpu in present])
    names = ", ".join(one.name for one in cards)
    return Place(
        SIMULATED, cards, notes=(f"this machine has {names}; its figures are simulated, not measured{unusable}",)
    )


def _present_card(gpu: PresentGpu) -> Card:
    try:
        return card(gpu.name, None)
    except UnknownName:
        capability = gpu.compute_capability or DEFAULT_COMPUTE_CAPABILITY
        # nvidia-smi counts what the driver keeps: up to 3 % more than CUDA's total.
        total = int(0.97 * gpu.smi_total_bytes)
        usable = max(0, total - _UNKNOWN_CONTEXT_BYTES)
        return Card(Device(gpu.name, total, usable, capability, gpu.compute_capability is None), gpu.name)


def _on_the_card(asked: str, budget: Budget | None) -> Place:
    device = "cuda:0" if asked == "cuda" else asked
    try:
        facts = look_at(device)
    except InvalidValue as error:
        raise InvalidValue("--device", asked, error.expected) from error
    usable = facts.free_bytes if budget is None else budget.of(facts.free_bytes)
    name = _known_name(facts.name)
    one = Device(facts.name, facts.total_bytes, usable, facts.compute_capability)
    shown = name if budget is None else f"{name}, {budget}"
    versions = {**facts.versions, "driver": driver_version()}
    return Place(device, (Card(one, shown),), facts, versions, budget)


def _known_name(name: str) -> str:
    """The catalogue's name of a card, by which published figures are found, too."""
    try:
        return find_gpu(name).name
    except UnknownName:
        return name


def _on_the_cpu(budget: Budget | None) -> Place:
    if sys.platform != "linux":
        raise InvalidValue("--device", CPU, f"another device on {sys.platform}: limits on a CPU's memory need Linux")
    most = available_bytes()
    if budget is None:
        raise InvalidValue(
            "--budget", None, f"a size with --device cpu, such as {_as_option(most // 2)}, half of what is free here"
        )
    if budget.limit_bytes > most:
        free = (
            f"{format_bytes(most)}, which is what can be taken here without calling the kernel's out-of-memory killer"
        )
        raise InvalidValue("--budget", _as_option(budget.limit_bytes), f"at most {free}")
    device = Device(host_name(), budget.limit_bytes, budget.limit_bytes, DEFAULT_COMPUTE_CAPABILITY)
    return Place(CPU, (Card(device, f"{device.name}, {budget}"),), None, {}, budget)


def available_bytes() -> int:
    """What of this machine's memory, or of its cgroup's, can be taken without calling the kernel's OOM killer."""
    limit, used = cgroup()
    left = [] if limit is None else [limit - used]
    return int(_LEFT_TO_THE_KERNEL * min([*left, meminfo("MemAvailable") or GIB]))


def _as_option(size: int) -> str:
    return f"{size // GIB}GiB" if size >= GIB else f"{max(1, size // MIB)}MiB"


def _each_once(cards: list[Card]) -> tuple[Card, ...]:
    return tuple({one.name: one for one in cards}.values())
