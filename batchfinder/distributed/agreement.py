"""Agreement between the ranks of a run: a group of their own, and a probe, a key and a cache entry for all of them.

A size fits where it fits on every rank, its peak is the largest, and what is free is the smallest, so that the search
is the same on each. Ranks agree over gloo on the host, apart from the training's own group: that waits for no GPU, and
a collective that fails leaves the training's group as it was. What they tell each other is JSON, which runs no code
where it is read, as a pickle would.

A trial is taken by each rank alone: every process group, those of device meshes and of the user's code among them, has
PyTorch's `fake` backend meanwhile, so that a rank that runs out of memory leaves no other waiting, whatever it was
doing. It gives outputs of the right size: `all_gather` copies this rank's tensor for each rank, `reduce_scatter` leaves
its part of the input, `all_reduce` and `broadcast` leave tensors as they are. So FSDP gathers and frees in a trial what
it does in training, and its weights are not those of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from batchfinder.cache.key import CacheKey, Json
from batchfinder.cache.record import measurement_as_json, measurement_from_json, result_as_json, result_from_json
from batchfinder.cache.store import ResultEntry
from batchfinder.errors import CacheFailed, RankFailed, RankLost
from batchfinder.measure.allocator_history import can_record, most_scratch
from batchfinder.measure.trial import TrialSession
from batchfinder.probe import Probe
from batchfinder.recording.prediction import predict_batch_size
from batchfinder.results import Measurement, SearchResult, Shape
from batchfinder.search import Bounds, Prediction
from batchfinder.simulator.trace import Trace

T = TypeVar("T")


class Ranks:
    """The ranks of a run, or a single process, for which each collective returns at once.

    `all_reduce_min`, `all_reduce_sum`, `all_gather`, `all_gather_call` and `barrier_call` are collectives: all ranks
    call them, in the same order. Each raises `RankLost` where another rank has ended, or does not answer in time.

    Attributes:
        rank: this process's rank, from 0.
        size: the world size.
        seconds: time limit of a collective.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, seconds: float = 0.0) -> None:
        self._group = group
        self.seconds = seconds
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._what, self._calls = "", 0

    @classmethod
    def open(cls, timeout: timedelta | None = None) -> Ranks:
        """Open a gloo group of all ranks of `torch.distributed`; a single process where that is not initialized.

        A collective itself: all ranks call it. The group stays open until `close`.

        Args:
            timeout: of a collective, the slowest rank's work before it included; None for the default group's.

        Raises:
            RankLost: the group could not be opened.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        if timeout is None:
            default = c10d._get_default_group()
            timeout = default._get_backend(default._device_types[0]).options._timeout  # PyTorch 2.13 has no getter
        try:
            return cls(dist.new_group(backend="gloo", timeout=timeout), timeout.total_seconds())
        except RuntimeError as error:
            words = f"{_words(error)} (ranks agree over gloo; GLOO_SOCKET_IFNAME says which network it uses)"
            raise RankLost(dist.get_rank(), dist.get_world_size(), timeout.total_seconds(), words) from error

    def close(self) -> None:
        """Leave the group. A rank that waits in a collective gets `RankLost`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError):  # of a group that has failed
                dist.destroy_process_group(group)

    def all_reduce_min(self, *numbers: int) -> tuple[int, ...]:
        """The least of each number over all ranks; as many on every rank, each within 64 bits."""
        return self._all_reduce(numbers, dist.ReduceOp.MIN)

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        """The sum of each number over all ranks; as many on every rank, each sum within 64 bits."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def _all_reduce(self, numbers: tuple[int, ...], operation: dist.ReduceOp.RedOpType) -> tuple[int, ...]:
        if self.size == 1:
            return numbers
        agreed = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._collective(lambda group: dist.all_reduce(agreed, operation, group=group))
        return tuple(agreed.tolist())

    def all_gather(self, value: Json) -> list[Any]:
        """The JSON values of all ranks, by rank, as they are read back: tuples are lists then."""
        text = json.dumps(value)
        if self.size == 1:
            return [json.loads(text)]
        data = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        length = torch.tensor([len(data)], device="cpu")
        self._collective(lambda group: dist.all_gather(lengths, length, group=group))
        longest = int(max(lengths))
        texts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        self._collective(lambda group: dist.all_gather(texts, padded, group=group))
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in pairs]

    def barrier_call(self, doing: Callable[[], T], what: str) -> T:
        """Call a function on every rank, wait until all ranks have, and return this rank's result.

        Args:
            doing: calls no collectives.
            what: what it does, as it goes on after "when it": `tried batch size 8`.

        Raises:
            Exception: whatever `doing` raised on this rank, unchanged.
            RankFailed: it raised something on another rank.
        """
        # An interrupt is no Exception: the other ranks get RankLost when this rank closes its group.
        failed: Exception | None = None
        result: list[T] = []
        try:
            result.append(doing())
        except Exception as error:
            failed = error
        try:
            if self.size > 1:
                self._arrive(what)
                words = None if failed is None else f"{type(failed).__name__}: {failed}"
                for rank, other in enumerate(self.all_gather(words)):
                    if other is not None and failed is None:
                        raise RankFailed(rank, self.size, what, other)
            if failed is not None:
                raise failed
            self._what = ""
        finally:
            failed = None  # its traceback holds this frame
        return result[0]

    def all_gather_call(self, doing: Callable[[], Json], what: str) -> list[Any]:
        """Like `barrier_call`, and returns the results of all ranks, by rank.

        Args:
            doing: returns a JSON value; calls no collectives.
            what: as for `barrier_call`.
        """
        return self.all_gather(self.barrier_call(doing, what))

    def _arrive(self, what: str) -> None:
        """Say in the group's store that this rank has come so far, for the message of those that wait in vain."""
        self._what, self._calls = what, self._calls + 1
        if self._group is not None:
            with suppress(RuntimeError):  # the first rank may have ended, and the store with it
                c10d._world.pg_map[self._group][1].set(f"rank {self.rank}", str(self._calls))

    def _missing(self) -> list[int]:
        """The ranks that have not come as far as this one."""
        missing: list[int] = []
        if self._group is not None:
            with suppress(RuntimeError, KeyError):
                store = c10d._world.pg_map[self._group][1]
                for rank in range(self.size if self._calls else 0):
                    name = f"rank {rank}"
                    if not store.check([name]) or int(store.get(name)) < self._calls:
                        missing.append(rank)
        return missing

    def _collective(self, collective: Callable[[dist.ProcessGroup], object]) -> None:
        try:
            if self._group is None:
                raise RuntimeError("this rank has left the group")
            collective(self._group)
        except RuntimeError as error:
            where = (self.rank, self.size, self.seconds)
            raise RankLost(*where, _words(error), self._what, self._missing()) from error


