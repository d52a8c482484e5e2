"""What a sweep's options ask for, checked before anything is built."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from batchfinder.cache import Store
from batchfinder.cli.options import (
    Card,
    allocator_settings,
    check_model_name,
    headroom_bytes,
    how_to_step,
    optional_number,
    share,
    whole_number,
    workload_spec,
)
from batchfinder.cli.sweep_place import CPU, SIMULATED, Place, choose_place
from batchfinder.simulator.settings import AllocatorSettings
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.simulation import HowToStep

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
    how: HowToStep
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
    for card in request.cards:
        request.reserve_bytes(card)
    return request
