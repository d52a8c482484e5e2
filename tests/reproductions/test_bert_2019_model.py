"""Our BERT of 2019 against pytorch-transformers 1.2.0's code, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchfinder.recording.client import RecordingClient
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec

pytestmark = pytest.mark.usefixtures("forked_recorders")

OURS, THEIRS = "batchfinder.reproductions.bert_2019_model:build", "tests.builders.bert_2019:build"
HEADS = ("classification", "pretraining")


@pytest.fixture(scope="module")
def recorders() -> Iterator[dict[str, RecordingClient]]:
    """A process for ours and one for theirs, which changes torch's own functions."""
    started = {builder: RecordingClient(spec(builder, HEADS[0])) for builder in (OURS, THEIRS)}
    yield started
    for recorder in started.values():
        recorder.close()


def spec(builder: str, head: str, size: str = "base") -> WorkloadSpec:
    """A model of the notebook's."""
    return WorkloadSpec(builder, {"head": head, "size": size})


SIZES = ((1, 512), (7, 128))
CASES = [("base", head, mode, *at) for head in HEADS for mode in ("forward", "inference") for at in SIZES]
# A large one is wider and has more of the same layers.
CASES += [("large", HEADS[0], "forward", *SIZES[1]), ("large", HEADS[1], "inference", *SIZES[0])]


@pytest.mark.parametrize(("size", "head", "mode", "batch_size", "seq_len"), CASES)
def test_the_same_blocks(
    recorders: dict[str, RecordingClient], size: str, head: str, mode: str, batch_size: int, seq_len: int
) -> None:
    """Every block has the same size, operator and kind, and is taken and released in the same order."""
    futures = [
        recorders[builder].submit(
            RecordingJob(StepConfig(mode=mode), (3, 7), batch_size, seq_len, workload=spec(builder, head, size))
        )
        for builder in (OURS, THEIRS)
    ]
    ours, theirs = (future.result() for future in futures)
    assert ours.sizes == theirs.sizes
    assert ours.structure.order == theirs.structure.order
    assert ours.structure.operators == theirs.structure.operators
    assert ours.structure.kinds == theirs.structure.kinds
    assert ours.structure.marks == theirs.structure.marks
