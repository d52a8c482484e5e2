"""The paper estimate of Multimodal BERT, beside a recorded step."""

from __future__ import annotations

import pytest

from batchfinder.outcome import Shape, Verdict
from batchfinder.published.multimodal_bert import multimodal_bert
from batchfinder.reproduce import multimodal_bert as reproducer
from batchfinder.reproduce.recordings import Recordings
from batchfinder.reproduce.reproduction import Bench, Reproduction
from batchfinder.simulator.probe import SimulatedProbe


@pytest.fixture(scope="module")
def found() -> Reproduction:
    """The reproduction, made once."""
    with Recordings() as recordings:
        return reproducer.reproduce(Bench(recordings, lambda words: None))


def test_every_line_beside_ours(found: Reproduction) -> None:
    """The published figures are the paper's; ours are those of one GPU of eight under DistributedDataParallel."""
    rows = {row["cell"]: (row["published"], row["ours"]) for row in found.rows}
    assert rows == {
        "parameters": (550, 443.8),
        "gradients": (550, 17.4),
        "activations": (150, 2494.6),
        "batch": (20, 0.1),
        "graph": (30, 0.0),
        "optimizer": (None, 887.5),
        "temporary buffers": (None, 75.5),
        "DDP buckets": (None, 443.7),
        "cuBLAS workspaces": (None, 17.0),
        "fragmentation": (None, 162.8),
        "CUDA context": (None, 419.4),
        "total": (1300, 4961.9),
        "verdict": ("fits", "fits"),
        "largest batch on one GPU": (None, 45),
        "largest batch on the instance": (None, 360),
    }
    lines = [row["ours"] for row in found.rows if row.get("unit") == "MB"]
    assert sum(lines[:-1]) == pytest.approx(lines[-1], abs=0.1 * len(lines))


def test_the_mistakes_are_named(found: Reproduction) -> None:
    """With the figures that show them."""
    assert [note for note in found.notes if note.startswith("where it went wrong")] == [
        "where it went wrong: it divides parameters and gradients by 8 GPUs. Under data parallelism every GPU holds a "
        "whole copy of both, and the reducer's buckets are a third (444 MB)",
        "where it went wrong: 110.3 M parameters in fp32 are 441 MB, and 55 MB after its own division, not 550 MB",
        "where it went wrong: 150 MB of activations for 4,096 tokens is about one tensor per layer (151 MB for 12 "
        "layers); a layer of BERT keeps dozens: 2,495 MB",
        "where it went wrong: it counts no optimizer state; Adam keeps two numbers per parameter: 887 MB",
    ]


def test_the_model_has_the_counts_it_was_described_with() -> None:
    """Its three parts have the published numbers of parameters within 1 %."""
    from batchfinder.reproduce.models.multimodal_bert import build

    counts = {"tab_autoencoder": 0, "text_bert_base": 0, "final_merge_network": 0}
    parts = {"normalize": "tab_autoencoder", "tabular": "tab_autoencoder", "tabular_head": "tab_autoencoder"}
    parts |= {"text": "text_bert_base", "text_head": "text_bert_base", "merge": "final_merge_network"}
    for name, parameter in build().model.named_parameters():
        counts[parts[name.partition(".")[0]]] += parameter.numel()
    assert counts == pytest.approx(multimodal_bert().parameters, rel=0.01)


def test_the_answer_is_sharp() -> None:
    """One GPU takes the answer and not one sample more, with the buckets; without them it takes more."""
    shape = Shape(multimodal_bert().seq_len)
    with Recordings() as recordings:
        probe = reproducer.one_gpu(recordings)
        verdicts = [probe(size, shape).verdict for size in (45, 46)]
        alone = SimulatedProbe(probe.traces, probe.memory)(46, shape).verdict
    assert (*verdicts, alone) == (Verdict.FITS, Verdict.OUT_OF_MEMORY, Verdict.FITS)
