"""What a sweep's options ask for, and what its records are kept under."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import read_request
from batchfinder.devices import all_gpus
from batchfinder.errors import InvalidValue
from batchfinder.report.terminal import words_of
from batchfinder.sizing.cells import ModelCells, cache_key
from batchfinder.sizing.sweep_request import DEFAULT_SEQ_LENS, SweepRequest
from batchfinder.training.spec import WorkloadFacts, seq_lens_of
from tests.sizing.test_simulated_cells import Built

FACTS = WorkloadFacts("f" * 64, 512, "tokens", False, {"torch": "2.13.0"})
VARIANTS = (
    "--gpu v100",
    "--gpu v100-32gb",
    "--instance ml.p3.2xlarge --budget 4GiB",
    "--budget 4GiB",
    "--seq-len 64",
    "--mode forward",
    "--mode inference",
    "--precision bf16-mixed",
    "--precision 16-mixed",
    "--precision bf16-true",
    "--optimizer sgd",
    "--optimizer adamw-fused",
    "--attention eager",
    "--attention sdpa",
    "--attention flash",
    "--gradient-checkpointing",
    "--target-batch-size 256",
    "--max-batch-size 32",
    "--min-batch-size 2",
    "--multiple-of 8",
    "--headroom 10%",
    "--headroom 1GiB",
    "--loss chunked",
    "--packed",
    "--recorder cuda-build",
)


@pytest.fixture(autouse=True)
def _usual_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


def request_for(options: str) -> SweepRequest:
    """What `sweep` would be asked for."""
    return read_request(build_parser().parse_args(["sweep", "--no-cache", *options.split()]))


def digest(request: SweepRequest, facts: WorkloadFacts = FACTS) -> str:
    """The record's name of the first cell of a sweep."""
    (card, *_) = request.place.cards
    seq_len = seq_lens_of("model", request.seq_lens, facts, DEFAULT_SEQ_LENS)[-1]
    cells = ModelCells("model", Built(facts), (seq_len,), request)
    return cache_key(cells.cell(seq_len, card), facts, request).digest


def test_different_settings_never_share_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes the answer changes the key: each option, the allocator's settings, the model, the versions."""
    digests = [digest(request_for(options)) for options in ("", *VARIANTS)]
    digests += [
        digest(request_for(""), replace(FACTS, fingerprint="e" * 64)),
        digest(request_for(""), replace(FACTS, brings_optimizer=True)),
        digest(request_for(""), replace(FACTS, versions={"torch": "2.14.0"})),
    ]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    digests.append(digest(request_for("")))
    assert len(set(digests)) == len(digests)


def test_what_does_not_change_the_answer_shares_a_record() -> None:
    """Another name for the same card, another way to say the same headroom, or a model by another name: one record."""
    assert digest(request_for("--gpu v100")) == digest(request_for("--gpu tesla-v100-16gb --model gpt2"))
    assert digest(request_for("--headroom 0.1")) == digest(request_for("--headroom 10%"))
    assert digest(request_for("--target-batch-size 64")) == digest(request_for("--target-batch-size 128"))
    # A simulated answer is exact whatever is asked of measured ones.
    assert digest(request_for("--tolerance 5%")) == digest(request_for("--device simulated"))


def test_defaults() -> None:
    """With no options and no GPU here: two BERTs, fp32 and AdamW on a Titan X."""
    request = request_for("")
    assert request.models == ("bert-base", "bert-large")
    assert [card.name for card in request.place.cards] == ["Titan X Pascal"]
    assert (request.step.mode, request.step.precision, request.step.optimizer) == ("train", "fp32", "adamw")
    note = "no GPU was found here, and no --gpu is named: simulating Titan X Pascal"
    assert (request.place.notes, request.conditions, request.place.device) == ((note,), (), "simulated")


def test_each_thing_once() -> None:
    """A model, a length or a card that is named twice is swept once."""
    request = request_for("--model gpt2 --model gpt2 --seq-len 64 --seq-len 064 --gpu v100 --gpu tesla-v100")
    assert [len(request.models), len(request.seq_lens), len(request.place.cards)] == [1, 1, 1]


def names(options: str) -> list[str]:
    """Of the cards of a sweep."""
    return [card.name for card in request_for(options).place.cards]


