"""`sweep` in Python, beside the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchfinder import InvalidValue, SweepResult, UnknownName, UserCodeFailed, sweep
from batchfinder.devices import device_for, find_gpu
from batchfinder.units import MIB
from tests.cli.command import HERE, Run

pytestmark = pytest.mark.usefixtures("_folder_of_the_models", "forked_recorders")
T4_USABLE = device_for(find_gpu("T4")).usable_bytes
BERT, TINY = str(HERE / "bert-tiny" / "config.json"), "mine:tiny"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """A small model over two cards and two lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHFINDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        return sweep(TINY, gpus=["T4", "rtx 4090"], seq_lens=[8, 16], target_batch_size=10**6, precision="fp16")


def without_time(found: dict[str, Any]) -> dict[str, Any]:
    """What does not differ from run to run."""
    return {**found, "rows": [{**row, "seconds": 0} for row in found["rows"]]}


def test_the_rows_are_those_of_the_command(run: Run, swept: SweepResult) -> None:
    """Figure by figure, in the same order, and in the same table."""
    asked = ("sweep", "--model", TINY, "--gpu", "T4,rtx 4090", "--seq-len", "8,16", "--target-batch-size", "1000000")
    asked += ("--precision", "16-mixed", "--no-cache")
    assert without_time(swept.to_json()) == without_time(run(*asked, "--json").json)
    assert f"{swept}\n" == run(*asked).out


def test_a_row_says_what_was_found(swept: SweepResult) -> None:
    """By attributes, in bytes, of each of the rows, which are in the order asked for."""
    assert [(row.gpu, row.seq_len) for row in swept] == [("T4", 8), ("T4", 16), ("RTX 4090", 8), ("RTX 4090", 16)]
    row = swept[1]
    assert len(swept) == 4
    assert row.model == TINY
    assert row.usable_bytes == device_for(find_gpu("T4")).usable_bytes
    assert swept[3].usable_bytes - row.usable_bytes > 0
    assert row.batch_size < swept[0].batch_size < swept[2].batch_size
    assert row.peak_allocated_bytes is not None
    assert row.peak_reserved_bytes is not None
    assert row.peak_allocated_bytes <= row.peak_reserved_bytes <= row.usable_bytes
    assert row.plan is not None
    assert row.plan.target_batch_size == 10**6
    assert row.plan.micro_batch_size <= row.batch_size
    assert (row.published, row.what_fits) == (None, None)
    assert repr(row) == f"<{TINY} at 16 on T4: {row.batch_size}>"
    assert list(swept[:2]) == [swept[0], swept[1]]


def test_a_target_may_have_to_be_met() -> None:
    """By micro-batches that divide it, where the largest do not."""
    missed, met = (
        sweep(TINY, gpus="T4", seq_lens=8, max_batch_size=15, target_batch_size=256, exact=exact, cache=False)[0]
        for exact in (False, True)
    )
    assert missed.plan is not None
    assert met.plan is not None
    assert (missed.plan.micro_batch_size, missed.plan.effective_batch_size) == (15, 255)
    assert (met.plan.micro_batch_size, met.plan.effective_batch_size) == (8, 256)


def test_a_notebook_shows_the_table(swept: SweepResult) -> None:
    """One line for each row, with text that is no HTML."""
    shown = swept._repr_html_()
    assert shown.count("<tr>") == 5
    assert f'<td style="text-align: right">{swept[3].batch_size}</td>' in shown
    assert "on T4" not in shown.partition("<table>")[0]
    assert "a &lt;b&gt; &amp; c" in SweepResult(swept, ["a <b> & c"])._repr_html_()


