"""Where a sweep's figures come from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from batchfinder.cli import sweep_request
from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import choose_place
from batchfinder.devices.detect import PresentGpu, visible_gpus
from batchfinder.errors import CudaStubUnavailable, InvalidValue
from batchfinder.measure import host_limits
from batchfinder.measure.child_probe import GpuFacts
from batchfinder.sizing.sweep_request import Place

GIB = 1 << 30
T4 = PresentGpu(0, "Tesla T4", 15360 << 20, (7, 5))
UNHEARD_OF = PresentGpu(2, "NVIDIA Unheard-of 9", 10000 << 20, (12, 0))
FACTS = GpuFacts("Tesla T4", 15 * GIB, 14 * GIB, (7, 5), {"torch": "2.13.0", "cuda": "13.0"})


def place_for(options: str) -> Place:
    """What the options choose."""
    return choose_place(build_parser().parse_args(["sweep", *options.split()]))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[PresentGpu]:
    """The machine's cards, for the test to fill in; nvidia-smi's driver is told."""
    here: list[PresentGpu] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    visible = lambda: visible_gpus(here, os.environ.get("CUDA_VISIBLE_DEVICES"))  # noqa: E731
    monkeypatch.setattr(sweep_request, "present_gpus", visible)
    monkeypatch.setattr(sweep_request, "driver_version", lambda: "580.95")
    monkeypatch.setattr(sweep_request, "driver_is_here", lambda: False)
    return here


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every card is `FACTS`; which were looked at."""
    devices: list[str] = []

    def look(device: str) -> GpuFacts:
        devices.append(device)
        return FACTS

    monkeypatch.setattr(sweep_request, "query_gpu", look)
    return devices


def test_nothing_here(cards: list[PresentGpu]) -> None:
    """Without a card, and without a name, a Titan X is simulated; a budget alone is a device of its own."""
    place = place_for("")
    assert (place.device, [card.name for card in place.cards]) == ("simulated", ["Titan X Pascal"])
    assert [card.name for card in place_for("--budget 4GiB").cards] == ["4.00 GiB budget"]


def test_a_card_is_here(cards: list[PresentGpu], looked_at: list[str]) -> None:
    """Real steps are taken on the card that is here, with what is free of it, unless another one is named."""
    cards.append(T4)
    place = place_for("")
    assert (place.device, looked_at, place.notes) == ("cuda:0", ["cuda:0"], ())
    (card,) = place.cards
    assert (card.name, card.device.usable_bytes, card.device.total_bytes) == ("T4", 14 * GIB, 15 * GIB)
    assert place.versions == {"torch": "2.13.0", "cuda": "13.0", "driver": "580.95"}
    assert place.within_budget() == 15 * GIB
    for options in ("--gpu v100", "--instance p3.2xlarge", "--device simulated"):
        assert place_for(options).device == "simulated"
    assert looked_at == ["cuda:0"]