def test_several_cards_in_one_option() -> None:
    """Commas stand between names; `all` and `24GB+` are the catalogue's, of at least that size."""
    assert names("--gpu t4,v100 --gpu p40") == ["T4", "V100 16GB", "P40"]
    assert names("--gpu all") == [gpu.name for gpu in all_gpus()]
    assert names("--gpu t4,80GB+") == ["T4", *(gpu.name for gpu in all_gpus() if gpu.class_gb >= 80)]
    assert request_for("--seq-len 64,128 --seq-len 64").seq_lens == (64, 128)


def test_each_instance_has_its_own_gpus() -> None:
    """Without a strategy as many as it has train side by side; with one all of each take part, or as many as asked."""
    several = "--instance p4d.24xlarge,p3.8xlarge --instance p3.2xlarge"
    cards = {card.name: card.count for card in request_for(several).place.cards}
    assert cards == {"p4d.24xlarge: 8 x A100 40GB": 8, "p3.8xlarge: 4 x V100 16GB": 4, "p3.2xlarge: 1 x V100 16GB": 1}
    cards = {card.name: card.count for card in request_for(f"{several[:-22]} --strategy fsdp2").place.cards}
    assert cards == {"p4d.24xlarge: 8 x A100 40GB": 8, "p3.8xlarge: 4 x V100 16GB": 4}
    asked = request_for("--instance p4d.24xlarge,p3.16xlarge --strategy fsdp2 --gpus 16").place.cards
    assert [card.count for card in asked] == [16, 16]
    assert [card.name for card in asked] == ["2 x p4d.24xlarge: 16 x A100 40GB", "2 x p3.16xlarge: 16 x V100 16GB"]
    with pytest.raises(InvalidValue, match="gpus: invalid value 1; expected at least 2 with fsdp2"):
        request_for(f"{several} --strategy fsdp2")


def test_conditions() -> None:
    """What the figures hold under is put in words."""
    options = "--headroom 10% --max-batch-size 32 --target-batch-size 256 --min-batch-size 2 --multiple-of 8"
    words = (
        *("headroom 10%", "at least 2", "at most 32", "multiples of 8"),
        "for an effective batch of 256, gradients kept between micro-batches",
    )
    assert request_for(options).conditions == words
    cpu = f"{options} --device cpu --budget 64MiB"
    assert request_for(cpu).conditions == ("to within 1 %", *words)
    assert request_for(f"{cpu} --tolerance 0").conditions == words
    assert request_for("--headroom 0.125").conditions == ("headroom 12.5%",)
    assert request_for("--headroom 1GB").conditions == ("headroom 953.67 MiB",)


@pytest.mark.parametrize(("tolerance", "share"), [("0", 0.0), ("0.02", 0.02), ("2%", 0.02), (" 2 % ", 0.02)])
def test_tolerance(tolerance: str, share: float) -> None:
    """A tolerance is a share or a percentage."""
    arguments = build_parser().parse_args(["sweep", "--no-cache", "--tolerance", tolerance])
    assert read_request(arguments).tolerance == share


def test_a_measured_headroom_is_a_share_of_the_budget() -> None:
    """Under a budget, what stays free is a share of that; the row's budget is what it is a share of."""
    request = request_for("--device cpu --budget 64MiB --headroom 25%")
    (card,) = request.place.cards
    assert (card.device.usable_bytes, request.reserve_bytes(card)) == (64 << 20, 16 << 20)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--device cpu --budget 1GiB", "fake-device where sizes are tried: a recording is for GPUs that are simulated"),
        ("--gpu t4,mi300x", "fake-device for MI300X: PyTorch's CUDA build runs on NVIDIA's GPUs alone"),
    ],
)
def test_where_the_cuda_build_records_nothing(options: str, said: str) -> None:
    """It would change nothing about real steps, and it is no build for AMD's GPUs."""
    with pytest.raises(InvalidValue) as refused:
        request_for(f"--recorder cuda-build {options}")
    assert words_of(refused.value) == f"--recorder: invalid value 'cuda-build'; expected {said}."


def test_a_path_is_no_misspelt_name(tmp_path: Path) -> None:
    """A path, a config or a factory is not looked up among the names."""
    for model in ("./no/such", "no.json", "no:such", str(tmp_path)):
        assert request_for(f"--model {model}").models == (model,)


