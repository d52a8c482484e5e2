"""Run a training command on simulated GPUs: whether it fits, what its memory is at the peak and where that is.

The command runs unchanged, in PyTorch's CUDA build on the CUDA stub. `watch.py` is imported in each of its processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchfinder.cuda_stub import CudaBuild, StubCard
from batchfinder.cuda_stub.launch import AFTER_TORCH_VARIABLE, NOTE_OPENED_VARIABLE
from batchfinder.errors import InvalidValue
from batchfinder.programs.real_gpus import RealGpus
from batchfinder.stub_cards import open_session

WATCH_VARIABLE = "BATCHFINDER_WATCH"
WATCH_MODULE = "batchfinder.programs.watch"
ABSENT_RANKS_MODULE = "batchfinder.programs.absent_ranks"
LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"})
"""What starts a process for each GPU."""
STEADY_STEPS = 5
"""Memory is steady after so many optimizer steps that have added nothing to the peaks of the one before them."""
MOST_STEPS = 100
FITS, OUT_OF_MEMORY, FAILED, NO_GPU, INTERRUPTED = "fits", "out of memory", "failed", "no GPU used", "interrupted"

OFFLINE: Mapping[str, str] = {
    "WANDB_MODE": "disabled",
    "COMET_START_ONLINE": "0",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What keeps loggers and the Hub from sending anything. MLflow's goes to a folder that is removed."""

