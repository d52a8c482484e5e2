"""What all parts are given: the card, the simulator's answers, the time there is, and where findings go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cuda_parts.clock import Clock
from benchmarks.cuda_parts.far_end import FarEnd
from benchmarks.cuda_parts.prediction import Card, Predictions
from benchmarks.cuda_parts.result_file import ResultFile

_SECONDS = 90.0
_LEAST_SECONDS = 20.0


@dataclass
class Check:
    """One run.

    Attributes:
        device: as `torch.device` takes it; `cpu` in a dry run.
        dry_run: whether there is no card: stand-ins are measured, all else is only predicted.
        card: what is predicted for.
        predictions: the simulator's.
        clock: how long each part may take.
        file: where everything goes.
        only: what a name must match to be done.
        keep: where histories are kept; None to keep none.
        far: takes the steps, with the allocator's usual settings.
    """

    device: str
    dry_run: bool
    card: Card
    predictions: Predictions
    clock: Clock
    file: ResultFile
    only: re.Pattern[str] = field(default_factory=lambda: re.compile(""))
    keep: Path | None = None
    far: FarEnd = field(init=False)

    def __post_init__(self) -> None:
        self.far = self.new_far_end({})

    def new_far_end(self, environment: Mapping[str, str]) -> FarEnd:
        """A far end that reads other settings from its environment; to be closed by whoever asks for it.

        Args:
            environment: variables to set for it.
        """
        return FarEnd(self.device, {**({"OMP_NUM_THREADS": "1"} if self.dry_run else {}), **environment})

    def wanted(self, name: str) -> bool:
        """Whether it was asked for.

        Args:
            name: of a cell, a ladder or a case.
        """
        return self.only.search(name) is not None

    def in_time(self, part: str, name: str) -> bool:
        """Whether there is time for it; what there is none for is noted.

        Args:
            part: a key of `clock.ENDS`.
            name: of what would come next.
        """
        if self.clock.left(part) > 0:
            return True
        self.file.not_reached(f"{part}: {name}")
        return False

    def ask(self, far: FarEnd, request: Mapping[str, Any], part: str) -> dict[str, Any]:
        """Ask the far end, for as long as a single request may take.

        Args:
            far: takes the steps.
            request: JSON values.
            part: a key of `clock.ENDS`.

        Raises:
            Failed: there was no answer.
        """
        return far.ask(request, min(_SECONDS, max(_LEAST_SECONDS, self.clock.left(part))))

    def found(self, part: str, row: dict[str, Any]) -> None:
        """Add a row to a part's findings.

        Args:
            part: a key of the result.
            row: JSON values.
        """
        self.file.result[part].append(row)
        self.file.save()
