"""What other options would change about one size, one at a time and together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from batchfinder.errors import BatchFinderError
from batchfinder.memory_use.breakdown import Estimate
from batchfinder.recording.answers import search_simulated
from batchfinder.recording.simulation import Simulation
from batchfinder.report.estimate import Alternative, EstimateRequest
from batchfinder.report.terminal import last_line_of
from batchfinder.results import Shape
from batchfinder.simulator.steady_state import SimulatedProbe

# What holds less in its state than the optimizer that is the key.
_LIGHTER_OPTIMIZERS = {
    "adamw": ("adamw-fused", "adafactor", "sgd"),
    "adamw-fused": ("adafactor", "sgd"),
    "adam": ("adafactor", "sgd"),
    "adafactor": ("sgd",),
    "sgd-momentum": ("sgd",),
}

Changes = dict[str, Any]
"""Options to be changed, by their names in Python."""


def suggest(
    request: EstimateRequest,
    simulation: Simulation,
    asked: SimulatedProbe,
    alone: Estimate,
    status: Callable[[str], object],
) -> tuple[Alternative, ...]:
    """Simulate other options: the memory of the batch asked for, and the largest batch on this GPU.

    The recordings of single changes are asked for at once, and made as many at a time as there are cores. A batch of
    one that does not fit needs one of each.

    Args:
        asked: the probe of the request as it is.
        alone: its estimate; what would change nothing of it is not tried.
        status: is given a line on what is being done.
    """
    seq_len = alone.trace.seq_len
    singles: list[Changes] = [{}]
    singles += [
        changes
        for changes in single_changes(request, simulation.facts().brings_optimizer)
        if not changes_nothing(changes, alone)
    ]
    probes = [asked, *(_probe(request, simulation, seq_len, changes) for changes in singles[1:])]
    for probe in probes:
        if request.batch_size == 1:
            probe.traces.ask(1, seq_len)
        else:
            probe.traces.prefetch()
    accumulated = []
    if request.batch_size > 1 and request.options.mode == "train" and not request.options.optimizer_in_backward:
        again = _probe(replace(request, accumulation=max(2, request.accumulation)), simulation, seq_len)
        again.traces.prefetch()
        status("trying --accumulation")
        most = search_simulated(again, Shape(seq_len)).max_batch_size
        if 0 < most < request.batch_size:
            # The effective batch from as few micro-batches as fit, with accumulated gradients in memory. Where it
            # cannot be divided by their number it becomes a little larger.
            effective = request.batch_size * request.accumulation
            times = -(-effective // most)
            micro = -(-effective // times)
            peak, fits = _peak(request, again, micro, Shape(seq_len))
            typed = as_typed({"batch_size": micro, "accumulation": times})
            accumulated = [Alternative(typed, micro, peak, fits, most, effective_batch_size=micro * times)]
    tried = []
    for changes, probe in zip(singles, probes, strict=True):
        status(f"trying {as_typed(changes)}" if changes else "trying the same options with other batches")
        tried.append((changes, _alternative(changes, request, probe, seq_len)))
    together = combined(tried)
    if together is not None:
        status(f"trying {as_typed(together)}")
        probe = _probe(request, simulation, seq_len, together)
        tried.append((together, _alternative(together, request, probe, seq_len)))
    unchanged, *rest = [alternative for _, alternative in tried]
    return (unchanged, *accumulated, *rest)


_LEAST_OPTIMIZER_SHARE = 0.01
_ATTENTION = ("aten._scaled_dot_product_", "aten._safe_softmax")
_FUSED_ATTENTION = tuple(f"aten._scaled_dot_product_{kernel}" for kernel in ("flash", "cudnn", "efficient"))


def changes_nothing(changes: Changes, alone: Estimate) -> bool:
    """Whether options cannot matter: flash attention in place of a fused kernel, or the optimizer of a few adapters.

    An optimizer's state counts where it is at least 1 % of the peak.
    """
    if changes.get("attention") == "flash":
        kernels = {name for name in alone.trace.structure.operators if name.startswith(_ATTENTION)}
        return bool(kernels) and all(name.startswith(_FUSED_ATTENTION) for name in kernels)
    return "optimizer" in changes and alone.kinds.optimizer < _LEAST_OPTIMIZER_SHARE * alone.peak_bytes


def single_changes(request: EstimateRequest, brings_optimizer: bool) -> list[Changes]:
    """The changes worth trying, one at a time; a workload's own optimizer is not replaced."""
    asked = request.options
    bf16 = request.card.device.has_bf16
    worth: list[Changes] = []
    if asked.precision == "fp32":
        worth.append({"precision": "bf16-mixed" if bf16 else "16-mixed"})
    elif asked.precision == "bf16-mixed" and asked.mode == "train":
        worth.append({"precision": "bf16-true"})
    if asked.mode == "train" and not asked.gradient_checkpointing:
        worth.append({"gradient_checkpointing": True})
    if asked.attention == "eager":
        worth.append({"attention": "sdpa"})
    elif asked.attention != "flash" and asked.precision != "fp32" and bf16:
        worth.append({"attention": "flash"})
    if asked.mode == "train" and not brings_optimizer:
        worth += [{"optimizer": optimizer} for optimizer in _LIGHTER_OPTIMIZERS.get(asked.optimizer, ())]
    return [change for change in worth if replace(asked, **change).refused_together() is None]


def combined(tried: Iterable[tuple[Changes, Alternative]]) -> Changes | None:
    """All changes that could be made and leave training much as it is, at once; None where there are not several.

    Another optimizer, and weights in 16 bits, train differently.
    """
    changes = {
        name: value
        for single, alternative in tried
        for name, value in single.items()
        if alternative.error is None and name != "optimizer" and value != "bf16-true"
    }
    return changes if len(changes) > 1 else None


def as_typed(changes: Changes) -> str:
    """The changes as options of the command line."""
    typed = (f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in changes.items())
    return " ".join(typed)


def _probe(
    request: EstimateRequest, simulation: Simulation, seq_len: int | None, changes: Changes | None = None
) -> SimulatedProbe:
    """A probe of the request with other options."""
    request = replace(request, options=replace(request.options, **(changes or {})))
    spec, step = request.options.workload(request.model), request.options.step(request.accumulation)
    return simulation.with_spec(spec, step).probe(request.card.device, [seq_len], request.allocator)


def _alternative(changes: Changes, request: EstimateRequest, probe: SimulatedProbe, seq_len: int | None) -> Alternative:
    shape, batch_size = Shape(seq_len), request.batch_size
    try:
        if batch_size == 1:
            peak, fits = _peak(request, probe, 1, shape)
            most = search_simulated(probe, shape).max_batch_size if fits else 0
        else:
            most = search_simulated(probe, shape).max_batch_size
            peak, fits = _peak(request, probe, batch_size, shape)
    except BatchFinderError as error:
        # Some models refuse an option, or fail with it.
        return Alternative(as_typed(changes), batch_size, error=last_line_of(error))
    return Alternative(as_typed(changes), batch_size, peak, fits, most)


def _peak(request: EstimateRequest, probe: SimulatedProbe, batch_size: int, shape: Shape) -> tuple[int, bool]:
    """A size's peak with the CUDA context, and whether it fits; where it does not, the peak with unlimited memory."""
    seen = probe(batch_size, shape)
    reserved = seen.peak_reserved_bytes if seen.fits else None
    reserved = probe.needed_bytes(batch_size, shape) if reserved is None else reserved
    return reserved + request.card.device.context_bytes, seen.fits
