"""What changes of the options would buy: each one simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.cli.estimate_request import EstimateRequest
from batchfinder.errors import BatchFinderError
from batchfinder.outcome import Shape
from batchfinder.report.estimate_findings import Changed
from batchfinder.report.progress import Activity
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.tracing.simulated_search import search_simulated
from batchfinder.tracing.simulation import Simulation

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
    request: EstimateRequest, simulation: Simulation, seq_len: int | None, activity: Activity
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
