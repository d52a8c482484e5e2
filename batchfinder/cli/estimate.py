"""What an estimate's options ask for, checked before anything is built.

What changes of the options would buy: each one simulated.

What the memory of one size is for, whether a card has it, and what would make it fit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.cli.files import check_file, write_file
from batchfinder.cli.options import (
    DEFAULT_GPU,
    Card,
    allocator_notes,
    allocator_settings,
    card,
    check_model_name,
    how_to_step,
    one_of,
    one_seq_len,
    optional_number,
    whole_number,
    workload_spec,
)
from batchfinder.devices import find_instance
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.estimate.estimate import Estimate, estimate
from batchfinder.estimate.sharding import STRATEGIES, side_by_side
from batchfinder.recording.simulation import Simulation, StepConfig, search_simulated
from batchfinder.report.estimate import Changed, EstimateFindings, estimate_sheets
from batchfinder.report.plots import check_picture, draw_estimate
from batchfinder.report.progress import StatusLine
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import WorkloadSpec


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
    def how(self) -> StepConfig:
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


# Those that keep more in their state than the ones named after them, and what else holds less.
_LIGHTER_OPTIMIZERS = {
    "adamw": ("adamw-fused", "adafactor", "sgd"),
    "adamw-fused": ("adafactor", "sgd"),
    "adam": ("adafactor", "sgd"),
    "adafactor": ("sgd",),
    "sgd-momentum": ("sgd",),
}
_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Change:
    """Options to be changed; as a string, what is typed for them.

    Attributes:
        options: by their names in Python; empty for no change.
    """

    options: dict[str, Any]

    def __str__(self) -> str:
        typed = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in self.options.items()
        ]
        return " ".join(typed)


def changes(request: EstimateRequest, brings_optimizer: bool) -> Iterator[Change]:
    """The changes worth trying, one at a time.

    Args:
        request: what was asked for.
        brings_optimizer: whether the workload has an optimizer of its own.
    """
    asked, how = request.options, request.how
    bf16 = request.card.device.compute_capability >= _BF16_CAPABILITY
    kept: dict[str, Any] = {}
    if how.precision == "fp32":
        kept["precision"] = "bf16-mixed" if bf16 else "16-mixed"
    elif how.precision == "bf16-mixed" and how.mode == "train":
        kept["precision"] = "bf16-true"
    if how.mode == "train" and not asked.gradient_checkpointing:
        kept["gradient_checkpointing"] = True
    halves = how.precision != "fp32"
    if asked.attention == "eager":
        kept["attention"] = "sdpa"
    elif asked.attention != "flash" and halves and bf16:
        kept["attention"] = "flash"
    for name, value in kept.items():
        yield Change({name: value})
    if how.mode == "train" and not brings_optimizer:
        for optimizer in _LIGHTER_OPTIMIZERS.get(how.optimizer, ()):
            yield Change({"optimizer": optimizer})


def combined(tried: Iterable[tuple[Change, Changed]]) -> Change | None:
    """All changes at once that could be made and leave training much as it is; None where there are not several.

    Another optimizer, and weights that are held in 16 bits, train otherwise.

    Args:
        tried: single changes and what they bought.
    """
    options = {
        name: value
        for change, changed in tried
        for name, value in change.options.items()
        if changed.error is None and name != "optimizer" and value != "bf16-true"
    }
    return Change(options) if len(options) > 1 else None


def advise(
    request: EstimateRequest, simulation: Simulation, seq_len: int | None, activity: StatusLine
) -> tuple[Changed, ...]:
    """Simulate each change: the memory of the batch asked for, and the largest batch on this card.

    The single changes' recordings are asked for at once, and made as many at a time as there are cores.

    Args:
        request: what was asked for.
        simulation: of it.
        seq_len: tokens per sample; None for data of one fixed shape.
        activity: is told what is being done.
    """
    singles = [Change({}), *changes(request, simulation.facts().brings_optimizer)]
    probes = [_probe(request.changed(**change.options), simulation, seq_len) for change in singles]
    accumulated = []
    if request.how.mode == "train":
        again = _probe(replace(request, accumulation=max(2, request.accumulation)), simulation, seq_len)
        activity.doing("trying --accumulation")
        accumulated = _accumulated(request, again, seq_len)
    tried = []
    for change, probe in zip(singles, probes, strict=True):
        activity.doing(f"trying {change}" if change.options else "trying the same options with other batches")
        tried.append((change, _changed(change, request, probe, seq_len)))
    together = combined(tried)
    if together is not None:
        activity.doing(f"trying {together}")
        probe = _probe(request.changed(**together.options), simulation, seq_len)
        tried.append((together, _changed(together, request, probe, seq_len)))
    none, *rest = [changed for _, changed in tried]
    return (none, *accumulated, *rest)


def _probe(request: EstimateRequest, simulation: Simulation, seq_len: int | None) -> SimulatedProbe:
    """A probe whose recordings are on their way."""
    varied = simulation.varied(request.spec, request.how)
    probe = varied.probe(request.card.device, [seq_len], request.allocator)
    probe.traces.prefetch()
    return probe


def _changed(change: Change, request: EstimateRequest, probe: SimulatedProbe, seq_len: int | None) -> Changed:
    shape, batch_size = Shape(seq_len), request.batch_size
    try:
        most = search_simulated(probe, shape).max_batch_size
        peak, fits = _taken(request, probe, batch_size, shape)
    except BatchFinderError as error:
        # Some models refuse an option, or fail with it: that is what there is to say of this change.
        return Changed(str(change), batch_size, error=str(error).strip().splitlines()[-1])
    return Changed(str(change), batch_size, peak, fits, most)


def _accumulated(request: EstimateRequest, probe: SimulatedProbe, seq_len: int | None) -> list[Changed]:
    """The effective batch from as few micro-batches as fit, the gradients of one there while the next one runs.

    Where it cannot be divided by their number it becomes a little larger.
    """
    shape = Shape(seq_len)
    most = search_simulated(probe, shape).max_batch_size
    if not 0 < most < request.batch_size:
        return []
    effective = request.batch_size * request.accumulation
    times = -(-effective // most)
    micro = -(-effective // times)
    change = Change({"batch_size": micro, "accumulation": times})
    peak, fits = _taken(request, probe, micro, shape)
    return [Changed(str(change), micro, peak, fits, most, effective_batch_size=micro * times)]


def _taken(request: EstimateRequest, probe: SimulatedProbe, batch_size: int, shape: Shape) -> tuple[int, bool]:
    """What a size takes of the card, the context included, and whether it has that; if not, as on one without end."""
    seen = probe(batch_size, shape)
    reserved = seen.peak_reserved_bytes if seen.fits else None
    reserved = probe.needed_bytes(batch_size, shape) if reserved is None else reserved
    return reserved + request.card.device.context_bytes, seen.fits


def main(arguments: argparse.Namespace) -> int:
    """Estimate one size; that it does not fit is a finding, not a failure."""
    check_picture("--plot", arguments.plot)
    request = read_request(arguments)
    found = run_estimate(request)
    sheets = estimate_sheets(found)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        for number, sheet in enumerate(sheets):
            print(end="\n" if number else "")
            sheet.show()
    if arguments.markdown is not None:
        write_file("--markdown", arguments.markdown, "\n".join(sheet.to_markdown() for sheet in sheets))
    if arguments.plot is not None:
        draw_estimate(found, arguments.plot)
    return 0


def run_estimate(request: EstimateRequest) -> EstimateFindings:
    """Record the size asked for and all that is said about it.

    Args:
        request: what was asked for.

    Raises:
        BatchFinderError: the model could not be built or recorded.
    """
    card, how = request.card, request.how
    with StatusLine() as activity, Simulation(request.spec, how) as simulation:
        activity.doing(f"building {request.model}")
        facts = simulation.facts()
        seq_len = one_seq_len(request.seq_len, facts)
        activity.doing(f"recording {request.model}")
        probe = simulation.probe(card.device, [seq_len], request.allocator)
        trace = probe.exact_trace(request.batch_size, Shape(seq_len))

        def estimated(one: Trace) -> Estimate:
            return estimate(one, probe.memory, card.device.context_bytes, request.allocator)

        alone = estimated(trace)
        advice = None
        if request.advice or not alone.fits:
            advice = advise(request, simulation, seq_len, activity)
    together = {}
    if card.count > 1:
        share = 0.5 if how.precision.endswith("-mixed") else 1.0
        together = {
            name: estimated(side_by_side(trace, stage, card.count, share)) for name, stage in STRATEGIES.items()
        }
    return EstimateFindings(
        model=request.model,
        gpu=card.name,
        num_gpus=card.count,
        mode=how.mode,
        precision=how.precision,
        optimizer="its own" if facts.brings_optimizer else how.optimizer,
        attention=request.options.attention or "default",
        gradient_checkpointing=request.options.gradient_checkpointing,
        accumulation=request.accumulation,
        estimate=alone,
        strategies=together,
        advice=advice,
        by_module=request.by_module,
        unmodelled=(*probe.unmodelled, *allocator_notes(request.allocator)),
    )
