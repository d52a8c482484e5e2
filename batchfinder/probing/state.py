"""The state of training in this process, captured, and put back bit for bit as often as needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from batchfinder.probing.snapshot_process import ProcessState, shared_hooks
from batchfinder.probing.snapshot_walk import Walk


class TrainingState:
    """All that real training steps change, as it was when captured.

    What is named, and whatever can be reached from it through attributes, slots, containers, closures, bound methods
    and partials, is put back *in place*: the same objects hold the same things again, down to the bits of a storage.

    - By value: modules, optimizers, schedulers, scalers, loaders and samplers, and every other object whose class is
      written in Python (attributes, slots and class); dict, list, set, deque, bytearray, array and their subclasses;
      NumPy arrays; generators of random numbers (Python's, NumPy's, torch's); the variables of closures; tensors, with
      shape, type, storage, flags, gradient, hooks and version.
    - Through, without being captured: tuples, frozensets, partials, bound methods, functions (to their closures).
    - A `torch.utils.data.Dataset` is data: its own attributes come back, and the generators and objects among them;
      what its containers, arrays and tensors hold is left alone.
    - By reference: numbers, strings and other constants, enums, classes, modules of code, weak references, locks;
      objects of classes of the standard library, of NumPy and of torch's internals.
    - By reference, and named in `left_out` when met: iterators (a loader's among them), files, weak collections,
      handlers of loggers, processes, threads, sockets, and any object of a class of no family above that was not named
      itself and holds a lock, a thread, a process or a socket in an attribute: others use it at the same time.

    The process's own state comes back too (see `snapshot_process.py`).

    Not restored: class attributes and module-level variables; defaults and attributes of functions; files, and all that
    left the process; state kept in C++ without a handle in Python (DDP's reducer, a ScriptModule's attributes, hooks on
    `AccumulateGrad`, cuDNN's choices, the caching allocator's segments); the order in which a set that changed is
    iterated; the graph of a tensor that had one and was written to, or of a view that a step gave one; the type of a
    NumPy array that changed it in place.

    Copies are on the host; the device holds nothing for them. A plain tensor and its storage are held weakly: if a step
    frees it, it is free, and a new one takes its place. Views, tensors with a graph or hooks, and tensors in tuples are
    held. Objects are expected to be used by this thread alone between the capture and the last restoration.

    Attributes:
        nbytes: host memory that the copies of tensors, arrays and bytes take; small Python objects are not counted.
        left_out: names of classes whose objects were met, may change, and are not put back.
    """

    def __init__(self, roots: Iterable[Any], left_alone: Iterable[Any] = ()) -> None:
        self._process = ProcessState()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            _synchronize_all()
            walk = Walk([*roots, *shared_hooks()], [*left_alone, TrainingState])
        self._records, self._tensors, self._storages = walk.records, walk.tensors, walk.storages
        self.nbytes = (
            sum(record.nbytes for record in self._records)
            + sum(tensor.nbytes for tensor in self._tensors)
            + sum(storage.nbytes for storage in self._storages)
        )
        self.left_out = tuple(sorted(walk.left_out))
        self._reached = walk.reached

    @classmethod
    def capture(cls, *roots: Any, left_alone: Iterable[Any] = ()) -> TrainingState:
        """Write down the state of everything that can be reached.

        Args:
            roots: modules, optimizers, schedulers, scalers and whatever else holds state. They are captured by value
                whatever their class.
            left_alone: objects to leave as they are, and classes whose objects to leave; nothing is reached through
                them.
        """
        return cls(roots, left_alone)

    def reaches(self, item: object) -> bool:
        """Whether a module, an optimizer or another object of a class written in Python is put back by this.

        Args:
            item: what a step uses.
        """
        return id(item) in self._reached

    def restore(self) -> None:
        """Put everything back. May be called any number of times.

        After a failure, call it outside the `except` block: the failed step's tensors live as long as its traceback.
        What the step made is let go of before anything is allocated, and the device is waited for before it is written.
        """
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            _synchronize_all()
            try:
                for tensor in self._tensors:
                    tensor.hold()
                for tensor in self._tensors:
                    tensor.clear()
                for record in self._records:
                    record.restore()
                for tensor in self._tensors:
                    tensor.restore_data()
                for storage in self._storages:
                    storage.restore()
                for tensor in self._tensors:
                    tensor.restore_flags()
            finally:
                for tensor in self._tensors:
                    tensor.let_go()
            _synchronize_all()
        self._process.restore()


@contextmanager
def preserved(*roots: Any, left_alone: Iterable[Any] = ()) -> Iterator[TrainingState]:
    """Leave no trace of what runs inside, however it ends.

    Args:
        roots: as for `TrainingState.capture`.
        left_alone: as for `TrainingState.capture`.

    Yields:
        The state, for restoring it in between as well. Catch a failure inside, and it can be restored at a time when
        the failed step's tensors are gone.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> before = model.weight.item()
        >>> with preserved(model):
        ...     _ = torch.nn.init.zeros_(model.weight)
        >>> model.weight.item() == before
        True
    """
    state = TrainingState.capture(*roots, left_alone=left_alone)
    try:
        yield state
    finally:
        state.restore()


def _synchronize_all() -> None:
    """Wait for every device in use: a kernel still running may read what is copied, or write what is restored."""
    for name in ("cuda", "xpu"):
        device = getattr(torch, name)
        if device.is_initialized():
            for index in range(device.device_count()):
                device.synchronize(index)
    if torch.backends.mps.is_available():
        torch.mps.synchronize()
