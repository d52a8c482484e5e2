"""In each process of a dry run: counts optimizer steps, ends the process after enough of them, and tells its peaks.

Importing this is all it takes: every process of the command imports it after torch. What it sees lies in the folder
that the processes share, in a file for each that has used a card, written anew with each step.
"""

from __future__ import annotations

import bisect
import json
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from batchfinder.cuda_stub.launch import VALUES_MODULE
from batchfinder.programs.dry_run import MOST_STEPS, WATCH_VARIABLE, WatchSettings, is_steady
from batchfinder.programs.peak import AliveBlock, AllocatorHistory, Event, line_of, shown_path
from batchfinder.programs.timeline import memory_timeline
from batchfinder.recording.user_code import is_library

_EVENTS_KEPT = 500_000
"""Of the allocator's history. A step of a model of 80 layers has some 20,000."""
_LINES_TOLD = 5
_STEPS_SHOWN = 2
_SECONDS_TO_END = 20
_POLLED_EVERY = 0.25


class _Ended(SystemExit):
    """Ends a process that has taken enough steps as `sys.exit()` would: what it has open is closed."""

    def __init__(self) -> None:
        super().__init__(0)


class Watch:
    """What one process does on its cards."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._begin()
        self._rank, self._world_size = 0, 1
        self._start = time.monotonic()
        self._stepped: set[int] = set()  # the optimizers that have taken a step since the last that was counted
        self._steps: list[dict[str, Any]] = []
        self._optimizer_steps: list[tuple[int, int]] = []  # the numbers of the first and last events of each
        self._most: dict[int, dict[str, int]] = {}
        self._peak: dict[str, Any] = {}
        self._grown = False
        self._looked: dict[int, int] = {}  # by card, up to which event
        self._ooms: list[dict[str, Any]] = []
        self._failed_request: dict[str, Any] | None = None  # of which Python may yet be told
        self._loader: DataLoader[Any] | None = None
        self._loader_steps: dict[int, int] = {}
        self._epochs = 0
        self._enough = ""
        self._step_started: int | None = None
        self._ends: list[int] = []  # the positions at which steps ended
        self._gradients: dict[int, set[int]] = {}  # their addresses, by the positions at which they are there

    def _begin(self) -> None:
        """Be the watch of this process: of one that has been forked, its own."""
        self._path = os.path.join(self._settings.folder, f"process-{os.getpid()}")
        self._lock = threading.RLock()  # of what is seen: the thread that waits for the end writes it, too

    def install(self) -> None:
        """Follow the allocator from when CUDA is initialized, and optimizers from now on."""
        os.register_at_fork(after_in_child=self._begin)
        torch.cuda._lazy_call(self._follow_allocator)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._follow_loaders()

    # -- the allocator -----------------------------------------------------------------------------------------------

    def _follow_allocator(self) -> None:
        threading.Thread(target=self._wait_for_stop, name="batchfinder", daemon=True).start()
        # A child that multiprocessing has forked ends with these, and without what atexit has.
        multiprocessing.util.Finalize(None, self._end, exitpriority=0)
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=_EVENTS_KEPT)
        torch._C._cuda_attach_out_of_memory_observer(self._on_failed_request)  # type: ignore[attr-defined]
        torch.OutOfMemoryError.__init__ = self._noting_error(torch.OutOfMemoryError.__init__)  # type: ignore[method-assign]
        values = sys.modules.get(VALUES_MODULE)  # which follows operators on the CUDA stub
        if values is not None and hasattr(torch._C, "_cuda_setMemoryMetadata"):
            values.before_operator = _note_phase  # type: ignore[attr-defined]
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            if hasattr(torch._C, name):
                setattr(torch._C, name, self._noting_before(getattr(torch._C, name)))

    def _noting_before(self, reset: Callable[..., None]) -> Callable[..., None]:
        """What resets the peaks, with the peaks noted before."""

        def note_and_reset(*devices: int) -> None:
            self._note_most()
            reset(*devices)

        return note_and_reset

    def _noting_error(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """What initializes an out-of-memory error, with the request noted that failed last."""

        def note_and_initialize(error: BaseException, *arguments: Any, **options: Any) -> None:
            self._on_out_of_memory()
            initialize(error, *arguments, **options)

        return note_and_initialize

    def _note_most(self) -> None:
        """Note what has been allocated and reserved at most, and whether more was allocated than ever before."""
        for device in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(device)
            if not stats.get("reserved_bytes.all.peak"):
                continue
            most = self._most.setdefault(device, {"allocated": 0, "reserved": 0})
            self._grown |= stats["allocated_bytes.all.peak"] > most["allocated"]
            most["allocated"] = max(most["allocated"], stats["allocated_bytes.all.peak"])
            most["reserved"] = max(most["reserved"], stats["reserved_bytes.all.peak"])

    def _device(self) -> int:
        """The card with the highest peak."""
        return max(self._most, key=lambda device: self._most[device]["allocated"], default=0)

    def _on_failed_request(self, device: int, wanted: int, allowed: int, free: int) -> None:
        """Called by the allocator before it raises what cuDNN, for one, catches: it does with a smaller workspace."""
        stats = torch.cuda.memory_stats(device)
        error = {
            "device": device,
            "wanted": wanted,
            "free": free,
            "allocated": stats["allocated_bytes.all.current"],
            "reserved": stats["reserved_bytes.all.current"],
            "step": len(self._steps) + 1,
            "phase": self._phase_now(),
            "line": _line_now(),
        }
        with self._lock:
            self._note_most()
            self._failed_request = error
            if not self._ooms:
                history = AllocatorHistory.of(torch.cuda.memory._snapshot(), device)
                error["peak"] = self._taken_by(history, len(history.events), device)
                if self._settings.snapshot:
                    self._dump()
                self._write_timeline()

    def _on_out_of_memory(self) -> None:
        """Python is given an error."""
        with self._lock:
            error, self._failed_request = self._failed_request, None
            if error is None:  # the program's own
                return
            self._peak = error.pop("peak", self._peak)
            self._ooms.append(error)
            self._step_started = None  # it may not come to its end
            self.write()

    def _phase_now(self) -> str:
        if self._step_started is not None:
            return "optimizer"
        return _phase() if _phase() == "backward" or _in_module() else "other"

    def _dump(self) -> None:
        with suppress(OSError):
            torch.cuda.memory._dump_snapshot(f"{self._path}.part")
            os.replace(f"{self._path}.part", f"{self._path}.pickle")

    # -- steps -------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.cuda.is_initialized():
            return
        self._look_at_peak()
        self._step_started = self._position()
        if self._settings.timeline:
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            parts = (part for each in parameters if each.grad is not None for part in _parts(each.grad))
            self._gradients[self._step_started] = {part.untyped_storage().data_ptr() for part in parts}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.cuda.is_initialized():
            return
        if self._step_started is not None:
            self._optimizer_steps.append((self._step_started, self._position()))
        self._step_started = None
        self._look_at_peak()
        if self._loader is not None:
            self._loader_steps[id(self._loader)] = self._loader_steps.get(id(self._loader), 0) + 1
        if self._stepped and id(optimizer) not in self._stepped:  # another one has taken this step already
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        device = self._device()
        self._ends.append(self._position())
        self._steps.append(
            {
                "seconds": round(time.monotonic() - self._start, 3),
                "alive": torch.cuda.memory_allocated(device),
                **self._most.get(device, {"allocated": 0, "reserved": 0}),
            }
        )
        self.write()
        self._stop_if_enough()

    def _stop_if_enough(self) -> None:
        settings, taken = self._settings, len(self._steps)
        if self._enough:  # it went on after it was ended
            os._exit(0)
        if settings.steps is not None:
            if taken >= settings.steps:
                self._finish("steps")
        elif not settings.epochs and (settings.alone or self._world_size == 1):
            if is_steady(self._steps):
                self._finish("steady")
            if taken >= MOST_STEPS:
                self._finish("most steps")
        with suppress(OSError, ValueError), open(os.path.join(settings.folder, "stop-at")) as file:
            if taken >= int(file.read()):
                self._finish("steady" if is_steady(self._steps) else "most steps")

    def _finish(self, why: str) -> None:
        self._enough = why
        self.write()
        timer = threading.Timer(_SECONDS_TO_END, os._exit, (0,))
        timer.daemon = True
        timer.start()
        raise _Ended

    # -- epochs ------------------------------------------------------------------------------------------------------

    def _follow_loaders(self) -> None:
        """An epoch ends where the loader that steps took batches of is iterated over again: evaluation lies between."""
        iterate, following = DataLoader.__iter__, _BaseDataLoaderIter.__next__

        def iterate_and_count(loader: DataLoader[Any]) -> Any:
            if self._loader_steps.pop(id(loader), 0):
                self._epochs += 1
                if self._settings.epochs and self._epochs >= self._settings.epochs and not self._enough:
                    self._finish("epochs")
            made = iterate(loader)
            made._batchfinder_loader = loader  # type: ignore[attr-defined]
            return made

        def next_and_note(iterator: Any) -> Any:
            batch = following(iterator)
            self._loader = getattr(iterator, "_batchfinder_loader", None)
            return batch

        DataLoader.__iter__ = iterate_and_count  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = next_and_note  # type: ignore[assignment, method-assign]

    # -- the peak ----------------------------------------------------------------------------------------------------

    def _position(self, device: int | None = None) -> int:
        """How many allocations and releases there have been on a card, by default on that with the highest peak."""
        stats = torch.cuda.memory_stats(self._device() if device is None else device)
        return int(stats["allocation.all.allocated"] + stats["allocation.all.freed"])

    def _look_at_peak(self) -> None:
        """Find out what takes the memory, if there has been a new peak since this last looked."""
        with self._lock, suppress(Exception):  # what takes the memory is not worth the user's run
            self._note_most()
            if not self._grown or self._ooms:
                return
            self._grown = False
            device = self._device()
            history = AllocatorHistory.of(torch.cuda.memory._snapshot(), device)
            now = self._position(device)
            looked, self._looked[device] = self._looked.get(device, 0), now
            # From there on: the allocator counts more closely than its history tells.
            first = looked - (now - len(history.events))
            self._peak = self._taken_by(history, history.peak(first), device)

    def _taken_by(self, history: AllocatorHistory, after: int, device: int) -> dict[str, Any]:
        """What held the memory after so many events of a history, and what was done then."""
        alive, now = history.alive(after), history.alive(len(history.events))
        held: dict[str, int] = {}
        lines: dict[str, int] = {}
        known = _known_tensors()
        offset = self._position(device) - len(history.events)
        for address, block in alive.items():
            kind = known.get(address) if now.get(address) == block else None
            if kind is None:
                kind = self._phase_of(block, offset)
                line = line_of(block.frames, is_library)
                lines[line] = lines.get(line, 0) + block.size
            held[kind] = held.get(kind, 0) + block.size
        last: Event = history.events[after - 1] if after else {"frames": (), "user_metadata": ""}
        block = AliveBlock(0, after - 1, last.get("user_metadata") or "", last.get("frames", ()))
        phase = self._phase_of(block, offset)
        line = line_of(block.frames, is_library) or block.noted.partition(" ")[2]
        lines.pop("", None)
        most = sorted(lines.items(), key=lambda item: -item[1])[:_LINES_TOLD]
        return {
            "device": device,
            "step": len(self._steps) + 1,
            "phase": phase,
            "line": line,
            "held": held,
            "lines": dict(most),
        }

    def _phase_of(self, block: AliveBlock, offset: int) -> str:
        """What was going on as a block was allocated."""
        if block.event is None:
            return "other"
        place = offset + block.event
        under_way = self._step_started is not None and self._step_started <= place
        if under_way or any(start <= place < end for start, end in self._optimizer_steps):
            return "optimizer"
        if block.noted.startswith("backward") or (not block.noted and not block.frames):  # autograd's own threads
            return "backward"
        if not any(frame["name"] == "_call_impl" for frame in block.frames):
            return "other"
        # Compiled code disables gradients itself.
        compiled = any("_aot_autograd" in frame["filename"] for frame in block.frames)
        return "no_grad" if block.noted == "no_grad" and not compiled else "forward"

    # -- what it tells -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write all of it, where others read either the last or this."""
        if not torch.cuda.is_initialized():
            return
        with self._lock:
            self._write()

    def _write(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        used = {*self._most, *(error["device"] for error in self._ooms)}
        stats = {device: torch.cuda.memory_stats(device) for device in used}
        seen = {
            "rank": self._rank,
            "world_size": self._world_size,
            "program": shown_path(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else "",
            "memory": {device: torch.cuda.mem_get_info(device)[1] for device in used},
            "most": self._most,
            "retries": sum(each.get("num_alloc_retries", 0) - each.get("num_ooms", 0) for each in stats.values()),
            "out_of_memory": self._ooms,
            "peak": self._peak,
            "steps": self._steps,
            "epochs": self._epochs,
            "in_first_epoch": not self._epochs and len(self._loader_steps) == 1,
            "ended": self._enough,
        }
        with suppress(OSError):
            with open(f"{self._path}.part", "w") as file:
                json.dump(seen, file)
            os.replace(f"{self._path}.part", f"{self._path}.json")

    def _write_timeline(self) -> None:
        """Write what held the memory over the last steps, where it is asked for."""
        if not self._settings.timeline:
            return
        with suppress(Exception):  # a picture is not worth the user's run
            device = self._device()
            history = AllocatorHistory.of(torch.cuda.memory._snapshot(), device)
            offset = self._position(device) - len(history.events)
            ends = [end - offset for end in self._ends]
            timeline = memory_timeline(
                history,
                max([0, *ends[:-_STEPS_SHOWN]]),
                known=_known_tensors(),
                gradients={place - offset: found for place, found in self._gradients.items()},
                phase_of=lambda block: self._phase_of(block, offset),
                line_of=lambda block: line_of(block.frames, is_library) or block.noted.partition(" ")[2],
                step_of=lambda number: 1 + bisect.bisect_right(ends, number),
            )
            with open(f"{self._path}.timeline.part", "w") as file:
                json.dump(timeline, file)
            os.replace(f"{self._path}.timeline.part", f"{self._path}.timeline")

    def _wait_for_stop(self) -> None:
        """End at once where the command is to be stopped from outside."""
        stop = os.path.join(self._settings.folder, "stop")
        while not os.path.exists(stop):
            time.sleep(_POLLED_EVERY)
            if not os.path.isdir(self._settings.folder):
                return
        self._enough = self._enough or "time"
        self._end()
        os._exit(0)

    def _write_read(self) -> None:
        """Write which files were read, but for those of installed packages, and the folders of these."""
        with suppress(Exception):  # modules may be anything; a run without this is not kept
            modules = {getattr(each, "__file__", None) or "" for each in list(sys.modules.values())}
            noted: set[str] = getattr(sys.modules.get("sitecustomize"), "opened", set()).copy()
            opened = {each for each in noted if not each.startswith(("/proc/", "/sys/", "/dev/"))}
            own = {os.path.realpath(each) for each in modules | opened if each and not each.endswith(".pyc")}
            folders = {each for each in sys.path if each.endswith("-packages")}
            with open(f"{self._path}.read.part", "w") as file:
                json.dump([each for each in own if not is_library(each)] + sorted(folders), file)
            os.replace(f"{self._path}.read.part", f"{self._path}.read")

    def _end(self) -> None:
        if not torch.cuda.is_initialized():
            return
        self._write_read()
        with self._lock, suppress(RuntimeError):  # the context is dead
            self._look_at_peak()
            self.write()
            if self._settings.snapshot and not self._ooms:
                self._dump()
            if not self._ooms:
                self._write_timeline()


def _known_tensors() -> dict[int, str]:
    """What the storages of parameters, their gradients and optimizers' state are for, by their addresses."""
    import gc

    known: dict[int, str] = {}

    def note(kind: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            for part in _parts(tensor):
                known.setdefault(part.untyped_storage().data_ptr(), kind)

    found = [each for each in gc.get_objects() if issubclass(type(each), (torch.nn.Module, torch.optim.Optimizer))]
    modules = [each for each in found if issubclass(type(each), torch.nn.Module)]
    for module in modules:
        own = vars(module)
        parameters = [each for each in own.get("_parameters", {}).values() if each is not None]
        note("weights", parameters)
        note("weights", own.get("_buffers", {}).values())
        note("gradients", (each.grad for each in parameters))
    for optimizer in found:
        if issubclass(type(optimizer), torch.optim.Optimizer) and "state" in vars(optimizer):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            note("weights", parameters)
            note("gradients", (getattr(each, "grad", None) for each in parameters))
            note("optimizer state", tree_leaves(list(optimizer.state.values())))
    return known


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors on a card that a tensor, or a subclass such as DTensor, is made of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" and tensor.layout is torch.strided:
        yield tensor


def _phase() -> str:
    """Of the thread that asks."""
    if torch._C._current_autograd_node() is not None:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "no_grad"


def _in_module() -> bool:
    """Whether a module's forward is running on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame is not None


def _note_phase() -> None:
    """Have the allocator keep the phase with what comes next, and in the backward pass the line that called it."""
    phase = _phase()
    torch._C._cuda_setMemoryMetadata(f"{phase} {_line_now()}" if phase == "backward" else phase)


def _line_now() -> str:
    """The user's innermost line; for autograd's threads that of the main thread, which waits for them."""
    line = _innermost(sys._getframe(1))
    if line:
        return line
    return _innermost(sys._current_frames().get(threading.main_thread().ident or 0))


def _innermost(frame: FrameType | None) -> str:
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


if WATCH_VARIABLE in os.environ:
    Watch(WatchSettings.read(os.environ[WATCH_VARIABLE])).install()