_POLLED_EVERY = 0.1
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""A large block of the host's goes back when it is freed. By glibc's own rule it is of the heap after the first, and
what the allocator's history adds with each event lies in its place before the next comes: 20 GB on PyTorch 2.5."""
_GRACE_SECONDS = 5.0
_READ_WITHIN = 0.5
_ABSURD = 1000
"""A request of more than so many cards is a wrong number, and no question of memory."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """What the processes of a command are told.

    Attributes:
        folder: which they share.
        steps: to end after so many optimizer steps; None for when memory is steady.
        epochs: to end after so many epochs instead, evaluation and checkpoint included.
        snapshot: whether to write the allocator's history for PyTorch's memory viewer.
        timeline: whether to write what held the memory over the last steps.
        alone: whether there is one rank, whatever the size of its process group.
    """

    folder: str
    steps: int | None = None
    epochs: int | None = None
    snapshot: bool = False
    timeline: bool = False
    alone: bool = False

    def written(self) -> str:
        """As an environment variable has it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> WatchSettings:
        """What `written` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What one process of a command did on its cards.

    Attributes:
        program: the script that it ran.
        rank: in the default process group; 0 without one.
        device: the card on which it had allocated most.
        total_bytes: of that card.
        peak_allocated_bytes: at most, as `torch.cuda.max_memory_allocated` has it, whenever that was reset.
        peak_reserved_bytes: at most, likewise.
        retries: how often the allocator made room by giving its cache back.
        steps: optimizer steps: after each, seconds since the start, bytes alive, and both peaks so far.
        epochs: that ended.
        out_of_memory: each error that Python code was given, caught or not: bytes wanted and free, step, phase, the
            user's line.
        peak: when most was allocated, or where memory ran out first: step, phase, the user's line; `held`, bytes by
            what holds them; `lines`, bytes by the user's line that allocated what is no weight, gradient or state.
        ended: why it was ended: "steps", "steady", "most steps", "epochs" or "time"; empty where it ended by itself.
        world_size: of that group; 1 without one.
        in_first_epoch: whether all steps took batches of one DataLoader, in the first pass over it.
    """

    program: str
    rank: int
    device: int
    total_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    steps: Sequence[Mapping[str, Any]]
    epochs: int
    out_of_memory: Sequence[Mapping[str, Any]]
    peak: Mapping[str, Any]
    ended: str
    world_size: int = 1
    in_first_epoch: bool = False

    @classmethod
    def read(cls, path: Path) -> ProcessMemory | None:
        """From the file of a process; None where it has allocated nothing, or the file is not whole."""
        try:
            seen = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        most = seen["most"]
        if not most and not seen["out_of_memory"]:
            return None
        first = str(seen["out_of_memory"][0]["device"]) if not most else "0"
        device = max(most, key=lambda each: int(most[each]["allocated"]), default=first)
        of_steps = ("retries", "steps", "epochs", "in_first_epoch", "out_of_memory", "peak", "ended")
        known = ("program", "rank", "world_size", *of_steps)
        return cls(
            device=int(device),
            total_bytes=seen["memory"].get(device, 0),
            peak_allocated_bytes=most.get(device, {}).get("allocated", 0),
            peak_reserved_bytes=most.get(device, {}).get("reserved", 0),
            **{name: seen[name] for name in known},
        )

    @property
    def grows_by(self) -> int:
        """Bytes that stay alive after each further step: 0 unless each of the last steps added some."""
        alive = [step["alive"] for step in self.steps[-STEADY_STEPS:]]
        added = [later - earlier for earlier, later in itertools.pairwise(alive)]
        return sum(added) // len(added) if len(added) >= STEADY_STEPS - 1 and min(added) > 0 else 0


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a command did on simulated cards.

    Attributes:
        command: it.
        cards: the simulated cards; none where the GPUs are real.
        build: PyTorch's version and CUDA's, such as `2.13.0+cu130`; empty where the GPUs are real.
        outcome: `FITS`, `OUT_OF_MEMORY`, `FAILED`, `NO_GPU` or `INTERRUPTED`.
        exit_code: of the command.
        seconds: it took.
        processes: those that used a card, by rank.
        assumed: what was taken to be so, in words: values that were read and not known among it.
        world_size: of the training that the command was the first rank of, without the others; None where all ran.
        snapshot: of the allocator's history of the process that has the longest one, a pickle; None without.
        timeline: what held the memory over the last two steps of the fullest process, as `memory_timeline` has it; None
            without.
        read: files outside of installed packages that its processes read, and the folders of those packages; None where
            one of them was ended before it had said so.
    """

    command: tuple[str, ...]
    cards: tuple[StubCard, ...]
    build: str
    outcome: str
    exit_code: int
    seconds: float
    processes: tuple[ProcessMemory, ...] = ()
    assumed: tuple[str, ...] = ()
    world_size: int | None = None
    snapshot: bytes | None = field(default=None, repr=False)
    timeline: Mapping[str, Any] | None = field(default=None, repr=False)
    read: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def fits(self) -> bool:
        """Whether it trained without an out-of-memory error."""
        return self.outcome == FITS

    @property
    def fullest(self) -> ProcessMemory | None:
        """The process with the highest peak; where memory ran out, one in which it did."""
        return max(self.processes, key=_fullness, default=None)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, sizes in bytes."""
        plain = asdict(self)
        del plain["snapshot"], plain["timeline"], plain["read"]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> DryRun:
        """What `to_json` has made."""
        cards = [
            StubCard(**{**card, "compute_capability": tuple(card["compute_capability"])}) for card in plain["cards"]
        ]
        lists = {
            "command": tuple(plain["command"]),
            "cards": tuple(cards),
            "processes": tuple(ProcessMemory(**each) for each in plain["processes"]),
            "assumed": tuple(plain["assumed"]),
        }
        return cls(**{**plain, **lists})