def test_a_share_of_a_card_under_mps(
    cards: list[PresentGpu], looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPS's limit on a GPU is a budget, unless there is one; what is no size is refused by the variable's name."""
    cards.append(T4)
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=6G,1=512MB")
    assert (place_for("").cards[0].device.usable_bytes, place_for("").budget_bytes) == (6 * GIB, 6 * GIB)
    assert place_for("--device cuda:1").budget_bytes == GIB // 2
    assert place_for("--device cuda:2").budget_bytes is None
    assert place_for("--budget 2GiB").budget_bytes == 2 * GIB
    (simulated,) = place_for("--device simulated").cards
    assert simulated.name == "T4, 6.00 GiB budget"
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=half")
    with pytest.raises(InvalidValue, match=r"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: invalid value 'half'; expected .*4G"):
        place_for("--device cuda")


def test_a_budget_on_the_card_that_is_here(cards: list[PresentGpu], looked_at: list[str]) -> None:
    """A budget lets the card answer for a smaller one, never for a larger one."""
    cards.append(T4)
    small, large = place_for("--budget 12GiB"), place_for("--device cuda:1 --budget 80GiB")
    assert (small.cards[0].name, small.cards[0].device.usable_bytes) == ("T4, 12.00 GiB budget", 12 * GIB)
    assert (small.within_budget(), large.within_budget()) == (12 * GIB, 15 * GIB)
    assert large.cards[0].device.usable_bytes == 14 * GIB
    assert looked_at == ["cuda:0", "cuda:1"]


def test_a_card_that_only_pytorch_sees(
    cards: list[PresentGpu], looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the driver is here and nothing lists a card, PyTorch is asked; if it has none, it is said why."""
    monkeypatch.setattr(sweep_request, "driver_is_here", lambda: True)
    place = place_for("")
    assert (place.device, looked_at, place.notes) == ("cuda:0", ["cuda:0"], ())

    def none(device: str) -> GpuFacts:
        raise InvalidValue("device", device, "a GPU")

    monkeypatch.setattr(sweep_request, "query_gpu", none)
    (note,) = place_for("").notes
    assert note.startswith("no GPU was found here, and no --gpu is named: simulating Titan X Pascal. --device: invalid")
    assert place_for("--device simulated").device == "simulated"


def test_several_cards(cards: list[PresentGpu], looked_at: list[str]) -> None:
    """The first is measured on, and it is said how another one is."""
    cards += [T4, replace(T4, index=1)]
    assert place_for("").notes == ("this machine has 2 GPUs; --device cuda:1 measures on another one",)
    assert place_for("--device cuda").notes == ()


def test_hidden_cards_are_not_meant(
    cards: list[PresentGpu], looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards that CUDA_VISIBLE_DEVICES hides are neither measured on nor simulated."""
    cards.append(T4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [card.name for card in place_for("").cards] == ["Titan X Pascal"]
    assert looked_at == []


def test_a_card_that_pytorch_cannot_use(cards: list[PresentGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is simulated then, and the note says why; asked for by name, it is an error."""
    cards += [T4, T4, UNHEARD_OF]

    def look(device: str) -> GpuFacts:
        raise InvalidValue("device", device, "cpu, or a card that PyTorch 2.13.0+cpu can use here")

    monkeypatch.setattr(sweep_request, "query_gpu", look)
    place = place_for("")
    assert (place.device, [card.name for card in place.cards]) == ("simulated", ["T4", "NVIDIA Unheard-of 9"])
    assert place.cards[1].device.usable_bytes == (9700 - 600) << 20
    assert place.notes == (
        "this machine has T4, NVIDIA Unheard-of 9; its figures are simulated, not measured. "
        "--device: invalid value 'cuda'; expected cpu, or a card that PyTorch 2.13.0+cpu can use here.",
    )
    with pytest.raises(InvalidValue) as caught:
        place_for("--device cuda")
    assert str(caught.value) == (
        "--device: invalid value 'cuda'; expected cpu, or a card that PyTorch 2.13.0+cpu can use here."
    )


def test_simulated_cards_that_are_here(cards: list[PresentGpu]) -> None:
    """With --device simulated, the machine's own cards are simulated, each kind once, and said to be."""
    cards += [T4, replace(T4, index=1)]
    place = place_for("--device simulated")
    assert [card.name for card in place.cards] == ["T4"]
    assert place.notes == ("this machine has T4; its figures are simulated, not measured",)


def test_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU needs a budget, which must be there; both messages say how much is."""
    monkeypatch.setattr(host_limits, "meminfo", lambda field: 20 * GIB)
    monkeypatch.setattr(host_limits, "cgroup", lambda: (None, 0))
    place = place_for("--device cpu --budget 2GiB")
    (card,) = place.cards
    assert (place.device, card.device.usable_bytes, place.within_budget()) == ("cpu", 2 * GIB, 2 * GIB)
    assert card.name.endswith(", 2.00 GiB budget")
    with pytest.raises(InvalidValue) as caught:
        place_for("--device cpu")
    assert str(caught.value) == (
        "--budget: missing; expected a size with --device cpu, such as 9GiB, half of what is free here."
    )
    with pytest.raises(InvalidValue) as caught:
        place_for("--device cpu --budget 19GiB")
    assert str(caught.value) == (
        "--budget: invalid value '19GiB'; expected at most 18.00 GiB, the free memory less a reserve against the "
        "kernel's out-of-memory killer."
    )
    monkeypatch.setattr(host_limits, "cgroup", lambda: (3 * GIB, GIB))
    with pytest.raises(InvalidValue, match=r"at most 1\.80 GiB"):
        place_for("--device cpu --budget 2GiB")


def test_a_named_card_is_another_than_the_one_that_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What --gpu or --instance names is tried on PyTorch's CUDA build, which must be here; not by a card's number."""
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path))
    for named in ("--gpu t4", "--instance p3.2xlarge"):
        with pytest.raises(CudaStubUnavailable, match=r"is not here: `batchfinder stub install` downloads it"):
            place_for(f"--device cuda {named}")
        with pytest.raises(InvalidValue, match=r"--device: invalid value 'cuda:1'; expected simulated, cuda or auto"):
            place_for(f"--device cuda:1 {named}")
    with pytest.raises(InvalidValue, match=r"--gpu: invalid value 'MI300X'; expected NVIDIA GPUs with --device cuda"):
        place_for("--device cuda --gpu mi300x")