def test_results_are_kept_unless_that_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder, in the command's, or nowhere."""
    usual, own = tmp_path / "usual", tmp_path / "own"
    monkeypatch.setenv("BATCHFINDER_CACHE", str(usual))
    asked: dict[str, Any] = {"gpus": "T4", "seq_lens": 8, "max_batch_size": 8}
    assert [sweep(TINY, **asked, cache=False)[0].cached for _ in range(2)] == [False, False]
    assert not usual.exists()
    assert [sweep(TINY, **asked, cache=str(own))[0].cached for _ in range(2)] == [False, True]
    assert [sweep(TINY, **asked)[0].cached for _ in range(2)] == [False, True]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_where_not_one_sample_fits() -> None:
    """The size is 0 and the row says under which options it trains; a headroom leaves less than a sample takes."""
    usable = device_for(find_gpu("T4")).usable_bytes
    needed = sweep(TINY, gpus="T4", seq_lens=16, max_batch_size=1, cache=False)[0].peak_reserved_bytes
    assert needed is not None
    (row,) = sweep(TINY, gpus="T4", seq_lens=16, headroom=usable - needed + 2 * MIB, cache=False)
    assert (row.batch_size, row.plan, row.peak_reserved_bytes) == (0, None, None)
    assert row.needed_bytes == needed
    assert row.what_fits is not None
    assert row.what_fits.fits[0].change


def test_an_instance_has_its_gpus_and_its_price() -> None:
    """All of its GPUs take part; of several numbers of them each has a row."""
    (row,) = sweep(TINY, instances="p3.8xlarge", seq_lens=8, max_batch_size=4, target_batch_size=64, cache=False)
    assert row.gpu == "p3.8xlarge: 4 x V100 16GB"
    assert row.plan is not None
    assert row.plan.num_devices == 4
    assert row.cell.card.price is not None
    sharded = sweep(TINY, instances="p3.8xlarge", seq_lens=8, max_batch_size=4, strategy="fsdp2", cache=False)
    assert [each.cell.options.gpus for each in sharded] == [4]
    asked = [2, 4]
    several = sweep(TINY, gpus="T4", num_gpus=asked, strategy="ddp", seq_lens=8, max_batch_size=4, cache=False)
    assert [each.gpu for each in several] == ["2 x T4", "4 x T4"]


PRODUCT = 2 * 16 * 256 * 1024
"""FLOPs of one matrix product of `mine:tiny` at 16 tokens; training takes five, as its inputs need no gradient."""


