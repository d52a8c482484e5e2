"""Processes that run on the stub: their environment, the folder they share, and what they say of what is not known."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchfinder.cuda_stub.builds import CudaBuild, find_build, stub_folder
from batchfinder.cuda_stub.card import VARIABLE, StubCard, stub_setting
from batchfinder.cuda_stub.compile import compiled_stub, preloaded

ADDRESSES = ("cuda", "low", "rising", "falling")
EVENTS = ("early", "late", "in-order")
VALUES = ("small", "all", "none")
VALUES_VARIABLE = "BATCHFINDER_STUB_VALUES"
EVENTS_MODULE = "batchfinder.recording.cuda_build.events"
VALUES_MODULE = "batchfinder.recording.cuda_build.values"
"""What tells peaks, and what computes values; they run in the processes on the stub, where torch is."""
CHILD_FOLDER = Path(__file__).parent / "child"
AFTER_TORCH_VARIABLE = "BATCHFINDER_STUB_AFTER_TORCH"
"""The modules that a process imports after torch, where the folder of child/ is first on its path."""
NOTE_OPENED_VARIABLE = "BATCHFINDER_STUB_NOTE_OPENED"
"""Where it is set, such a process has the files that it opened to read in `sitecustomize.opened`."""


@dataclass(frozen=True, slots=True)
class StubReport:
    """What processes on the stub met.

    Attributes:
        assumed: what was taken to be so, in words.
        unwritten: functions of CUDA's libraries that were called and that the stub does not have.
        values: values that were read and not known, with where and how often.
        reserved_bytes: for each card the most that a process reserved, of those that have ended; in the cards' order.
    """

    assumed: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    values: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: tuple[int, ...] = ()

    def words(self) -> tuple[str, ...]:
        """All of it as sentences, for what lists assumptions."""
        missing = (
            f"the CUDA stub has no {name}: what called it was told that it is not supported" for name in self.unwritten
        )
        return (*self.assumed, *missing, *words_of_reads(self.values))


def words_of_reads(times_by_line: Mapping[str, int]) -> list[str]:
    """What was read and not known, by what and where, as sentences."""
    return [
        f"read and not known: {where}{f', {times} times' if times > 1 else ''}"
        for where, times in times_by_line.items()
    ]


class StubSession(contextlib.AbstractContextManager["StubSession"]):
    """Simulated cards for child processes: set their `variables`, and ask for the `report` when they have ended.

    The stub is never loaded into this process. Of the real cards of this machine the children see nothing.

    Args:
        cards: what the processes see, in this order.
        build: the CUDA build of PyTorch; None for the one that `find_build` finds.
        values: which values are computed, on the CPU: of `small` tensors as far as they are known, of `all` (which is
            slow), or `none`.
        events: `early`, or `late`: when work on other streams is done, at once or when the host waits for it. What a
            card does lies between. `in-order`: when the host waits for anything that was issued later.
        addresses: where segments lie, `cuda` for what memory snapshots show of cudaMalloc.
        ranks: whether NCCL exchanges small buffers between the processes; without it, all ranks are as this one.

    Attributes:
        build: the CUDA build that the processes run.
        folder: what they share; removed at the end.

    Raises:
        StubUnavailable: the stub cannot be had here.
    """

    def __init__(
        self,
        cards: Sequence[StubCard],
        *,
        build: CudaBuild | None = None,
        values: str = "small",
        events: str = "early",
        addresses: str = "cuda",
        ranks: bool = True,
    ) -> None:
        self.build = build or find_build()
        self._values = values
        compiled = compiled_stub(self.build)
        self.folder = Path(tempfile.mkdtemp(prefix="batchfinder-stub-"))
        self._settings = {
            "events": events,
            "addresses": addresses,
            "ranks": int(ranks),
            "folder": self.folder,
            "cudnn": self.build.cudnn_folder or "",
        }
        self._cards = tuple(cards)
        self._compiled = compiled
        programs = self.folder / "bin"
        programs.mkdir()
        smi = programs / "nvidia-smi"
        program = shlex.join([sys.executable, "-I", "-S", str(CHILD_FOLDER / "nvidia_smi.py")])
        smi.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        smi.chmod(0o755)

    def variables(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment variables to set for a process on these cards.

        Args:
            base: the variables that it has otherwise, some of which are added to; None for this process's.
        """
        given = os.environ if base is None else base
        caches = stub_folder() / "caches" / self.build.version
        first = [str(CHILD_FOLDER), *([str(self.build.beside)] if self.build.beside else [])]
        own = {
            VARIABLE: stub_setting(self._cards, **self._settings),
            AFTER_TORCH_VARIABLE: EVENTS_MODULE if self._values == "none" else VALUES_MODULE,
            VALUES_VARIABLE: self._values,
            "LD_PRELOAD": _joined(preloaded(self.build, self._compiled), given.get("LD_PRELOAD")),
            "LD_LIBRARY_PATH": _joined([str(self._compiled)], given.get("LD_LIBRARY_PATH")),
            "PYTHONPATH": _joined(first, given.get("PYTHONPATH")),
            "PATH": _joined([str(self.folder / "bin")], given.get("PATH")),
            # What is compiled for a card that is not there stays apart from what real cards use.
            "TRITON_LIBCUDA_PATH": str(self._compiled),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        }
        if "CUDA_VISIBLE_DEVICES" in given:  # it names cards of this machine
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(len(self._cards))))
        return own

    def report(self) -> StubReport:
        """What the processes have met so far."""
        assumed: dict[str, None] = {}
        unwritten: dict[str, None] = {}
        reserved = [0] * len(self._cards)
        values: dict[tuple[str, str], int] = {}  # by process and line: a process tells its last count again
        with contextlib.suppress(OSError):
            for line in (self.folder / "events").read_text(errors="replace").splitlines():
                kind, process, words = [*line.split(" ", 2), "", ""][:3]
                if kind == "assumed":
                    assumed[words] = None
                elif kind == "unwritten":
                    unwritten[words] = None
                elif kind == "value":
                    count, _, where = words.partition(" ")
                    values[process, where] = int(count)
                elif kind == "peak":
                    most, card = map(int, words.split())
                    reserved[card] = max(reserved[card], most)
        by_line: dict[str, int] = {}
        for (_process, where), times in values.items():
            by_line[where] = by_line.get(where, 0) + times
        return StubReport(tuple(assumed), tuple(unwritten), by_line, tuple(reserved))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder that the processes shared."""
        try:  # `rmtree` takes descriptors, and there may be none left where nothing was started
            (self.folder / "bin" / "nvidia-smi").unlink()
            (self.folder / "bin").rmdir()
            self.folder.rmdir()
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)


def _joined(first: Sequence[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])
