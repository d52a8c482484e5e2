"""Where a sweep's figures come from: simulated cards, the card that is here, or this machine's CPU.

What a sweep's options ask for, checked before anything is built.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import asdict, dataclass, field, replace

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
    share,
    whole_number,
    workload_spec,
)
from batchfinder.devices import Budget, Device, driver_version, find_gpu, find_instance, host_name, present_gpus
from batchfinder.devices.detect import PresentGpu
from batchfinder.devices.device import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.errors import BatchFinderError, InvalidValue, UnknownName
from batchfinder.measure.child_probe import GpuFacts, look_at
from batchfinder.measure.host_limits import cgroup, meminfo
from batchfinder.recording.simulation import StepConfig
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.training.spec import WorkloadSpec
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
    facts: GpuFacts | None = None
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


DEFAULT_MODELS = ("bert-base", "bert-large")
DEFAULT_SEQ_LENS = (64, 128, 256, 320, 384, 512)


@dataclass(frozen=True)
class SweepRequest:
    """A sweep to be run.

    Attributes:
        models: as they were asked for, each with how to build it.
        seq_lens: as they were asked for; empty for the defaults that suit the model.
        place: where the figures come from.
        how: the step.
        attention: as it was asked for; None for the model's own.
        gradient_checkpointing: whether activations are recomputed.
        allocator: the caching allocator's settings.
        target_batch_size: the effective batch to plan for; None without one.
        max_batch_size: the search's cap; None without one.
        headroom: what stays free, as it was given.
        tolerance: share of a measured answer that may be left on the table.
        cache: where results are kept; None for nowhere.
        drawn: whether a picture is made of the results.
    """

    models: tuple[tuple[str, WorkloadSpec], ...]
    seq_lens: tuple[int, ...]
    place: Place
    how: StepConfig
    attention: str | None
    gradient_checkpointing: bool
    allocator: AllocatorSettings
    target_batch_size: int | None
    max_batch_size: int | None
    headroom: str
    tolerance: float
    cache: Store | None
    drawn: bool = False

    @property
    def cards(self) -> tuple[Card, ...]:
        """What the figures are for."""
        return self.place.cards

    @property
    def measured(self) -> bool:
        """Whether real steps are taken."""
        return self.place.device != SIMULATED

    def reserve_bytes(self, card: Card) -> int:
        """What stays free of a card.

        A share of one that real steps are taken on is a share of what may be used of it at most, so that it is the same
        whatever else is on it.

        Raises:
            InvalidValue: it leaves nothing.
        """
        return headroom_bytes(self.headroom, self.place.allowance_bytes if self.measured else card.device.usable_bytes)

    @property
    def conditions(self) -> tuple[str, ...]:
        """What the figures hold under, beyond what each row says, in words."""
        words = [f"to within {100 * self.tolerance:g} %"] if self.measured and self.tolerance else []
        words += [] if self.headroom == "0" else [f"headroom {self.headroom}"]
        words += [] if self.max_batch_size is None else [f"at most {self.max_batch_size}"]
        if self.target_batch_size is not None:
            # The figures are for a step with the gradients of another micro-batch in memory.
            words.append(f"for an effective batch of {self.target_batch_size}, so with two micro-batches to a step")
        if self.place.device == CPU:
            return tuple(words)
        given = {name: value for name, value in asdict(self.allocator).items() if name != "unmodelled"}
        usual = asdict(AllocatorSettings())
        words += [f"{name}={value}" for name, value in given.items() if value != usual[name]]
        return tuple(words)


def read_request(arguments: argparse.Namespace) -> SweepRequest:
    """Check the options.

    Args:
        arguments: of the command line.

    Raises:
        InvalidValue: an option has a value that cannot be meant, or there is no such device here.
        UnknownName: no such GPU, instance or model.
        CacheFailed: results cannot be kept where they should be.
    """
    target = optional_number("--target-batch-size", arguments.target_batch_size)
    cap = optional_number("--max-batch-size", arguments.max_batch_size)
    # With accumulation the gradients of one micro-batch are there while the next one runs.
    how = how_to_step(arguments, micro_batches=1 if target is None else 2)
    tolerance = share("--tolerance", arguments.tolerance)
    seq_lens = dict.fromkeys(whole_number("--seq-len", seq_len) for seq_len in arguments.seq_len or ())
    models = dict.fromkeys(arguments.model or DEFAULT_MODELS)
    for model in models:
        check_model_name(model)
    cache = None if arguments.no_cache else Store(arguments.cache)
    if cache is not None:
        cache.check_writable()
    request = SweepRequest(
        models=tuple((model, workload_spec(model, arguments)) for model in models),
        seq_lens=tuple(seq_lens),
        place=choose_place(arguments),
        how=how,
        attention=arguments.attention,
        gradient_checkpointing=arguments.gradient_checkpointing,
        allocator=allocator_settings(),
        target_batch_size=target,
        max_batch_size=cap,
        headroom=arguments.headroom,
        tolerance=tolerance,
        cache=cache,
        drawn=arguments.plot is not None,
    )
    for each in request.cards:
        request.reserve_bytes(each)
    return request
