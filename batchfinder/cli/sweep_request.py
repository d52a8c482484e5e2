"""What a sweep is asked for, checked before anything is built, and which device its figures are for."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict, dataclass, field, replace

from batchfinder.cache import Store
from batchfinder.cli.options import (
    DEFAULT_GPU,
    card,
    instance_card,
    named_gpus,
    read_prices,
    step_options,
    whole_number,
)
from batchfinder.cuda_stub import StubUnavailable, find_build
from batchfinder.devices import (
    Card,
    Device,
    driver_is_here,
    driver_version,
    find_gpu,
    find_instance,
    host_name,
    mps_limit_bytes,
    present_gpus,
)
from batchfinder.devices.catalog import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.errors import BatchFinderError, CudaStubUnavailable, InvalidValue, UnknownName
from batchfinder.measure.child_probe import query_gpu
from batchfinder.measure.host_limits import available_bytes
from batchfinder.models.catalog import check_model_name
from batchfinder.search import DEFAULT_MAX_BATCH_SIZE
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.training.spec import STRATEGIES, StepConfig, StepOptions
from batchfinder.units import GIB, MIB, format_bytes, parse_budget, parse_headroom, parse_share

DEFAULT_MODELS = ("bert-base", "bert-large")
DEFAULT_SEQ_LENS = (64, 128, 256, 320, 384, 512)
SIMULATED, CPU = "simulated", "cpu"

CUDA_DEVICE = re.compile(r"cuda(:\d+)?")
_UNKNOWN_CONTEXT_BYTES = 600 << 20
"""What the CUDA context of a GPU that is not in the catalogue is taken to need."""


@dataclass(frozen=True)
class Place:
    """The device that a sweep's figures are for, and how they are found.

    Attributes:
        device: `simulated`, or the device that takes real steps, as `torch.device` takes it.
        cards: what the figures are for; one where real steps are taken.
        versions: of a real GPU's driver and libraries.
        budget_bytes: the most that may be used; None for all there is.
        notes: what the user should know first.
        on_stub: whether the steps are PyTorch's CUDA build's without a GPU, on cards that the CUDA stub stands in for.
    """

    device: str
    cards: tuple[Card, ...]
    versions: dict[str, str] = field(default_factory=dict)
    budget_bytes: int | None = None
    notes: tuple[str, ...] = ()
    on_stub: bool = False

    def within_budget(self, free_bytes: int | None = None, card: Card | None = None) -> int:
        """The most that may be used of a device that takes steps, with so much of it free, or with all of it.

        Args:
            card: which one; None for the only one.
        """
        size = (card or self.cards[0]).device.total_bytes if free_bytes is None else free_bytes
        return size if self.budget_bytes is None else min(self.budget_bytes, size)


def choose_place(arguments: argparse.Namespace) -> Place:
    """Decide by the options, and by the GPUs of this machine.

    Raises:
        InvalidValue: an option has an invalid value, or there is no such device here.
        UnknownName: no such GPU or instance.
    """
    asked = arguments.device
    if asked not in ("auto", SIMULATED, CPU) and not CUDA_DEVICE.fullmatch(asked):
        raise InvalidValue("--device", asked, "auto, simulated, cuda, cuda:1 (or another number) or cpu")
    budget_bytes = None if arguments.budget is None else parse_budget(arguments.budget, "--budget")
    gpus = named_gpus(arguments.gpu) if arguments.gpu else []
    instances = [name for value in arguments.instance or () for name in value.split(",")]
    if arguments.prices is not None and not instances:
        raise InvalidValue("--prices", arguments.prices, "an --instance with it, whose price it has")
    if arguments.engine == "ray":
        if asked not in ("auto", SIMULATED, "cuda"):
            raise InvalidValue("--device", asked, "simulated or cuda with --engine ray")
        if asked == "cuda":  # on the GPUs of the cluster, or those of them that are named
            if instances:
                raise InvalidValue("--instance", instances[0], "--gpu with --device cuda, or neither")
            named = [card(gpu, arguments.budget) for gpu in gpus]
            return Place(asked, tuple({one.name: one for one in named}.values()), budget_bytes=budget_bytes)
        if not gpus and not instances:
            return Place(SIMULATED, (card(None if arguments.budget else DEFAULT_GPU, arguments.budget),))
    if gpus or instances:
        if asked not in ("auto", SIMULATED, "cuda"):
            raise InvalidValue(
                "--device", asked, "simulated, cuda or auto with --gpu or --instance, which are not here"
            )
        count = None if arguments.strategy is not None else whole_number("--gpus", arguments.gpus)
        cards = [card(gpu, arguments.budget, count or 1, arguments.context) for gpu in gpus]
        prices = read_prices(arguments.prices)
        for name in instances:
            one = instance_card(name, arguments.budget, count, arguments.context)
            cards.append(replace(one, price=prices.get(find_instance(name).name)))
        if asked == "cuda":
            return _on_stub(tuple({one.name: one for one in cards}.values()))
        return Place(SIMULATED, tuple({one.name: one for one in cards}.values()))
    if arguments.context is not None:
        raise InvalidValue("--context", arguments.context, "a --gpu or an --instance with it, which are simulated")
    if asked == CPU:
        return _host(budget_bytes)
    if asked not in ("auto", SIMULATED):
        return real_gpu(asked, budget_bytes)
    present = present_gpus()
    unusable = ""
    if asked == "auto" and (present or driver_is_here()):
        try:
            place = real_gpu("cuda", budget_bytes)
        except BatchFinderError as error:
            unusable = f". {error}"
        else:
            others = f"this machine has {len(present)} GPUs; --device cuda:1 measures on another one"
            return replace(place, notes=(others,) if len(present) > 1 else ())
    if budget_bytes is not None:
        return Place(SIMULATED, (card(None, arguments.budget),))
    if not present:
        chosen = card(DEFAULT_GPU, None)
        note = f"no GPU was found here, and no --gpu is named: simulating {chosen.name}{unusable}"
        return Place(SIMULATED, (chosen,), notes=(note,))
    here: dict[str, Card] = {}
    for gpu in present:
        try:
            limit = mps_limit_bytes(gpu.index)
            one = card(gpu.name, None if limit is None else str(limit))
        except UnknownName:
            capability = gpu.compute_capability or DEFAULT_COMPUTE_CAPABILITY
            # nvidia-smi counts what the driver keeps: up to 3 % more than CUDA's total.
            total = int(0.97 * gpu.smi_total_bytes)
            usable = max(0, total - _UNKNOWN_CONTEXT_BYTES)
            one = Card(Device(gpu.name, total, usable, capability, gpu.compute_capability is None), gpu.name)
        here[one.name] = one
    note = f"this machine has {', '.join(here)}; its figures are simulated, not measured{unusable}"
    return Place(SIMULATED, tuple(here.values()), notes=(note,))


def real_gpu(asked: str, budget_bytes: int | None) -> Place:
    """The GPU that is asked for, as `--device` has it, which this machine must have.

    Raises:
        InvalidValue: this machine has no such GPU, or PyTorch cannot use it.
    """
    device = "cuda:0" if asked == "cuda" else asked
    try:
        facts = query_gpu(device)
    except InvalidValue as error:
        raise InvalidValue("--device", asked, error.expected) from error
    if budget_bytes is None:
        budget_bytes = mps_limit_bytes(int(device.removeprefix("cuda:")))
    try:
        name = find_gpu(facts.name).name  # published figures are found by the catalogue's name
    except UnknownName:
        name = facts.name
    versions = {**facts.versions, "driver": driver_version()}
    usable = facts.free_bytes if budget_bytes is None else min(budget_bytes, facts.free_bytes)
    shown = name if budget_bytes is None else f"{name}, {format_bytes(budget_bytes)} budget"
    real = Device(facts.name, facts.total_bytes, usable, facts.compute_capability)
    return Place(device, (Card(real, shown),), versions, budget_bytes)


def _on_stub(cards: tuple[Card, ...]) -> Place:
    """The cards as PyTorch's CUDA build meets them on the CUDA stub.

    Raises:
        CudaStubUnavailable: there is no CUDA build here, or it cannot be run.
        InvalidValue: one is no NVIDIA GPU.
    """
    for one in cards:
        if one.device.assumed_capability:
            expected = "NVIDIA GPUs with --device cuda, by their names: PyTorch's CUDA build runs on no others"
            raise InvalidValue("--gpu", one.name, expected)
    try:
        build = find_build()
    except StubUnavailable as error:
        raise CudaStubUnavailable(str(error)) from error
    note = (
        f"sizes are tried on PyTorch {build.version} without a GPU: the memory is its own, and nothing is said of speed"
    )
    return Place("cuda:0", cards, {"torch": build.version}, notes=(note,), on_stub=True)


def _host(budget_bytes: int | None) -> Place:
    if sys.platform != "linux":
        raise InvalidValue("--device", CPU, f"another device: limits on a CPU's memory need Linux, not {sys.platform}")
    most = available_bytes() or GIB

    def typed(size: int) -> str:
        return f"{size // GIB}GiB" if size >= GIB else f"{max(1, size // MIB)}MiB"

    if budget_bytes is None:
        half = f"a size with --device cpu, such as {typed(most // 2)}, half of what is free here"
        raise InvalidValue("--budget", None, half)
    if budget_bytes > most:
        free = f"at most {format_bytes(most)}, the free memory less a reserve against the kernel's out-of-memory killer"
        raise InvalidValue("--budget", typed(budget_bytes), free)
    device = Device(host_name(), budget_bytes, budget_bytes, DEFAULT_COMPUTE_CAPABILITY)
    return Place(CPU, (Card(device, f"{device.name}, {format_bytes(budget_bytes)} budget"),), {}, budget_bytes)


@dataclass(frozen=True)
class SweepRequest:
    """A sweep to be run.

    Attributes:
        seq_lens: as they were asked for; empty for the defaults that suit the model.
        target_batch_size: the effective batch size to plan for; None without one.
        max_batch_size: the largest size to try; None without one.
        min_batch_size: the smallest size to try.
        multiple_of: only multiples of it are tried.
        headroom: what stays free: a float for a share, an int for bytes.
        tolerance: how far below the largest a measured result may be, as a share.
        cache: where results are kept; None for nowhere.
        certify: whether a cached measured result is tried once before it is used.
        throughput: whether sizes are timed as well, for the smallest at full speed.
    """

    models: tuple[str, ...]
    seq_lens: tuple[int, ...]
    place: Place
    options: StepOptions
    allocator: AllocatorSettings
    target_batch_size: int | None
    max_batch_size: int | None
    headroom: float | int
    tolerance: float
    cache: Store | None
    draw: bool = False
    page: bool = False
    certify: bool = True
    min_batch_size: int = 1
    multiple_of: int = 1
    throughput: bool = False

    @property
    def step(self) -> StepConfig:
        """The step; with accumulation the gradients of one micro-batch are in memory while the next one runs."""
        return self.options.step(micro_batches=1 if self.target_batch_size is None else 2)

    def reserve_bytes(self, card: Card) -> int:
        """The headroom on a card, in bytes.

        A share of a real device is a share of what may be used of it at most, so that it is the same whatever else is
        on it.

        Raises:
            InvalidValue: it leaves nothing.
        """
        simulated = self.place.device == SIMULATED
        usable = card.device.usable_bytes if simulated else self.place.within_budget(card=card)
        reserve = int(self.headroom * usable) if isinstance(self.headroom, float) else self.headroom
        if reserve >= usable:
            expected = f"less than the {format_bytes(usable)} usable on {card.name}"
            raise InvalidValue("--headroom", format_bytes(reserve), expected)
        return reserve

    @property
    def conditions(self) -> tuple[str, ...]:
        """What the figures hold under, beyond what each row says, in words."""
        words = [f"to within {100 * self.tolerance:g} %"] if self.place.device != SIMULATED and self.tolerance else []
        if self.headroom:
            share = isinstance(self.headroom, float)
            words.append(f"headroom {f'{100 * self.headroom:g}%' if share else format_bytes(int(self.headroom))}")
        if self.min_batch_size > 1:
            words.append(f"at least {self.min_batch_size}")
        if self.max_batch_size is not None:
            words.append(f"at most {self.max_batch_size}")
        if self.multiple_of > 1:
            words.append(f"multiples of {self.multiple_of}")
        if self.target_batch_size is not None:
            words.append(f"for an effective batch of {self.target_batch_size}, gradients kept between micro-batches")
        if self.throughput:
            words.append("speed of forward, backward and step on one device, without loader and communication")
        if self.place.device == CPU:
            return tuple(words)
        usual = asdict(AllocatorSettings())
        given = {
            name: value for name, value in asdict(self.allocator).items() if name not in ("by_address", "unmodelled")
        }
        words += [f"{name}={value}" for name, value in given.items() if value != usual[name]]
        return tuple(words)


def _several(one: Card, gpus: int, among_others: bool) -> str:
    """A card's name where so many of it train together: of an instance with how many of these that takes.

    Args:
        among_others: whether there are rows of other numbers of GPUs; else the title has the number.
    """
    instance, _, gpu = one.name.partition(f": {one.count} x ")
    if not gpu:
        return f"{gpus} x {one.name}" if among_others and one.count != gpus else one.name
    instances = -(-gpus // one.count)
    return f"{f'{instances} x ' if instances > 1 else ''}{instance}: {gpus} x {gpu}"


def read_request(arguments: argparse.Namespace) -> SweepRequest:
    """Check the options.

    Raises:
        InvalidValue: an option has an invalid value, or there is no such device here.
        UnknownName: no such GPU, instance or model.
        CacheFailed: results cannot be kept where they should be.
    """
    models = tuple(dict.fromkeys(arguments.model or DEFAULT_MODELS))
    for model in models:
        check_model_name(model)
    place = choose_place(arguments)
    counts: list[str | None] = [None]
    if arguments.gpus is not None:
        counts = list(dict.fromkeys(arguments.gpus.split(",")))
    elif arguments.strategy is not None and arguments.instance:  # all GPUs of each instance take part
        counts = list(dict.fromkeys(str(one.count) for one in place.cards))
    of_each = [{**vars(arguments), "gpus": count, "instance": None} for count in counts]
    options = [step_options(argparse.Namespace(**one)) for one in of_each]
    seq_lens = [whole_number("--seq-len", part) for value in arguments.seq_len or () for part in value.split(",")]
    request = SweepRequest(
        models=models,
        seq_lens=tuple(dict.fromkeys(seq_lens)),
        place=place,
        options=options[0],
        allocator=AllocatorSettings.from_environment(),
        target_batch_size=whole_number("--target-batch-size", arguments.target_batch_size),
        max_batch_size=whole_number("--max-batch-size", arguments.max_batch_size),
        headroom=parse_headroom(arguments.headroom, "--headroom"),
        tolerance=parse_share(arguments.tolerance, "--tolerance"),
        cache=None if arguments.no_cache else Store(arguments.cache),
        draw=arguments.plot is not None,
        page=arguments.html is not None,
        certify=not arguments.no_certify,
        min_batch_size=whole_number("--min-batch-size", arguments.min_batch_size),
        multiple_of=whole_number("--multiple-of", arguments.multiple_of) or 1,
        throughput=arguments.throughput,
    )
    if request.throughput and (request.place.device == SIMULATED or request.place.on_stub):
        expected = "a real GPU or --device cpu with it: a simulated step takes no time, so its speed is not known"
        raise InvalidValue("--throughput", True, expected)
    if request.throughput and request.options.mode != "train":
        raise InvalidValue("--throughput", True, f"--mode train with it, not {request.options.mode}")
    if request.options.gpus > 1:
        if request.options.strategy is None and any(":" not in model for model in models):
            expected = f"one of {', '.join(STRATEGIES)}: how {request.options.gpus} GPUs train the model together"
            raise InvalidValue("--strategy", None, expected)
        if request.place.device != SIMULATED:
            expected = "a --gpu or --instance, or --device simulated with it: several GPUs are simulated"
            raise InvalidValue("--gpus", request.options.gpus, expected)
        cards = tuple(
            replace(
                one,
                device=one.device.among_others(each.communicators),
                name=_several(one, each.gpus, len(options) > 1),
                count=each.gpus,
                price=one.price and one.price.times(-(-each.gpus // one.count)),
            )
            for one in request.place.cards
            for each in options
            if arguments.gpus is not None or one.count == each.gpus
        )
        request = replace(request, place=replace(request.place, cards=cards))
    target, step = request.target_batch_size, request.multiple_of
    smallest = -(-request.min_batch_size // step) * step
    allowed = f"at least {request.min_batch_size}{f' and a multiple of {step}' if step > 1 else ''}"
    most = request.max_batch_size
    if most is not None and most < smallest:
        raise InvalidValue("--max-batch-size", most, f"at least {smallest}, the smallest size that is {allowed}")
    if most is None and smallest > DEFAULT_MAX_BATCH_SIZE:
        expected = f"sizes of at most {DEFAULT_MAX_BATCH_SIZE} to try, or a --max-batch-size"
        raise InvalidValue("--min-batch-size" if step == 1 else "--multiple-of", smallest, expected)
    if target is not None and (target < smallest or target % step):
        raise InvalidValue("--target-batch-size", target, f"{allowed}, as each micro-batch has to be")
    if arguments.engine == "here" or request.place.device == SIMULATED:
        for one in request.place.cards:
            request.reserve_bytes(one)
    for option in ("batch_sizes", "lhotse"):
        if getattr(arguments, option) is not None and len(models) * len(request.place.cards) > 1:
            shown = f"--{option.replace('_', '-')}"
            raise InvalidValue(shown, getattr(arguments, option), "one --model and one GPU in the sweep")
    if request.cache is not None:
        request.cache.check_writable()
    return request
