"""What `estimate`'s options ask for, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.cli.estimate import read_request
from batchfinder.cli.main import main
from batchfinder.cli.parser import build_parser
from batchfinder.devices import find_gpu
from batchfinder.report.estimate import EstimateRequest
from batchfinder.training.spec import StepOptions
from batchfinder.units import GIB

NUMBER = "expected a whole number of at least 1."
ONE = "expected a single one: `batchfinder sweep` takes several."


def read(*options: str) -> EstimateRequest:
    """Read the options of an estimate."""
    return read_request(build_parser().parse_args(["estimate", *options]))


def test_defaults() -> None:
    """Without options it is BERT-base in fp32 with AdamW, eight samples, on one whole T4."""
    request = read()
    assert (request.model, request.batch_size, request.seq_len, request.accumulation) == ("bert-base", 8, None, 1)
    assert (request.card.name, request.card.count) == ("T4", 1)
    assert request.options == StepOptions()


def test_it_is_said_that_no_card_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A line on stderr names the GPU that was chosen; a GPU that the user named needs no such line."""
    read()
    assert capsys.readouterr().err == "batchfinder: no GPU was found here, and no --gpu is named: simulating T4\n"
    read("--gpu", "v100")
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--batch-size 0", f"--batch-size: invalid value '0'; {NUMBER}"),
        ("--accumulation x", f"--accumulation: invalid value 'x'; {NUMBER}"),
        ("--seq-len -1", f"--seq-len: invalid value '-1'; {NUMBER}"),
        ("--num-gpus 0", f"--gpus: invalid value '0'; {NUMBER}"),
        (
            "--instance p3.8xlarge --num-gpus 5",
            "--gpus: invalid value 5; expected at most 4, the GPUs of p3.8xlarge.",
        ),
        (
            "--instance p3.8xlarge --gpu t4",
            "--gpu: invalid value 't4'; expected either a --gpu or an --instance, not both.",
        ),
        ("--by layer", "--by: invalid value 'layer'; expected one of module."),
        (
            "--precision fp8",
            "--precision: invalid value 'fp8'; expected one of fp32, bf16-mixed, 16-mixed, bf16-true. Did you mean "
            "fp32 or 16-mixed?",
        ),
        (
            "--gpu k8",
            "unknown GPU 'k8'. Did you mean K80? For any other card of 16 GiB: --budget 16GiB. "
            "`batchfinder gpus` lists all.",
        ),
        ("--gpu t4 --gpu v100", f"--gpu: invalid value 't4,v100'; {ONE}"),
        ("--gpu all", f"--gpu: invalid value 'all'; {ONE}"),
        ("--gpu 24GB+", f"--gpu: invalid value '24GB+'; {ONE}"),
        ("--instance p3.2xlarge,p3.8xlarge", f"--instance: invalid value 'p3.2xlarge,p3.8xlarge'; {ONE}"),
        (
            "--budget none",
            "--budget: invalid value 'none'; expected a positive size such as 12GiB, 900MiB or 24GB.",
        ),
        (
            "--markdown no/such/folder.md",
            "--markdown: invalid value 'no/such/folder.md'; expected a file in a folder that exists.",
        ),
        (
            "--model bert-bse",
            "unknown model 'bert-bse'. Did you mean bert-base, roberta-base, distilbert? "
            "A path to a config.json or its folder, package.module:factory, or owner/name on the Hub will do as well.",
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