def test_what_training_costs_at_a_stated_share_of_the_peak() -> None:
    """By hand, of all GPUs together, for an instance with a price and a peak, and only where it is asked for."""
    asked: dict[str, Any] = {"gpus": "T4", "instances": ["p3.8xlarge", "p2.xlarge"], "seq_lens": 16, "cache": False}
    without, v100, k80 = sweep(TINY, **asked, max_batch_size=4, mfu="40%")
    assert v100.cost is not None
    assert v100.cost.sample_flops == 5 * PRODUCT
    assert (v100.cost.mfu, v100.cost.gpus, v100.cost.tokens) == (0.4, 4, 16)
    assert v100.cell.card.price is not None
    assert v100.cell.card.price.usd_per_hour == v100.cost.usd_per_hour
    seconds = 1e6 / 16 * 5 * PRODUCT / (0.4 * 15.7e12) / 4
    assert v100.cost.usd_per_million == pytest.approx(v100.cost.usd_per_hour / 3600 * seconds)
    assert without.cost is None
    assert k80.cost is not None
    assert (k80.cost.peak_flops, k80.cost.usd_per_million) == (None, None)
    assert [row.cost for row in sweep(TINY, **asked, max_batch_size=4)] == [None, None, None]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_is_recorded_for_the_memory_alone_does_not_change_the_flops(tmp_path: Path) -> None:
    """A loss in chunks, of which two are recorded, multiplies as often as one in one piece; Muon's step is apart."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flops = []
    for options in ({}, {"loss": "chunked"}, {"optimizer": "muon"}):
        words: dict[str, Any] = {"seq_lens": 64, "max_batch_size": 2, "cache": False, "mfu": 1, **options}
        (row,) = sweep(str(tmp_path), instances="g4dn.xlarge", **words)
        assert row.cost is not None
        flops.append(row.cost.sample_flops)
    assert flops[0] > 0
    assert flops == [flops[0]] * 3


def test_rows_in_which_nothing_fits_cost_nothing() -> None:
    """There is no training to be paid for."""
    (row,) = sweep(TINY, instances="g4dn.xlarge", seq_lens=16, headroom=T4_USABLE - MIB, mfu=0.4, cache=False)
    assert (row.batch_size, row.cost) == (0, None)


def test_lines_on_what_is_being_done() -> None:
    """Where somebody wants them."""
    said: list[str] = []
    sweep(TINY, gpus="T4", seq_lens=8, max_batch_size=2, cache=False, status=said.append)
    assert said == [f"building {TINY}", f"{TINY} at 8 on T4"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"gpus": "RTX 9999"}, UnknownName, "^unknown GPU 'RTX 9999'"),
        ({"instances": "p99.huge"}, UnknownName, "^unknown instance 'p99.huge'"),
        ({"models": "bert-bse"}, UnknownName, "^unknown model 'bert-bse'"),
        ({"models": []}, InvalidValue, "^models: .* at least one model"),
        ({"gpus": "9999GB+"}, InvalidValue, "^gpus: .* no GPU of the catalogue is as large"),
        ({"num_gpus": 0}, InvalidValue, "^num_gpus: invalid value 0; expected a whole number of at least 1"),
        ({"num_gpus": 8}, InvalidValue, "^strategy: missing; expected one of ddp, .*: how 8 GPUs train"),
        ({"strategy": "fsdp2"}, InvalidValue, "^num_gpus: invalid value 1; expected at least 2 with fsdp2"),
        ({"instances": "p3.8xlarge", "num_gpus": 5}, InvalidValue, "^num_gpus: .* at most 4, the GPUs of p3.8xlarge"),
        ({"seq_lens": [8, -1]}, InvalidValue, "^seq_lens: invalid value -1; expected a whole number of at least 1"),
        ({"seq_lens": 100_000}, InvalidValue, "^seq_lens: invalid value 100000; expected at most 512 tokens"),
        ({"precision": "fp8"}, InvalidValue, "^precision: .* one of fp32, bf16-mixed"),
        ({"lora_rank": 8}, InvalidValue, "^lora_rank: .* none of this name, but mode, precision"),
        ({"gpu": "T4"}, InvalidValue, "^gpu: invalid value 'T4'; expected none of this name, but mode, .*gpus, "),
        ({"headroom": 1.5}, InvalidValue, "^headroom: .* a share such as 0.1"),
        ({"headroom": "90GiB"}, InvalidValue, "^headroom: .* less than the .* usable on A100 80GB"),
        ({"max_batch_size": 4, "min_batch_size": 8}, InvalidValue, "^max_batch_size: invalid value 4; .* at least 8"),
        ({"exact": True}, InvalidValue, "^exact: .* a --target-batch-size with it"),
        ({"mfu": 0.4}, InvalidValue, "^mfu: invalid value 0.4; expected an --instance with a price with it"),
        ({"mfu": 0.4, "instances": "kaggle-p100"}, InvalidValue, "^mfu: .* an --instance with a price with it"),
        ({"mfu": 40, "instances": "g4dn.xlarge"}, InvalidValue, "^mfu: .* a share above 0 and at most 1"),
        ({"target_batch_size": 9, "multiple_of": 2}, InvalidValue, "^target_batch_size: .* and a multiple of 2"),
    ],
)
def test_mistakes(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """Each is told with the argument's own name, most before anything is built."""
    with pytest.raises(error, match=words):
        sweep(**{"models": BERT, "seq_lens": 8, "cache": False, **arguments})


def test_a_model_that_cannot_be_recorded_raises() -> None:
    """What the model raised is in the text."""
    with pytest.raises(UserCodeFailed, match="no answer today"):
        sweep(["mine:fails_in_forward", BERT], gpus="T4", seq_lens=8, cache=False)
