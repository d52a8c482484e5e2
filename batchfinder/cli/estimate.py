"""`estimate`: what the memory of one size is used for, whether a GPU has it, and which options would make it fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from batchfinder.cli.options import asked_card, check_file, seq_lens_of, step_options, whole_number, write_file
from batchfinder.devices import Device
from batchfinder.errors import BatchFinderError
from batchfinder.memory_use.breakdown import Estimate, bytes_over_time, estimate
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation, search_simulated
from batchfinder.recording.what_fits import FitSearch
from batchfinder.report.estimate import Alternative, EstimateFindings, EstimateRequest, estimate_tables
from batchfinder.report.page import cell_of_estimate, check_page, page_of
from batchfinder.report.plots import check_picture, draw_estimate
from batchfinder.report.progress import StatusLine
from batchfinder.report.terminal import words_of
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE, OWN_OPTIMIZER
from batchfinder.training.synonyms import one_of

# What holds less in its state than the optimizer that is the key.
_LIGHTER_OPTIMIZERS = {
    "adamw": ("adamw-fused", "adafactor", "sgd"),
    "adamw-fused": ("adafactor", "sgd"),
    "adam": ("adafactor", "sgd"),
    "adafactor": ("sgd",),
    "sgd-momentum": ("sgd",),
}
_STRATEGIES = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3, FSDP": "fsdp2"}
"""What is shown for several GPUs where none was asked for, by the names that it has there."""

Changes = dict[str, Any]
"""Options to be changed, by their names in Python."""


def main(arguments: argparse.Namespace) -> int:
    """Estimate one size; that it does not fit is a result, not an error."""
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
        check_file("--plot", arguments.plot)
    if arguments.html is not None:
        check_page("--html", arguments.html)
        check_file("--html", arguments.html)
    if arguments.markdown is not None:
        check_file("--markdown", arguments.markdown)
    if arguments.by is not None:
        one_of("--by", arguments.by, ("module",))
    found = run_estimate(read_request(arguments), arguments.advice or arguments.html is not None)
    tables = estimate_tables(found, by_module=arguments.by is not None, explain=arguments.explain)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        for number, table in enumerate(tables):
            print(end="\n" if number else "")
            table.show()
    if arguments.markdown is not None:
        write_file(
            "--markdown",
            arguments.markdown,
            "\n".join(table.to_markdown(is_last=table is tables[-1]) for table in tables),
        )
    if arguments.plot is not None:
        draw_estimate(found, arguments.plot)
    if arguments.html is not None:
        cell = cell_of_estimate(found, bytes_over_time(found.estimate.trace))
        write_file("--html", arguments.html, page_of(f"{cell.heading}, simulated", cell.technique, [cell]))
    return 0


def read_request(arguments: argparse.Namespace) -> EstimateRequest:
    """Check the options.

    Raises:
        InvalidValue: an option has an invalid value.
        UnknownName: no such GPU, instance or model.
    """
    count = whole_number("--gpus", arguments.gpus)
    chosen = asked_card(arguments, count)
    check_model_name(arguments.model)
    options = step_options(arguments)
    if options.strategy is None:  # several are tried
        options = replace(options, gpus=1)
    return EstimateRequest(
        model=arguments.model,
        batch_size=whole_number("--batch-size", arguments.batch_size),
        seq_len=whole_number("--seq-len", arguments.seq_len),
        card=replace(chosen, device=chosen.device.among_others(options.communicators)),
        options=options,
        accumulation=whole_number("--accumulation", arguments.accumulation),
        allocator=AllocatorSettings.from_environment(),
    )


def run_estimate(request: EstimateRequest, advice: bool = False) -> EstimateFindings:
    """Record the size asked for, and look for what trains where it does not fit.

    Args:
        advice: whether to try other options as well, one at a time.

    Raises:
        BatchFinderError: the model could not be built or recorded.
    """
    card, step = request.card, request.options.step(request.accumulation)
    spec = request.options.workload(request.model)
    with StatusLine() as line, ExitStack() as stack:
        opened = stack.enter_context(Simulation(spec, step, request.options.recorder))
        line.update(f"building {request.model}")
        facts, simulation = opened.facts(), opened
        if facts.parallelizes and card.count > 1:
            request = replace(request, options=replace(request.options, gpus=card.count))
            card = replace(card, device=card.device.among_others(request.options.communicators))
            simulation = opened.with_spec(spec, request.options.step(request.accumulation))
        asked = () if request.seq_len is None else (request.seq_len,)
        (seq_len,) = seq_lens_of(request.model, asked, facts)
        line.update(f"recording {request.model}")
        probe = simulation.probe(card.device, [seq_len], request.allocator)
        trace = probe.trace(request.batch_size, Shape(seq_len), exact=True)

        def estimated(one: Trace, device: Device) -> Estimate:
            memory = DeviceMemory(device.total_bytes, device.usable_bytes)
            return estimate(one, memory, device.context_bytes, request.allocator)

        alone = estimated(trace, card.device)
        alternatives, unmodelled = None, probe.unmodelled
        if request.options.recorder == CUDA_BUILD and (advice or not alone.fits or card.count > 1):
            simulation = stack.enter_context(Simulation(spec, step))
            probe = simulation.probe(card.device, [seq_len], request.allocator)
            unmodelled = (*unmodelled, "what other options would change is recorded on the fake device")
        may_change = request.options.mode == "train" and not request.options.optimizer_in_backward
        if advice or not (alone.fits or may_change):
            alternatives = suggest(request, simulation, probe, alone, line)
        changes = None
        if may_change and not alone.fits:
            target = request.batch_size * request.accumulation * card.count
            asked_for = replace(request.options, recorder=FAKE_DEVICE)
            search = FitSearch(request.model, asked_for, card, target, Shape(seq_len), simulation, line.update)
            changes = search.find()
        strategies = {}
        if card.count > 1 and request.options.gpus == 1:
            line.update(f"recording what {card.count} GPUs can do")
            asked_of = {}
            for name, strategy in _STRATEGIES.items():
                spread = replace(request.options, gpus=card.count, strategy=strategy)
                if spread.refused_together() is None:
                    recorded = simulation.with_spec(spec, spread.step(request.accumulation))
                    source = recorded.source(card.device.compute_capability, [seq_len])
                    asked_of[name] = source.ask(request.batch_size, seq_len)
            among = card.device.among_others(1)
            strategies = {name: estimated(recording.result(), among) for name, recording in asked_of.items()}
    if facts.brings_optimizer:
        request = replace(request, options=replace(request.options, optimizer=OWN_OPTIMIZER))
    return EstimateFindings(request, alone, strategies, alternatives, unmodelled, changes)


def suggest(
    request: EstimateRequest, simulation: Simulation, asked: SimulatedProbe, alone: Estimate, line: StatusLine
) -> tuple[Alternative, ...]:
    """Simulate other options: the memory of the batch asked for, and the largest batch on this GPU.

    The recordings of single changes are asked for at once, and made as many at a time as there are cores. A batch of
    one that does not fit needs one of each.

    Args:
        asked: the probe of the request as it is.
        alone: its estimate; what would change nothing of it is not tried.
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
        line.update("trying --accumulation")
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
        line.update(f"trying {as_typed(changes)}" if changes else "trying the same options with other batches")
        tried.append((changes, _alternative(changes, request, probe, seq_len)))
    together = combined(tried)
    if together is not None:
        line.update(f"trying {as_typed(together)}")
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
        return Alternative(as_typed(changes), batch_size, error=words_of(error).strip().splitlines()[-1])
    return Alternative(as_typed(changes), batch_size, peak, fits, most)


def _peak(request: EstimateRequest, probe: SimulatedProbe, batch_size: int, shape: Shape) -> tuple[int, bool]:
    """A size's peak with the CUDA context, and whether it fits; where it does not, the peak with unlimited memory."""
    seen = probe(batch_size, shape)
    reserved = seen.peak_reserved_bytes if seen.fits else None
    reserved = probe.needed_bytes(batch_size, shape) if reserved is None else reserved
    return reserved + request.card.device.context_bytes, seen.fits