def _words(error: RuntimeError) -> str:
    """gloo's message without its advice."""
    return str(error).partition(". This is typically")[0].rstrip(".")


def agree(seen: list[Measurement]) -> Measurement:
    """The measurement of one size that holds for all ranks, of each rank's own, by rank.

    Returns:
        The largest peaks and the slowest rank's times; where it failed, the verdict of the first rank it failed on,
        which the message names.
    """
    if len(seen) == 1:
        return seen[0]
    seconds = max(one.seconds for one in seen)
    for rank, one in enumerate(seen):
        if not one.fits:
            return replace(one, seconds=seconds, message=f"on rank {rank}: {one.message}")
    largest: dict[str, Any] = {}
    times = ("step_seconds", "micro_batch_seconds")
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "resting_bytes", "forward_bytes", *times):
        known = [value for one in seen if (value := getattr(one, name)) is not None]
        largest[name] = max(known, default=None)
    return replace(seen[0], seconds=seconds, **largest)


class AgreedProbe:
    """A probe that tries each size on every rank, waiting for no other, and returns one measurement on all of them."""

    def __init__(self, probe: Probe, ranks: Ranks) -> None:
        self._probe = probe
        self._ranks = ranks
        self.source = probe.source
        self.unmodelled = probe.unmodelled

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        seen = self._ranks.all_gather_call(
            lambda: measurement_as_json(self._probe(batch_size, shape)), f"tried batch size {batch_size}"
        )
        return agree([measurement_from_json(row) for row in seen])


def predict_on_each(
    ranks: Ranks,
    session: TrialSession,
    record: Callable[[int], tuple[Measurement, Trace | None]],
    bounds: Bounds,
    max_peak_bytes: int,
    later: Callable[[int], Sequence[int | None]],
) -> Prediction | None:
    """What the rank predicts that expects least; None where one has no prediction, as on a CPU.

    Args:
        session: of the trials, on whose device each rank records by itself.
        record: and the others: as for `predict_batch_size`.
    """

    def predicted() -> Prediction | None:
        if not can_record(session.device):
            return None
        scratch = most_scratch(session.device)
        return predict_batch_size(record, bounds, max_peak_bytes, session.held_bytes, scratch, later)

    predictions = ranks.all_gather_call(predicted, "asked for a prediction")
    return None if None in predictions else min((Prediction(*each) for each in predictions), default=None)


def agree_on_key(make: Callable[[], CacheKey], ranks: Ranks) -> CacheKey:
    """The name of a question for all ranks: the first rank's, and what differs from it.

    Args:
        make: makes this rank's; calls no collectives.
    """
    keys = ranks.all_gather_call(lambda: make().as_dict(), "looked at the model and its data")
    first, *others = [CacheKey(**key) for key in keys]
    if not others:
        return first
    differing: list[Json] = [*sorted({other.digest for other in others} - {first.digest})]
    return replace(first, extra={**first.extra, "ranks": [1 + len(others), *differing]})


@dataclass
class AgreedEntry:
    """A cache entry that rank 0 alone reads and writes, for all ranks."""

    _entry: ResultEntry
    _ranks: Ranks

    def get(self) -> SearchResult | None:
        """What rank 0 reads.

        Raises:
            CacheFailed: rank 0 cannot read it; on every rank.
        """

        def read() -> Json:
            try:
                found = self._entry.get() if self._ranks.rank == 0 else None
                return {"found": None if found is None else result_as_json(found)}
            except CacheFailed as error:
                return {"failed": [error.url, error.reason]}

        heard = self._ranks.all_gather_call(read, "read the cache")[0]
        if "failed" in heard:
            raise CacheFailed(*heard["failed"])
        return None if heard["found"] is None else result_from_json(heard["found"])

    def put(self, result: SearchResult) -> None:
        if self._ranks.rank == 0:
            self._entry.put(result)


