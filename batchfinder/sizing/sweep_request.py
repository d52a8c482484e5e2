"""What a sweep is asked for, and which device its figures are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from batchfinder.cache import Store
from batchfinder.devices import Card
from batchfinder.errors import InvalidValue
from batchfinder.search import DEFAULT_MAX_BATCH_SIZE
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.sizing.recorder import choose_recorder
from batchfinder.training.spec import (
    AUTO,
    FAKE_DEVICE,
    STRATEGIES,
    StepConfig,
    StepOptions,
    is_cuda_build,
    named_recorder,
    torch_of,
)
from batchfinder.units import format_bytes

_SHARED_SAMPLES = ("tp", "fsdp2-tp", "fsdp2-cp")
"""Strategies in which several GPUs work on the same samples."""
DEFAULT_SEQ_LENS = (64, 128, 256, 320, 384, 512)
SIMULATED, CPU = "simulated", "cpu"


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
        exact: whether plans meet the target, however small their micro-batches.
        mfu: the share of the peak FLOP/s that the training reaches, as the user states it, by which rows with a price
            say what training costs; None for rows that do not.
        chooses_recorder: whether the fake device takes over where the recorder of the options cannot take a step.
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
    exact: bool = False
    mfu: float | None = None
    chooses_recorder: bool = False

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
            raise InvalidValue("headroom", format_bytes(reserve), expected)
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


def check_request(
    request: SweepRequest, each: Sequence[StepOptions], counts_asked: bool, recorder: str = AUTO
) -> SweepRequest:
    """Check what is asked for together, have cards of each number of GPUs, and choose a recorder where that is asked.

    Args:
        each: the step's options, once for each number of GPUs; the first are the request's.
        recorder: one of `RECORDERS`, or `auto`.
        counts_asked: whether these numbers hold for every card; else they are those that the cards come in.

    Raises:
        InvalidValue: the numbers rule each other out, or it is not said how several GPUs train together.
    """
    if request.exact and request.target_batch_size is None:
        raise InvalidValue("exact", True, "a --target-batch-size with it, which is then met")
    if request.mfu is not None:
        check_mfu(request)
    simulated = request.place.device == SIMULATED
    recorder = named_recorder(recorder) if simulated or recorder != AUTO else FAKE_DEVICE
    request = replace(request, chooses_recorder=recorder == AUTO)
    if request.chooses_recorder:
        recorder = choose_recorder(request.options, request.place.cards)
    allocator = AllocatorSettings.from_environment(torch_of(recorder))
    request = replace(request, options=replace(request.options, recorder=recorder), allocator=allocator)
    if is_cuda_build(recorder):
        if not simulated:
            expected = f"{FAKE_DEVICE} where sizes are tried: a recording is for GPUs that are simulated"
            raise InvalidValue("recorder", recorder, expected)
        for one in request.place.cards:
            if one.device.assumed_capability:
                expected = f"{FAKE_DEVICE} for {one.name}: PyTorch's CUDA build runs on NVIDIA's GPUs alone"
                raise InvalidValue("recorder", recorder, expected)
    if request.options.gpus > 1:
        if request.options.strategy is None and any(":" not in model for model in request.models):
            expected = f"one of {', '.join(STRATEGIES)}: how {request.options.gpus} GPUs train the model together"
            raise InvalidValue("strategy", None, expected)
        if request.place.device != SIMULATED:
            expected = "a --gpu or --instance, or --device simulated with it: several GPUs are simulated"
            raise InvalidValue("gpus", request.options.gpus, expected)
        cards = tuple(
            replace(
                one,
                device=one.device.among_others(options.communicators),
                name=_several(one, options.gpus, len(each) > 1),
                count=options.gpus,
                price=one.price and one.price.times(-(-options.gpus // one.count)),
            )
            for one in request.place.cards
            for options in each
            if counts_asked or one.count == options.gpus
        )
        request = replace(request, place=replace(request.place, cards=cards))
    target, step = request.target_batch_size, request.multiple_of
    smallest = -(-request.min_batch_size // step) * step
    allowed = f"at least {request.min_batch_size}{f' and a multiple of {step}' if step > 1 else ''}"
    most = request.max_batch_size
    if most is not None and most < smallest:
        raise InvalidValue("max_batch_size", most, f"at least {smallest}, the smallest size that is {allowed}")
    if most is None and smallest > DEFAULT_MAX_BATCH_SIZE:
        expected = f"sizes of at most {DEFAULT_MAX_BATCH_SIZE} to try, or a --max-batch-size"
        raise InvalidValue("min_batch_size" if step == 1 else "multiple_of", smallest, expected)
    if target is not None and (target < smallest or target % step):
        raise InvalidValue("target_batch_size", target, f"{allowed}, as each micro-batch has to be")
    return request


def check_mfu(request: SweepRequest) -> None:
    """Check that what training costs can be said by a share of the peak FLOP/s.

    Raises:
        InvalidValue: nothing has a price, or the FLOPs of a step are not those of one GPU's own samples.
    """
    options, expected = request.options, ""
    if request.place.device != SIMULATED:
        expected = "none of it where real steps are taken, on GPUs without a price: an --instance is simulated"
    elif all(one.price is None or one.price.usd_per_hour is None for one in request.place.cards):
        expected = "an --instance with a price with it: `batchfinder instances` lists them, and --prices takes yours"
    elif options.mode != "train":
        expected = f"--mode train with it, not {options.mode}"
    elif options.strategy in _SHARED_SAMPLES:
        expected = f"another --strategy with it than {options.strategy}, whose GPUs share their samples"
    elif options.quantization == "int8":
        expected = "another --quantization with it than int8, whose products have a peak of their own"
    if expected:
        raise InvalidValue("mfu", request.mfu, expected)


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
