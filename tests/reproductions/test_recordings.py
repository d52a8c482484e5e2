"""Several workloads recorded by one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchfinder.errors import UserCodeFailed
from batchfinder.recording.client import RecordingClient
from batchfinder.recording.simulation import StepConfig
from batchfinder.reproductions.base import Recordings
from batchfinder.training.spec import RecordingJob, WorkloadSpec

pytestmark = pytest.mark.usefixtures("forked_recorders")

FIRST, SECOND = WorkloadSpec("tests.builders.small:mlp"), WorkloadSpec("tests.builders.small:checkpointed")
FAILING = WorkloadSpec("tests.builders.small:failing", {"where": "forward"})


@pytest.fixture(scope="module")
def recordings() -> Iterator[Recordings]:
    """One process."""
    with Recordings() as started:
        yield started


def test_each_workload_is_its_own(recordings: Recordings) -> None:
    """A workload's trace is that of a process of its own, whatever was asked for before it."""
    for spec in (FIRST, SECOND):
        shared = recordings.source(spec, StepConfig(), (7, 0), [None])
        with RecordingClient(spec) as alone:
            assert (
                shared.recorded(7, None)
                == alone.submit(RecordingJob(StepConfig().settings(), (7, 0), 7, None)).result()
            )
        assert (7, None) not in shared.unscaled


def test_the_way_of_stepping_counts(recordings: Recordings) -> None:
    """The same workload with another optimizer is another trace."""
    adamw, sgd = (recordings.source(FIRST, StepConfig(optimizer=name), (7, 0), [None]) for name in ("adamw", "sgd"))
    assert "optimizer" in adamw.at(9, None).structure.kinds
    assert "optimizer" not in sgd.at(9, None).structure.kinds


def test_an_error_names_the_workload(recordings: Recordings) -> None:
    """What fails is called by its own name, not by that of the workload the process began with."""
    recordings.source(FIRST, StepConfig(), (7, 0), [None])
    source = recordings.source(FAILING, StepConfig(), (7, 0), [None])
    with pytest.raises(UserCodeFailed, match=r"tests\.builders\.small:failing at batch size 13 raised"):
        source.recorded(13, None)