def dry_run(
    command: Sequence[str],
    cards: Sequence[StubCard],
    *,
    world_size: int | None = None,
    values: str = "small",
    steps: int | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    online: bool = False,
    snapshot: bool = False,
    timeline: bool = False,
    build: CudaBuild | None = None,
    folder: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
    output: int | None = None,
    progress: Callable[[Sequence[ProcessMemory]], None] | None = None,
    stop: threading.Event | None = None,
) -> DryRun:
    """Run a training command on simulated cards until its memory is known.

    The command is real but for the cards: what it writes, it writes. All its processes have ended when this returns.

    Args:
        command: a program and its arguments.
        cards: what its processes see; none for the real GPUs of this machine, where all is computed.
        world_size: run it as the first rank of so many alone, on a machine with these cards: what collectives would
            bring of the other ranks is taken to be as its own. None for a command that starts all its ranks itself.
        values: which values are computed: of `small` tensors, `all` (slow) or `none`.
        steps: optimizer steps after which it is ended; None for when memory has been steady for `STEADY_STEPS`, or
            after `MOST_STEPS`.
        epochs: end it after so many epochs of its training loader instead.
        seconds: end it after so many, whatever it does.
        online: let loggers and the Hub use the network, as the command's environment has it.
        snapshot: take the allocator's history for PyTorch's memory viewer.
        timeline: tell what held the memory over the last two steps, or until it ran out.
        build: the CUDA build of PyTorch; None for the one that is found.
        folder: to run it in; None for this one.
        environment: variables to set for it besides this process's.
        stdin: a file descriptor that it reads from; None for what this process reads from.
        output: one for what it prints; None for where this process prints.
        progress: called with what each process has done so far, several times a second.
        stop: ends it as an interrupt does, once it is set.

    Raises:
        InvalidValue: there is no such program; or it starts ranks itself, and is to be one of them.
        CudaStubUnavailable: the CUDA stub cannot be had here.
    """
    start = time.monotonic()
    alone = world_size is not None
    if alone and (launcher := next((word for word in command[:3] if Path(word).name in LAUNCHERS), None)):
        words = "the script itself, as in python train.py: one rank is run alone, and a launcher would start several"
        raise InvalidValue("COMMAND", launcher, words)
    with open_session(cards, build=build, values=values, ranks=not alone) if cards else RealGpus() as session:
        settings = WatchSettings(str(session.folder), steps, epochs, snapshot, timeline, alone)
        variables = {**(_MALLOC if cards else {}), **os.environ, **(environment or {})}
        variables |= {**session.variables(variables), WATCH_VARIABLE: settings.written(), NOTE_OPENED_VARIABLE: "1"}
        variables[AFTER_TORCH_VARIABLE] += f" {WATCH_MODULE}"
        if world_size is not None:
            variables |= _first_rank(world_size, len(cards))
            variables[AFTER_TORCH_VARIABLE] += f" {ABSENT_RANKS_MODULE}"
        if folder is not None:
            variables["PWD"] = os.path.abspath(folder)
        if not online:
            variables |= {**OFFLINE, "MLFLOW_TRACKING_URI": (session.folder / "mlruns").as_uri()}
        try:
            process = subprocess.Popen(
                command,
                env=variables,
                cwd=folder,
                stdin=stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            words = f"a program that can be started ({error.strerror})"
            raise InvalidValue("COMMAND", command[0], words) from error
        interrupted = timed_out = False
        try:
            while process.poll() is None:
                so_far = _processes(session.folder)
                if steps is None and epochs is None:
                    _agree_on_end(session.folder, so_far)
                if progress is not None:
                    progress(so_far)
                if stop is not None and stop.is_set():
                    interrupted = True
                    break
                if seconds is not None and time.monotonic() - start > seconds:
                    timed_out = True
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLLED_EVERY)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _end_all(process, session.folder)
        processes = _processes(session.folder)
        report = session.report()
        outcome = INTERRUPTED if interrupted else _outcome(0 if timed_out else process.returncode, processes)
        return DryRun(
            tuple(command),
            tuple(cards),
            "" if isinstance(session, RealGpus) else session.build.version,
            outcome,
            process.returncode,
            round(time.monotonic() - start, 1),
            processes,
            report.words(),
            world_size,
            _snapshot(session.folder),
            _timeline(session.folder),
            _read(session.folder),
        )


