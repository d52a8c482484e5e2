"""What an estimate's options ask for, checked before anything is built."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from batchfinder.cli.options import (
    DEFAULT_GPU,
    Card,
    allocator_settings,
    card,
    check_model_name,
    how_to_step,
    one_of,
    optional_number,
    whole_number,
    workload_spec,
)
from batchfinder.cli.output_file import check_file
from batchfinder.devices import find_instance
from batchfinder.errors import InvalidValue
from batchfinder.simulator.settings import AllocatorSettings
from batchfinder.step.spec import WorkloadSpec
from batchfinder.tracing.simulation import HowToStep


@dataclass(frozen=True)
class EstimateRequest:
    """An estimate to be made.

    Attributes:
        options: as they were given; changes are tried by changing these.
        model: as it was asked for.
        batch_size: samples in a GPU's micro-batch.
        seq_len: as it was asked for; None for the model's usual one.
        card: what is simulated, and how many of it.
        accumulation: micro-batches per optimizer step.
        allocator: the caching allocator's settings.
        by_module: whether each module's memory is shown.
        advice: whether changes are tried also where the size fits.
    """

    options: argparse.Namespace
    model: str
    batch_size: int
    seq_len: int | None
    card: Card
    accumulation: int
    allocator: AllocatorSettings
    by_module: bool
    advice: bool

    @property
    def spec(self) -> WorkloadSpec:
        """How the model is built."""
        return workload_spec(self.model, self.options)

    @property
    def how(self) -> HowToStep:
        """How the step is taken."""
        return how_to_step(self.options, self.accumulation)

    def changed(self, **options: object) -> EstimateRequest:
        """The same with other options, by their names in Python."""
        return replace(self, options=argparse.Namespace(**{**vars(self.options), **options}))


def read_request(arguments: argparse.Namespace) -> EstimateRequest:
    """Check the options.

    Args:
        arguments: of the command line.

    Raises:
        InvalidValue: an option has a value that cannot be meant.
        UnknownName: no such GPU, instance or model.
    """
    check_file("--markdown", arguments.markdown)
    if arguments.by is not None:
        one_of("--by", arguments.by, ("module",))
    request = EstimateRequest(
        options=arguments,
        model=arguments.model,
        batch_size=whole_number("--batch-size", arguments.batch_size),
        seq_len=optional_number("--seq-len", arguments.seq_len),
        card=_card(arguments),
        accumulation=whole_number("--accumulation", arguments.accumulation),
        allocator=allocator_settings(),
        by_module=arguments.by is not None,
        advice=arguments.advice,
    )
    request.how  # noqa: B018 - checks its options
    check_model_name(request.model)
    return request


def _card(arguments: argparse.Namespace) -> Card:
    asked = optional_number("--num-gpus", arguments.num_gpus)
    if arguments.instance is None:
        gpu = arguments.gpu or (None if arguments.budget else DEFAULT_GPU)
        return card(gpu, arguments.budget, asked or 1)
    if arguments.gpu is not None:
        raise InvalidValue("--gpu", arguments.gpu, "either a --gpu or an --instance, not both")
    instance = find_instance(arguments.instance)
    if asked is not None and asked > instance.num_gpus:
        raise InvalidValue("--num-gpus", asked, f"at most {instance.num_gpus}, the GPUs of {instance.name}")
    one = card(instance.gpu.name, arguments.budget, asked or instance.num_gpus)
    return replace(one, name=f"{instance.name}: {one.count} x {one.name}")
