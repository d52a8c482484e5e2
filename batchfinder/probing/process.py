"""The near end: one child process per workload and settings, started when first asked and again when it has died.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from batchfinder.errors import BatchFinderError, ContextDied, UserCodeFailed
from batchfinder.outcome import Measurement, Shape, Verdict
from batchfinder.probing.card import WORKER, CardFacts, look_through
from batchfinder.probing.death import decode
from batchfinder.retry import retrying
from batchfinder.step.child import Child, ChildDied, revive
from batchfinder.step.spec import WorkloadSpec


class ProcessProbe:
    """A probe whose steps are taken by a child process: it survives crashes, kills and dead contexts.

    A death, of the process or of the card's context, is believed when it comes twice. Errors of the user's code are
    raised here as `UserCodeFailed`.

    Args:
        spec: how to build the workload there.
        settings: the fields of a `StepSettings`; raised to what shows the peak (`enough`).
        device: as `torch.device` takes it.
        limit_bytes: what model and steps may take together; None for all there is.
        threads: threads of PyTorch's operators on the CPU; None for PyTorch's own choice.
        environment: variables to set for the child.
        flash: whether attention must run as the flash kernel.

    Attributes:
        limit_bytes: as it was given; may be changed until the first probe.

    Example:
        >>> spec = WorkloadSpec("batchfinder.zoo:build_workload", {"spec": "bert-base"})  # doctest: +SKIP
        >>> with ProcessProbe(spec, {}, "cuda:0") as probe:  # doctest: +SKIP
        ...     probe(8, Shape(128)).fits
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self,
        spec: WorkloadSpec,
        settings: Mapping[str, Any],
        device: str,
        limit_bytes: int | None = None,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        flash: bool = False,
    ) -> None:
        self.spec = spec
        self.limit_bytes = limit_bytes
        self.device = device
        self._open = {
            "builder": spec.builder,
            "arguments": spec.arguments,
            "settings": dict(settings),
            "device": device,
            "threads": threads,
            "flash": flash,
        }
        self._environment = {"PYTHONUNBUFFERED": "1", **(environment or {})}
        self._child: Child | None = None
        self._opened = False

    def __enter__(self) -> ProcessProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size in the child.

        Raises:
            UserCodeFailed: the user's code raised, while the workload was built or in a step.
            ContextDied: twice, the user's code left the card's context dead behind it.
            ProbeDied: the child died twice in a way that says nothing about memory.
        """
        what = f"{self._name()} at batch size {batch_size}"
        if shape.seq_len is not None:
            what += f", sequence length {shape.seq_len}"
        try:
            return retrying((ChildDied, ContextDied), attempts=2, wait=0.0)(self._once)(batch_size, shape, what)
        except ChildDied as death:
            return decode(death, what, self.device.partition(":")[0])

    def look(self) -> CardFacts:
        """Ask the card, in the child that then takes the steps: what is free when they begin.

        Raises:
            InvalidValue: there is no such card, or PyTorch cannot use it.
            UserCodeFailed: PyTorch raised, as it does where another process has the card for itself.
        """
        self.close()
        return look_through(self._start(), self.device)

    def close(self) -> None:
        """End the child and everything it started."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self._opened = False

    def _start(self) -> Child:
        self._child = Child(WORKER, environment=self._environment)
        return self._child

    def _once(self, batch_size: int, shape: Shape, what: str) -> Measurement:
        child = self._child or self._start()
        if not self._opened:
            opened = self._ask(child, {"open": {**self._open, "limit_bytes": self.limit_bytes}})
            if "error" in opened:
                self.close()
                raise _error(opened, self._name())
            self._opened = True
        answer = self._ask(child, {"probe": {"batch_size": batch_size, "seq_len": shape.seq_len}})
        if "exit" in answer:  # of the fork that took the steps; the child itself lives
            raise ChildDied(answer["exit"], child.last_words())
        if "error" in answer:
            if self.device != "cpu":
                self.close()
            raise _error(answer, what)
        measurement = answer["measurement"]
        return Measurement(**{**measurement, "verdict": Verdict[measurement["verdict"]]})

    def _ask(self, child: Child, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return child.ask(request)
        except ChildDied:
            self.close()
            raise

    def _name(self) -> str:
        return str(self.spec.arguments.get("spec", self.spec.builder))


def _error(answer: Mapping[str, Any], what: str) -> BatchFinderError:
    """The error in an answer, and whether the card's context died of it."""
    error = revive(answer["error"], what)
    if answer.get("context") == "dead" and isinstance(error, UserCodeFailed):
        return ContextDied(error.what, error.traceback)
    return error