def _first_rank(world_size: int, on_this_machine: int) -> dict[str, str]:
    """What torchrun tells the first of its processes."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(on_this_machine),
        "GROUP_WORLD_SIZE": str(world_size // on_this_machine),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # which nothing listens to
        "TORCHELASTIC_RUN_ID": "batchfinder",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _outcome(code: int, processes: Sequence[ProcessMemory]) -> str:
    errors = [(error, each) for each in processes for error in each.out_of_memory]
    if any(error["wanted"] > _ABSURD * each.total_bytes for error, each in errors):
        return FAILED
    if errors:
        return OUT_OF_MEMORY
    if not processes:
        return FAILED if code else NO_GPU
    return FITS if code == 0 or all(each.ended for each in processes) else FAILED


def _processes(folder: Path) -> tuple[ProcessMemory, ...]:
    """Those that have used a card so far, by rank."""
    read = [ProcessMemory.read(path) for path in folder.glob("process-*.json")]
    return tuple(sorted((each for each in read if each is not None), key=lambda each: (each.rank, each.program)))


def _agree_on_end(folder: Path, processes: Sequence[ProcessMemory]) -> None:
    """Have all ranks end at the same step, once memory is steady on each: none is to wait for one that has ended."""
    stop_at = folder / "stop-at"
    if stop_at.exists():
        return
    ranks = [each for each in processes if each.world_size > 1]
    if len(ranks) < max((each.world_size for each in ranks), default=1):
        return
    if all(is_steady(each.steps) or len(each.steps) >= MOST_STEPS for each in ranks):
        # None is to have taken that step by the time it can read of it.
        last = max(len(each.steps) for each in ranks)
        seconds = min(each.steps[-1]["seconds"] - each.steps[-STEADY_STEPS]["seconds"] for each in ranks)
        meanwhile = int(_READ_WITHIN * (STEADY_STEPS - 1) / max(seconds, 0.001))
        (folder / "stop-at.part").write_text(str(last + 2 + meanwhile))
        (folder / "stop-at.part").rename(stop_at)


def is_steady(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last steps have added nothing to the peaks."""
    last = {(step["allocated"], step["reserved"]) for step in steps[-STEADY_STEPS - 1 :]}
    return len(steps) > STEADY_STEPS and len(last) == 1


def _snapshot(folder: Path) -> bytes | None:
    """The largest: of the process that did most."""
    written = sorted(folder.glob("process-*.pickle"), key=lambda path: path.stat().st_size)
    return written[-1].read_bytes() if written else None


def _timeline(folder: Path) -> dict[str, Any] | None:
    """That of the fullest process."""
    written = {path: ProcessMemory.read(path.with_suffix(".json")) for path in folder.glob("process-*.timeline")}
    known = {path: _fullness(process) for path, process in written.items() if process is not None}
    if not known:
        return None
    found: dict[str, Any] = json.loads(max(known, key=known.__getitem__).read_text())
    return found


def _fullness(process: ProcessMemory) -> tuple[bool, int]:
    """By which processes are told apart: the fullest has run out of memory, or reserved most."""
    return bool(process.out_of_memory), process.peak_reserved_bytes


def _read(folder: Path) -> tuple[str, ...] | None:
    """What all processes have read; None where one that used a card has not said."""
    read: set[str] = set()
    try:
        for seen in folder.glob("process-*.json"):
            read.update(json.loads(seen.with_suffix(".read").read_text()))
    except (OSError, ValueError):
        return None
    return tuple(sorted(read))


def _end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End what is left of a command: those of its processes that use a card tell their peaks before."""
    left = _pids(folder)
    if process.poll() is None or left:
        (folder / "stop").touch()
        grace = _GRACE_SECONDS if process.poll() is None else _GRACE_SECONDS / 5
        start = time.monotonic()
        told = False
        while time.monotonic() < start + grace and (process.poll() is None or _pids_alive(left)):
            if not told and time.monotonic() > start + grace / 2:
                told = True
                _signal_all({process.pid, *_pids(folder)}, signal.SIGTERM)
            time.sleep(_POLLED_EVERY / 2)
        for _ in range(3):  # what one of them starts meanwhile
            _signal_all(_pids(folder), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _pids(folder: Path) -> set[int]:
    """The processes of a command, wherever they have gone: the folder that they share stands in their environment."""
    mark = str(folder).encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
    return found


def _pids_alive(pids: Iterable[int]) -> bool:
    return any(os.path.exists(f"/proc/{pid}") for pid in pids)


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
