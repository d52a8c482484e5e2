"""The thread's figures as they were written down."""

from __future__ import annotations

from batchfinder.reproductions.published import StageFigures, published_seq2seq


def test_stages() -> None:
    """Six stages of the first step and five of the second, none of whose maxima ever falls."""
    thread = published_seq2seq()
    assert (thread.batch_size, thread.length) == (80, 50)
    assert [(stage.step, stage.stage) for stage in thread.stages] == [
        (0, "begin"),
        *((step, stage) for step in (0, 1) for stage in ("zero_grad", "forward", "loss", "backward", "optimizer")),
    ]
    assert thread.stages[2] == StageFigures(0, "forward", 2108, 2154, 2178, 2178)
    assert thread.stages[-1] == StageFigures(1, "optimizer", 1581, 4329, 4468, 4468)
    for counter in ("max_allocated", "max_reserved"):
        maxima = [getattr(stage, counter) for stage in thread.stages]
        assert maxima == sorted(maxima)
    assert all(stage.allocated <= stage.max_allocated <= stage.max_reserved for stage in thread.stages)
