"""What `estimate`'s options ask for, and what is said of wrong ones before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.cli.estimate import EstimateRequest, read_request
from batchfinder.cli.main import build_parser, main
from batchfinder.devices import find_gpu
from batchfinder.recording.simulation import StepConfig
from batchfinder.units import GIB

NUMBER = "expected a whole number of at least 1."


def read(*options: str) -> EstimateRequest:
    """Read the options of an estimate."""
    return read_request(build_parser().parse_args(["estimate", *options]))


def test_defaults() -> None:
    """Without options it is BERT-base in fp32 with AdamW, eight samples, on one whole Titan X."""
    request = read()
    assert (request.model, request.batch_size, request.seq_len, request.accumulation) == ("bert-base", 8, None, 1)
    assert (request.card.name, request.card.count) == ("Titan X Pascal", 1)
    assert request.how == StepConfig()
    assert not request.by_module
    assert not request.advice


def test_an_instance_has_its_gpus() -> None:
    """An instance's GPUs train side by side, or as many of them as are asked for."""
    assert (read("--instance", "p3.16xlarge").card.name, read("--instance", "p3.16xlarge").card.count) == (
        "p3.16xlarge: 8 x V100 16GB",
        8,
    )
    fewer = read("--instance", "p3.16xlarge", "--num-gpus", "2", "--budget", "12GiB").card
    assert (fewer.name, fewer.count) == ("p3.16xlarge: 2 x V100 16GB, 12.00 GiB budget", 2)
    assert fewer.device.usable_bytes == 12 * GIB
    assert fewer.device.context_bytes == find_gpu("v100").context_bytes


def test_a_budget_needs_no_card() -> None:
    """A budget alone is a card of its own, of which any number may be there."""
    card = read("--budget", "4GiB", "--num-gpus", "3").card
    assert (card.device.usable_bytes, card.device.context_bytes, card.count) == (4 * GIB, 0, 3)


def test_changed() -> None:
    """Other options lead to another step and another model; the request they are made of stays as it is."""
    request = read("--accumulation", "3")
    other = request.changed(precision="16-mixed", gradient_checkpointing=True)
    assert other.how == StepConfig(precision="16-mixed", micro_batches=3)
    assert other.spec.arguments["gradient_checkpointing"] is True
    assert request.how == StepConfig(micro_batches=3)
    assert request.spec.arguments["gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--batch-size 0", f"--batch-size: '0' will not do; {NUMBER}"),
        ("--accumulation x", f"--accumulation: 'x' will not do; {NUMBER}"),
        ("--seq-len -1", f"--seq-len: '-1' will not do; {NUMBER}"),
        ("--num-gpus 0", f"--num-gpus: '0' will not do; {NUMBER}"),
        (
            "--instance p3.8xlarge --num-gpus 5",
            "--num-gpus: 5 will not do; expected at most 4, the GPUs of p3.8xlarge.",
        ),
        (
            "--instance p3.8xlarge --gpu t4",
            "--gpu: 't4' will not do; expected either a --gpu or an --instance, not both.",
        ),
        ("--by layer", "--by: 'layer' will not do; expected one of module."),
        ("--precision fp8", "--precision: 'fp8' will not do; expected one of fp32, bf16-mixed, 16-mixed, bf16-true."),
        ("--gpu k8", "unknown GPU 'k8'. Did you mean K80?"),
        (
            "--budget none",
            "--budget: 'none' will not do; expected a positive size such as 12GiB, 900MiB or 24GB.",
        ),
        (
            "--markdown no/such/folder.md",
            "--markdown: 'no/such/folder.md' will not do; expected a file in a folder that exists.",
        ),
        (
            "--model bert-bse",
            "unknown model 'bert-bse'. Did you mean bert-base, roberta-base, distilbert? "
            "A path to a config.json or its folder, or package.module:factory, will do as well.",
        ),
    ],
)
def test_wrong_values_are_told_before_anything_is_built(
    options: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong value ends an estimate with 1 and one line that says which, and what would do."""
    monkeypatch.chdir(tmp_path)
    code = main(["estimate", *options.split()])
    out, err = capsys.readouterr()
    assert (code, out, err) == (1, "", f"batchfinder: {said}\n")
