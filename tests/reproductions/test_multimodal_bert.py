"""The paper estimate of Multimodal BERT, beside a recorded step."""

from __future__ import annotations

import pytest

from batchfinder.recording.simulation import Simulation
from batchfinder.reproductions import multimodal_bert
from batchfinder.reproductions.published import Context, published_multimodal_bert
from batchfinder.results import Shape, Verdict
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.training.spec import StepConfig

pytestmark = pytest.mark.usefixtures("forked_recorders")


def test_the_model_has_the_counts_it_was_described_with() -> None:
    """Its three parts have the published numbers of parameters within 1 %."""
    from batchfinder.reproductions.models import build_multimodal_bert

    counts = {"tab_autoencoder": 0, "text_bert_base": 0, "final_merge_network": 0}
    parts = {"normalize": "tab_autoencoder", "tabular": "tab_autoencoder", "tabular_head": "tab_autoencoder"}
    parts |= {"text": "text_bert_base", "text_head": "text_bert_base", "merge": "final_merge_network"}
    for name, parameter in build_multimodal_bert().model.named_parameters():
        counts[parts[name.partition(".")[0]]] += parameter.numel()
    assert counts == pytest.approx(published_multimodal_bert().parameters, rel=0.01)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_answer_is_sharp() -> None:
    """One GPU takes the answer and not one sample more, with the buckets; without them it takes more."""
    shape = Shape(published_multimodal_bert().seq_len)
    with Simulation(multimodal_bert.WORKLOAD, StepConfig()) as simulation:
        probe = multimodal_bert.one_gpu(Context(simulation, lambda status: None))
        verdicts = [probe(size, shape).verdict for size in (45, 46)]
        alone = SimulatedProbe(probe.traces, probe.memory)(46, shape).verdict
    assert (*verdicts, alone) == (Verdict.FITS, Verdict.OUT_OF_MEMORY, Verdict.FITS)