_fake_backends: WeakKeyDictionary[Any, FakeProcessGroup] = WeakKeyDictionary()


@contextmanager
def local_collectives() -> Iterator[None]:
    """Give every process group of several ranks PyTorch's fake backend: no collective waits for another rank.

    The groups themselves stay, for DDP, FSDP, device meshes and functional collectives hold them. Nothing may be under
    way in them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    replaced = []
    # `pg_map` (torch/distributed/distributed_c10d.py, PyTorch 2.13) has all groups that this process is in. A group
    # keeps one backend for each type that it was given, and uses the last for a device; no CPU or GPU has UCC's type.
    for group in [group for group in c10d._world.pg_map if group.size() > 1]:
        # One for each group: `setBackend` (torch/csrc/distributed/c10d/ProcessGroup.hpp, PyTorch 2.13) gives the first
        # of a type the group's bound device, and refuses another of that type which has none.
        if group not in _fake_backends:
            _fake_backends[group] = FakeProcessGroup._create_internal(group.rank(), group.size())
        fake = _fake_backends[group]
        name = group.group_name  # its backends have it
        for device in group._device_types:
            replaced.append((group, device, group._get_backend(device)))
            group._register_backend(device, dist.ProcessGroup.BackendType.UCC, fake)
        group._set_group_name(name)
    try:
        yield
    finally:
        for group, device, backend in replaced:
            kind = dist.Backend.backend_type_map.get(backend.name(), dist.ProcessGroup.BackendType.CUSTOM)
            group._register_backend(device, kind, backend)


def forget_trials(model: DistributedDataParallel) -> None:
    """Give DDP a reducer that knows of no trial, on all ranks alike: one that has built its buckets waits for none.

    Where gradients were not reduced in trials it keeps its own, unless that records which parameters a backward
    reaches: with `find_unused_parameters` it would take a parameter for used that the first batch of training does not
    use, and with `static_graph` it would wait for as many gradients as all trials had. Nothing is broadcast.
    """
    if can_reduce_alone(model) or model.find_unused_parameters or model.static_graph:
        renew_reducer(model)


def renew_reducer(model: DistributedDataParallel) -> None:
    """Give DDP a new reducer, as before its first forward: it builds its buckets anew in the second one."""
    # As `DistributedDataParallel.__setstate__` makes it (torch/nn/parallel/distributed.py, PyTorch 2.13).
    vars(model).update(reducer=None, logger=None)  # the old one's hooks and buckets go with it
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    if model.static_graph:
        logger: Any = model.logger
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        logger._set_static_graph()
    hooks, model._comm_hooks = model._comm_hooks, []
    for hook, state in hooks:
        model.register_comm_hook(state, hook)


def free_buckets(model: DistributedDataParallel) -> None:
    """Take away DDP's reducer, which a copy of the training state would keep in memory beside those of trials.

    No forward can run until it is given another, by `reduce_alone` or `forget_trials`.
    """
    if can_reduce_alone(model):
        vars(model).update(reducer=None, logger=None)


def can_reduce_alone(model: DistributedDataParallel) -> bool:
    """Whether `reduce_alone` can be asked for: communication hooks may read what other ranks send."""
    return not model._comm_hooks and model.mixed_precision is None


def reduce_alone(model: DistributedDataParallel) -> None:
    """Give DDP a new reducer whose gradients stay on this rank; the fake backend's answer is none to it.

    The first backward's buckets stay in memory for the whole second step, though others have taken their places by
    then: NCCL keeps what it reduces until a thread of its own has seen that the GPU is done with it
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, `TensorShelf`).
    """
    kept: list[torch.Tensor] = []
    backwards = 0  # that have ended

    def completed(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        nonlocal backwards
        if backwards == 0 and bucket.buffer().is_cuda:
            kept.append(bucket.buffer())
        elif backwards > 1:
            kept.clear()
        backwards += bucket.is_last()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    renew_reducer(model)
    model.register_comm_hook(None, lambda _, bucket: completed(bucket))
    model._comm_hooks.clear()  # it is this reducer's alone


def connect_groups(device: torch.device) -> None:
    """Let NCCL connect the ranks of every group, on all ranks: it does so in the first collective, and takes memory.

    Trials, whose collectives are local, would not have that memory in use, and training will.
    """
    if device.type == "cuda" and dist.is_available() and dist.is_initialized():
        # All ranks made their groups in one order, so none waits for a rank that waits for it.
        for group in [group for group in c10d._world.pg_map if group.size() > 1]:
            served = device.type in [each.type for each in group._device_types]
            if served and group._get_backend(torch.device(device.type)).name() == "nccl":
                dist.all_reduce(torch.zeros(1, device=device), group=group)
