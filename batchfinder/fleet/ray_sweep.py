"""A sweep whose models and GPUs are tasks of a Ray cluster, which share one cache.

A task is a model on some GPUs. It looks up each of its cells in the cache first and keeps each as it is found, so that
a task which Ray starts again elsewhere, or a later command, goes on where the last one ended. Ray carries rows to the
driver (a streaming generator), starts tasks again whose node has died (`max_retries`) and places measured ones
(`accelerator_type`).
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, redirect_stdout, suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import read_request, real_gpu
from batchfinder.devices import find_gpu
from batchfinder.errors import BatchFinderError, CacheFailed, InvalidValue, MissingExtra, UnknownName
from batchfinder.recording.simulation import Simulation
from batchfinder.report.progress import SweepProgress
from batchfinder.report.sweep import SweepRow
from batchfinder.report.terminal import tell, words_of
from batchfinder.sizing.cells import ModelCells
from batchfinder.sizing.measured_cells import measure_cells
from batchfinder.sizing.simulated_cells import simulate_cells
from batchfinder.sizing.sweep_request import DEFAULT_SEQ_LENS, SIMULATED, SweepRequest
from batchfinder.training.spec import seq_lens_of
from batchfinder.versions import installed

_MAX_RETRIES = 5
"""How often Ray starts a task again whose node or process has died."""
_TOKENS_SINCE, _TOKENS_BY_DEFAULT_SINCE = (2, 52), (2, 59)
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True)
class Begun:
    """What a task says first.

    Attributes:
        host: the machine's name.
        versions: what it has installed.
        cards: the names of its GPUs: a measured one is known there only.
        lengths: the sequence lengths of the model.
    """

    host: str
    versions: dict[str, str]
    cards: tuple[str, ...]
    lengths: tuple[int | None, ...]


@dataclass(frozen=True)
class Failed:
    """Why a task found no more; `url` is of a cache that could not be used, empty for any other reason."""

    words: str
    url: str = ""


@dataclass(frozen=True)
class CellGroup:
    """A task: one model on some GPUs, or measured on one GPU of a kind.

    Attributes:
        request: for this model and these cards alone; a measured one's card is found where it runs.
        accelerator: Ray's name of the kind of GPU, empty for simulated cells.
    """

    request: SweepRequest
    accelerator: str = ""

    @property
    def model(self) -> str:
        (model,) = self.request.models
        return model

    def find(self, folder: str) -> Iterator[Begun | SweepRow | Failed]:
        """Run the task, on a worker: first a `Begun`, then each row as it is found, and a `Failed` if it ends early.

        Args:
            folder: the driver's, in which paths and factories of models are looked for.
        """
        with suppress(OSError):
            os.chdir(folder)
        request = self.request
        try:
            if self.accelerator:
                request = replace(request, place=real_gpu("cuda", request.place.budget_bytes))
                request.reserve_bytes(request.place.cards[0])
            options = request.options
            with Simulation(options.workload(self.model), request.step, options.recorder) as simulation:
                lengths = seq_lens_of(self.model, request.seq_lens, simulation.facts(), DEFAULT_SEQ_LENS)
                yield Begun(socket.gethostname(), versions(), tuple(card.name for card in request.place.cards), lengths)
                find = measure_cells if self.accelerator else simulate_cells
                yield from find(ModelCells(self.model, simulation, lengths, request), lambda status: None)
        except CacheFailed as error:
            yield Failed(error.reason, error.url)
        except BatchFinderError as error:
            yield Failed(words_of(error))


def versions() -> dict[str, str]:
    """The versions that figures depend on, of what is installed here."""
    return {"python": platform.python_version(), **installed("torch", "transformers", "pytorch-lightning")}


def run_on_ray(request: SweepRequest, progress: SweepProgress, address: str | None = None) -> bool:
    """Find every cell on a Ray cluster, telling `progress` of each as it arrives; as `sizing.sweep.find_rows` here.

    Args:
        address: the cluster's; None for `RAY_ADDRESS`, the one that this machine is part of, or one on this machine.

    Returns:
        Whether every task found all of its cells.

    Raises:
        CacheFailed: the cache cannot be read.
        InvalidValue: there is no such cluster, none that asks for a token can be started, or it has no such GPU.
        MissingExtra: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) and error.name == "ray" else str(error)
        raise MissingExtra("ray", "ray", "--engine ray", reason) from error
    own = not ray.is_initialized()
    with ExitStack() as stack:
        # Ray prints there what happens to nodes, among our JSON.
        stack.enter_context(redirect_stdout(sys.stderr))
        if own:
            # Ray's workers import modules from the folder in which it is started, before they run a task: `queue.py` of
            # the user's would take the place of Python's. Tasks go to the user's folder themselves.
            empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="batchfinder-"))
            unsafe = _why_none_is_started(ray, address)
            if unsafe and "local" in (address, os.environ.get("RAY_ADDRESS")):
                raise InvalidValue("--address", address, f"the address of a Ray cluster{unsafe}")
            wanted = "auto" if unsafe else address  # with which Ray joins a cluster, and starts none
            try:
                with chdir(empty):
                    ray.init(address=wanted, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                expected = f"the address of a Ray cluster ({reason.rstrip('.')}){unsafe}"
                raise InvalidValue("--address", address, expected) from error
            stack.callback(ray.shutdown)
        groups = divide(request, ray.nodes())
        if request.cache is not None and "://" not in request.cache.url and len(alive(ray.nodes())) > 1:
            tell(f"batchfinder: each machine keeps results at {request.cache.url}; --cache s3://... is one for all")
        return _collect(ray, groups, request, progress)


def _why_none_is_started(ray: ModuleType, address: str | None) -> str:
    """Why Ray is to start no cluster here, to follow what `--address` is expected to be; empty where it may.

    A cluster's ports are open on all of the machine's addresses. Whoever reaches them can run code there, unless it
    asks for a token: since Ray 2.52 with `RAY_AUTH_MODE=token`, since 2.59 unless another mode is set.
    See https://docs.ray.io/en/latest/ray-security/token-auth.html.
    """
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    version = tuple(map(int, ray.__version__.split(".")[:2]))
    mode = os.environ.get("RAY_AUTH_MODE", "token" if version >= _TOKENS_BY_DEFAULT_SINCE else "disabled")
    if address not in (None, "local") or (version >= _TOKENS_SINCE and mode.lower() == "token"):
        return ""
    install = "" if version >= _TOKENS_SINCE else f"install Ray 2.52 or later ({ray.__version__} is here) and "
    return (
        ": one that is started here would run the code of anyone who can reach this machine. To start one that asks "
        f"for a token, {install}set RAY_AUTH_MODE=token"
    )


def alive(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `ray.nodes()` that are up."""
    return [node for node in nodes if node["Alive"]]


def divide(request: SweepRequest, nodes: Sequence[dict[str, Any]]) -> list[CellGroup]:
    """The tasks of a sweep.

    Simulated GPUs of a model share their recordings, so they are divided no further than gives each CPU something to
    do, those of one compute capability together. Measured are all kinds of GPU in the cluster, or those named.

    Args:
        nodes: `ray.nodes()`.

    Raises:
        InvalidValue: the cluster has no GPU, or none of those named.
    """
    place, up = request.place, alive(nodes)
    if place.device != SIMULATED:
        names = {name for node in up for name in node["Resources"] if name.startswith(_ACCELERATOR)}
        kinds = sorted(name.removeprefix(_ACCELERATOR) for name in names)
        wanted = {card.device.name for card in place.cards}
        chosen = [kind for kind in kinds if not wanted or _gpu_name(kind) in wanted]
        if not chosen or wanted - {_gpu_name(kind) for kind in chosen}:
            there = f"a GPU of the cluster, which has {', '.join(kinds) or 'none that Ray knows the type of'}"
            raise InvalidValue("--gpu" if wanted else "--device", ", ".join(sorted(wanted)) or place.device, there)
        alone = replace(request, place=replace(place, cards=()))
        return [CellGroup(replace(alone, models=(model,)), kind) for model in request.models for kind in chosen]
    cpus = int(sum(node["Resources"].get("CPU", 0) for node in up))
    parts = min(len(place.cards), max(1, cpus // len(request.models)))
    ordered = sorted(place.cards, key=lambda card: card.device.compute_capability)
    each = -(-len(ordered) // parts)
    shares = [tuple(ordered[start : start + each]) for start in range(0, len(ordered), each)]
    return [
        CellGroup(replace(request, models=(model,), place=replace(place, cards=share)))
        for model in request.models
        for share in shares
    ]


def _gpu_name(kind: str) -> str:
    """The catalogue's name of a kind of GPU that Ray names; Ray's own where it is not in the catalogue."""
    try:
        return find_gpu(kind).name
    except UnknownName:
        return kind


def _collect(ray: ModuleType, groups: Sequence[CellGroup], request: SweepRequest, progress: SweepProgress) -> bool:
    """Start the tasks and tell `progress` of their rows until all have ended; whether none has failed."""
    find = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES, num_returns="streaming")(CellGroup.find)
    tasks: dict[Any, CellGroup] = {}
    for group in groups:
        placed = {"num_gpus": 1, "accelerator_type": group.accelerator} if group.accelerator else {}
        tasks[find.options(**placed).remote(group, os.getcwd())] = group
    # By task, as far as they are known: a model may not allow all lengths, and a real GPU's name is found where it is.
    lengths: tuple[int | None, ...] = request.seq_lens or DEFAULT_SEQ_LENS
    cells = {
        task: (tuple(card.name for card in group.request.place.cards) or (group.accelerator,), lengths)
        for task, group in tasks.items()
    }
    models, cards = list(request.models), [card.name for card in request.place.cards]

    def expect() -> None:
        known = [
            (group.model, card, length)
            for task, group in tasks.items()
            for card in cells[task][0]
            for length in cells[task][1]
        ]
        order = [*cards, *dict.fromkeys(card for _, card, _ in known)]
        progress.expect(sorted(known, key=lambda cell: (models.index(cell[0]), order.index(cell[1]))))

    expect()
    driver, told, found = versions(), set[str](), set[tuple[str, str, int | None]]()
    running, complete = list(tasks), True
    while running:
        progress.update(f"{len(tasks) - len(running)} of {len(tasks)} tasks on Ray have ended", terminal_only=True)
        (task,), _ = ray.wait(running, num_returns=1)
        try:
            said = ray.get(next(task))
        except StopIteration:
            running.remove(task)
            continue
        except ray.exceptions.RayError as error:
            said = Failed(f"{tasks[task].model}: its task on Ray failed: {str(error).strip().splitlines()[-1]}")
        if isinstance(said, Begun):
            cells[task] = said.cards, said.lengths
            expect()
            differing = {name for name in {*driver, *said.versions} if driver.get(name) != said.versions.get(name)}
            if differing and said.host not in told:
                told.add(said.host)
                words = ", ".join(
                    f"{name} {said.versions.get(name, 'missing')} ({driver.get(name, 'missing')} here)"
                    for name in sorted(differing)
                )
                tell(f"batchfinder: {said.host} has {words}; its figures are for what it has")
        elif isinstance(said, Failed):
            running.remove(task)
            if said.url:
                raise CacheFailed(said.url, said.words)
            kind = tasks[task].accelerator
            progress.failed(BatchFinderError(f"on {kind}: {said.words}" if kind else said.words))
            complete = False
        else:
            cell = said.cell.model, said.cell.card.name, said.cell.seq_len
            if cell not in found:  # a task that was started again says all it has
                found.add(cell)
                progress.found(said)
    return complete


def sweep(
    models: Sequence[str],
    gpus: Sequence[str] = (),
    seq_lens: Sequence[int] = (),
    *,
    device: str = "simulated",
    address: str | None = None,
    cache: str | None = None,
    options: Sequence[str] = (),
) -> list[SweepRow]:
    """Sweep on a Ray cluster, as `batchfinder sweep --engine ray` does.

    Args:
        models: as `--model` takes them.
        gpus: to simulate; with `device="cuda"` those of the cluster to measure on, all kinds of them by default.
        seq_lens: in tokens or pixels; by default those that suit each model.
        device: `simulated` or `cuda`.
        address: of the cluster; None for `RAY_ADDRESS`, the one that this machine is part of, or one on this machine.
        cache: an fsspec URL that all machines reach, such as `s3://bucket/batchfinder`.
        options: more of the command's, such as `["--precision", "bf16-mixed"]`.

    Returns:
        The rows in the order asked for; of models that fail none, with the reason on stderr.

    Raises:
        BatchFinderError: as the command ends with: `InvalidValue`, `UnknownName`, `CacheFailed`, `MissingExtra`.

    Example:
        >>> rows = sweep(["bert-base"], ["t4", "a100"], [128], cache="s3://lab/batchfinder")  # doctest: +SKIP
    """
    words = ["sweep", "--engine", "ray", "--device", device, *options]
    for option, values in {"--model": models, "--gpu": gpus, "--seq-len": map(str, seq_lens)}.items():
        words += [f"{option}={value}" for value in values]
    words += [f"--cache={cache}"] if cache is not None else []
    request = read_request(build_parser().parse_args(words))
    progress = SweepProgress(request.conditions)
    with progress:
        run_on_ray(request, progress, address)
    return progress.rows
