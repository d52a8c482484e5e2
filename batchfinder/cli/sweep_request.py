"""What a sweep's options ask for, checked before anything is built, and which device its figures are for."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace

from batchfinder.cache import Store
from batchfinder.cli.options import read_prices, step_options, whole_number
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
from batchfinder.devices.cards import card, card_here, instance_card, named_gpus
from batchfinder.devices.catalog import DEFAULT_COMPUTE_CAPABILITY
from batchfinder.errors import BatchFinderError, CudaStubUnavailable, InvalidValue, UnknownName
from batchfinder.measure.child_probe import query_gpu
from batchfinder.measure.host_limits import available_bytes
from batchfinder.models.catalog import check_model_name
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.sizing.sweep_request import CPU, SIMULATED, Place, SweepRequest, check_request
from batchfinder.training.spec import AUTO, FAKE_DEVICE
from batchfinder.units import GIB, MIB, format_bytes, parse_budget, parse_headroom, parse_share, parse_utilisation

DEFAULT_MODELS = ("bert-base", "bert-large")
CUDA_DEVICE = re.compile(r"cuda(:\d+)?")
PUBLISHED_GPU = "titan x"
"""Simulated by a sweep without a GPU: BERT's published table, which stands beside the default models', is of it."""


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
            return Place(SIMULATED, (card(None if arguments.budget else PUBLISHED_GPU, arguments.budget),))
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
        chosen = card(PUBLISHED_GPU, None)
        note = f"no GPU was found here, and no --gpu is named: simulating {chosen.name}{unusable}"
        return Place(SIMULATED, (chosen,), notes=(note,))
    here = {one.name: one for one in map(card_here, present)}
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
    count, capability = facts.multiprocessors, facts.compute_capability
    real = Device(facts.name, facts.total_bytes, usable, capability, multiprocessors=count)
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
        exact=arguments.exact,
        mfu=None if arguments.mfu is None else parse_utilisation(arguments.mfu, "--mfu"),
    )
    if request.throughput and (request.place.device == SIMULATED or request.place.on_stub):
        expected = "a real GPU or --device cpu with it: a simulated step takes no time, so its speed is not known"
        raise InvalidValue("--throughput", True, expected)
    if request.throughput and request.options.mode != "train":
        raise InvalidValue("--throughput", True, f"--mode train with it, not {request.options.mode}")
    # A cluster's workers may be without the CUDA build that is here.
    recorder = FAKE_DEVICE if arguments.recorder == AUTO and arguments.engine == "ray" else arguments.recorder
    request = check_request(request, options, arguments.gpus is not None, recorder)
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