@pytest.mark.parametrize(
    ("headroom", "size"), [("0", 0), ("0.25", 3 << 30), ("25 %", 3 << 30), ("3GiB", 3 << 30), (" 1GB ", 10**9)]
)
def test_headroom(headroom: str, size: int) -> None:
    """Headroom is a share of what is usable, or a size."""
    arguments = build_parser().parse_args(["sweep", "--no-cache", "--budget", "12GiB", "--headroom", headroom])
    request = read_request(arguments)
    assert request.reserve_bytes(request.place.cards[0]) == size


def test_headroom_that_leaves_nothing() -> None:
    """A size that leaves nothing of one of the devices is refused, with what is usable of it."""
    expected = "headroom: invalid value '13.00 GiB'; expected less than the 12.00 GiB usable on 12.00 GiB budget"
    with pytest.raises(InvalidValue, match=expected):
        request_for("--budget 12GiB --headroom 13GiB")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--min-batch-size 12 --multiple-of 8 --max-batch-size 15",
            "--max-batch-size: invalid value 15; expected at least 16, the smallest size that is at least 12 and a "
            "multiple of 8.",
        ),
        (
            "--min-batch-size 1048577",
            "--min-batch-size: invalid value 1048577; expected sizes of at most 1048576 to try, or a --max-batch-size.",
        ),
        (
            "--multiple-of 8 --target-batch-size 100",
            "--target-batch-size: invalid value 100; expected at least 1 and a multiple of 8, as each micro-batch has "
            "to be.",
        ),
        (
            "--min-batch-size 4 --target-batch-size 3",
            "--target-batch-size: invalid value 3; expected at least 4, as each micro-batch has to be.",
        ),
        (
            "--throughput",
            "--throughput: invalid value True; expected a real GPU or --device cpu with it: a simulated step takes no "
            "time, so its speed is not known.",
        ),
    ],
)
def test_sizes_of_which_none_is_left(options: str, said: str) -> None:
    """Limits that leave nothing to try, no micro-batch for the target, or nothing to time, are refused at once."""
    with pytest.raises(InvalidValue) as caught:
        request_for(options)
    assert words_of(caught.value) == said


def test_a_stated_share_of_the_peak() -> None:
    """As a number or a percentage; none unless it is given."""
    assert [request_for(f"--instance g4dn.xlarge --mfu {share}").mfu for share in ("40%", "0.4")] == [0.4, 0.4]
    assert request_for("--instance g4dn.xlarge").mfu is None


def test_a_spot_price_alone_is_no_price_of_training(tmp_path: Path) -> None:
    """The costs are on demand, as $/h is."""
    prices = tmp_path / "mine.csv"
    prices.write_text("instance,usd_per_hour,spot_usd_per_hour\ng4dn.xlarge,,0.2\n")
    with pytest.raises(InvalidValue, match=r"^mfu: .* an --instance with a price with it"):
        request_for(f"--instance g4dn.xlarge --prices {prices} --mfu 0.4")
    prices.write_text("instance,usd_per_hour\ng4dn.xlarge,0.5\n")
    assert request_for(f"--instance g4dn.xlarge --prices {prices} --mfu 0.4").mfu == 0.4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpu t4", "0.4; expected an --instance with a price with it: "),
        ("--instance kaggle-p100", "0.4; expected an --instance with a price with it: "),
        ("--instance g4dn.xlarge --mode inference", "0.4; expected --mode train with it, not inference."),
        ("--instance g4dn.xlarge --mfu 0", "'0'; expected a share above 0 and at most 1, such as 0.4 or 40%."),
        ("--device cpu --budget 64MiB", "0.4; expected none of it where real steps are taken, "),
        ("--device cpu --budget 64MiB --throughput", "0.4; expected none of it where real steps are taken, "),
        ("--device cuda --engine ray", "0.4; expected none of it where real steps are taken, "),
        ("--instance p4d.24xlarge --strategy tp", "0.4; expected another --strategy with it than tp, whose GPUs share"),
        ("--instance g4dn.xlarge --lora 8 --load-in-8bit", "0.4; expected another --quantization with it than int8, "),
    ],
)
def test_where_a_share_of_the_peak_says_nothing_of_the_cost(options: str, said: str) -> None:
    """Without a price, without training, and where a GPU's products are not its own samples' in one precision."""
    with pytest.raises(InvalidValue) as caught:
        request_for(f"--mfu 0.4 {options}")
    assert words_of(caught.value).startswith(f"--mfu: invalid value {said}")
