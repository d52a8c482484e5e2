"""The published figures as they were written down."""

from __future__ import annotations

from batchfinder.devices import find_gpu
from batchfinder.reproductions.published import (
    RUNGS,
    Figure,
    Ladder,
    StageFigures,
    published_bert_2019,
    published_seq2seq,
)
from batchfinder.units import GIB


def test_figures() -> None:
    """17 figures in the order in which they were printed, and what the models alone took."""
    notebook = published_bert_2019()
    assert len(notebook.figures) == len(set(notebook.figures)) == 17
    assert notebook.figures[0] == Figure("classification", "base", 1, 512, 1238)
    assert notebook.figures[-1] == Figure("pretraining", "large", 4, 512, 10058)
    assert notebook.model_mib == {
        ("classification", "base"): 418,
        ("classification", "large"): 1279,
        ("pretraining", "base"): 425,
        ("pretraining", "large"): 1283,
    }
    assert {(figure.head, figure.size) for figure in notebook.figures} == notebook.model_mib.keys()
    assert all(figure.allocated_mib > notebook.model_mib[figure.head, figure.size] for figure in notebook.figures)


def test_ladders() -> None:
    """Eight ladders, each of which ended on one of the rungs."""
    ladders = published_bert_2019().ladders
    assert len(ladders) == len(set(ladders)) == 8
    assert ladders[2] == Ladder("classification", "base", 512, True, 256)
    assert all(ladder.largest in RUNGS for ladder in ladders)


def test_the_card() -> None:
    """What its error messages call the card's memory is a K80's and no V100's, to the second place."""
    notebook = published_bert_2019()
    assert round(find_gpu("K80").memory_bytes / GIB, 2) == round(notebook.total_bytes / GIB, 2) == 11.17
    assert find_gpu("V100 16GB").memory_bytes > 1.4 * notebook.total_bytes
    assert notebook.usable_bytes < notebook.total_bytes


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
