"""What the memory of one size is used for, whether a GPU has it, and which options would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from batchfinder.devices import Card, Device, find_gpu
from batchfinder.devices.cards import USUAL_GPU, card, instance_card
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.memory_use import breakdown
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation
from batchfinder.recording.what_fits import FitSearch
from batchfinder.report.estimate import EstimateFindings, EstimateRequest
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.trace import Trace
from batchfinder.sizing.alternatives import suggest
from batchfinder.sizing.recorder import choose_recorder, instead_of_cuda_build
from batchfinder.training.spec import (
    AUTO,
    FAKE_DEVICE,
    OWN_OPTIMIZER,
    StepOptions,
    StepWords,
    is_cuda_build,
    named_recorder,
    seq_lens_of,
    torch_of,
)
from batchfinder.units import parse_count

_STRATEGIES = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3, FSDP": "fsdp2"}
"""What is shown for several GPUs where none was asked for, by the names that it has there."""


def estimate(
    model: str,
    batch_size: int = 1,
    *,
    seq_len: int | None = None,
    gpu: str | None = None,
    instance: str | None = None,
    gpus: int | None = None,
    accumulation: int = 1,
    advice: bool = False,
    recorder: str = AUTO,
    status: Callable[[str], object] | None = None,
    **options: Unpack[StepWords],
) -> EstimateFindings:
    """What the memory of one size is used for, simulated: `batchfinder estimate` in Python.

    That it does not fit is a result: the findings say by how much, and under which options it trains.

    Args:
        model: as `batchfinder estimate` takes it: a name, an id on the Hugging Face Hub, a path to a config.json or its
            folder, or `package.module:factory`.
        batch_size: samples in a GPU's micro-batch.
        seq_len: tokens per sample, or pixels of an image's side; None for the model's usual one, such as 128 or 224.
        gpu: a name of `batchfinder.devices`; None for an A100 of 80 GB, unless there is an instance.
        instance: the GPUs of a cloud instance instead, such as `p4d.24xlarge`.
        gpus: how many train, each with a batch of its own; None for the instance's, or 1.
        accumulation: micro-batches per optimizer step.
        advice: whether to say what other options would change, also where it fits.
        recorder: what records the step: `fake-device`, or `cuda-build` for PyTorch's own CUDA code without a GPU
            (`batchfinder stub install` brings it); by default that where it is here.
        status: is called with a line on what is being done, such as `print`; None for silence.
        options: of the step, by their names in Python: `mode`, `precision`, `optimizer`, `attention`,
            `gradient_checkpointing`, `compile`, `loss`, `packed`, `optimizer_in_backward`, `lora`, `lora_targets`,
            `quantization`, `strategy`, `tensor_parallel`, `context_parallel`.

    Raises:
        InvalidValue: an argument cannot be used.
        UnknownName: no such GPU, instance or model.
        CudaStubUnavailable: the CUDA build is to record, and cannot be had here.
        BatchFinderError: the model cannot be built or recorded.

    Example:
        >>> found = estimate("bert-base", 32, gpu="T4", seq_len=128)  # doctest: +SKIP
        >>> found.fits, found.peak_bytes, found.bytes_by_kind["activations"]  # doctest: +SKIP
        (True, 4295890043, 2494563524)
    """
    if instance is not None and gpu is not None:
        raise InvalidValue("gpu", gpu, "either a gpu or an instance, not both")
    count = None if gpus is None else parse_count(gpus, "gpus")
    if instance is not None:
        chosen = instance_card(instance, count=count)
    else:
        chosen = card(find_gpu(gpu or USUAL_GPU).name, count=count or 1)
    together = chosen.count if instance is not None and options.get("strategy") is not None else count
    step = StepOptions.checked(gpus=together, **options)
    request = check_request(model, batch_size, seq_len, chosen, step, accumulation, recorder)
    return run_estimate(request, advice, status or (lambda doing: None))


def check_request(
    model: str,
    batch_size: int | str,
    seq_len: int | str | None,
    chosen: Card,
    options: StepOptions,
    accumulation: int | str,
    recorder: str = AUTO,
) -> EstimateRequest:
    """What is to be estimated, on a card that has what its GPUs need to talk to each other; numbers may be as typed.

    Raises:
        InvalidValue: a number is none of at least 1.
        UnknownName: no such model.
    """
    check_model_name(model)
    if options.strategy is None:  # several are tried
        options = replace(options, gpus=1)
    named = named_recorder(recorder)
    taken = choose_recorder(options, [chosen]) if named == AUTO else named
    return EstimateRequest(
        model=model,
        batch_size=parse_count(batch_size, "batch_size"),
        seq_len=None if seq_len is None else parse_count(seq_len, "seq_len"),
        card=replace(chosen, device=chosen.device.among_others(options.communicators)),
        options=replace(options, recorder=taken),
        accumulation=parse_count(accumulation, "accumulation"),
        allocator=AllocatorSettings.from_environment(torch_of(taken)),
        chooses_recorder=named == AUTO,
    )


def run_estimate(request: EstimateRequest, advice: bool, status: Callable[[str], object]) -> EstimateFindings:
    """Record the size asked for, and look for what trains where it does not fit.

    Args:
        advice: whether to try other options as well, one at a time.
        status: is given a line on what is being done.

    Raises:
        BatchFinderError: the model could not be built or recorded.
    """
    try:
        return _estimate(request, advice, status)
    except BatchFinderError as error:
        chosen = request.chooses_recorder and is_cuda_build(request.options.recorder)
        if not chosen or isinstance(error, InvalidValue):
            raise
        found = _estimate(replace(request, options=replace(request.options, recorder=FAKE_DEVICE)), advice, status)
        return replace(found, unmodelled=(*found.unmodelled, instead_of_cuda_build(error)))


def _estimate(request: EstimateRequest, advice: bool, status: Callable[[str], object]) -> EstimateFindings:
    card, step = request.card, request.options.step(request.accumulation)
    spec = request.options.workload(request.model)
    with Simulation(spec, step, request.options.recorder) as opened:
        status(f"building {request.model}")
        facts, simulation = opened.facts(), opened
        if facts.parallelizes and card.count > 1:
            request = replace(request, options=replace(request.options, gpus=card.count))
            card = replace(card, device=card.device.among_others(request.options.communicators))
            simulation = opened.with_spec(spec, request.options.step(request.accumulation))
        asked = () if request.seq_len is None else (request.seq_len,)
        (seq_len,) = seq_lens_of(request.model, asked, facts)
        status(f"recording {request.model}")
        probe = simulation.probe(card.device, [seq_len], request.allocator)
        trace = probe.trace(request.batch_size, Shape(seq_len), exact=True)

        def estimated(one: Trace, device: Device) -> breakdown.Estimate:
            memory = DeviceMemory(device.total_bytes, device.usable_bytes)
            return breakdown.estimate(one, memory, device.context_bytes, request.allocator)

        alone = estimated(trace, card.device)
        alternatives, unmodelled = None, probe.unmodelled
        if is_cuda_build(request.options.recorder) and (advice or not alone.fits or card.count > request.options.gpus):
            simulation = opened.on_fake_device()
            probe = simulation.probe(card.device, [seq_len], request.allocator)
            unmodelled = (*unmodelled, "what other options would change is recorded on the fake device")
        may_change = request.options.mode == "train" and not request.options.optimizer_in_backward
        if advice or not (alone.fits or may_change):
            alternatives = suggest(request, simulation, probe, alone, status)
        changes = None
        if may_change and not alone.fits:
            target = request.batch_size * request.accumulation * card.count
            asked_for = replace(request.options, recorder=FAKE_DEVICE)
            tries = opened if is_cuda_build(request.options.recorder) else None
            search = FitSearch(request.model, asked_for, card, target, Shape(seq_len), simulation, status, tries=tries)
            changes = search.find()
        strategies = {}
        if card.count > 1 and request.options.gpus == 1:
            status(f"recording what {card.count} GPUs can do")
            asked_of = {}
            for name, strategy in _STRATEGIES.items():
                spread = replace(request.options, gpus=card.count, strategy=strategy)
                if spread.refused_together() is None:
                    recorded = simulation.with_spec(spec, spread.step(request.accumulation))
                    asked_of[name] = recorded.source(card.device.compute_capability, [seq_len], card.device.reduces_on)
                    asked_of[name].ask(request.batch_size, seq_len)
            among, size = card.device.among_others(1), request.batch_size
            strategies = {name: estimated(source.recorded(size, seq_len), among) for name, source in asked_of.items()}
    if facts.brings_optimizer:
        request = replace(request, options=replace(request.options, optimizer=OWN_OPTIMIZER))
    return EstimateFindings(
        request, alone, strategies, alternatives, unmodelled, changes, recorder_version=facts.versions["torch"]
    )
