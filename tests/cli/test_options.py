"""What the options mean."""

from __future__ import annotations

import pytest

from batchfinder.cli.options import allocator_notes, allocator_settings, card, headroom_bytes
from batchfinder.errors import InvalidValue
from batchfinder.simulator.alloc_conf import AllocatorSettings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("headroom", "size"),
    [("0", 0), ("0.25", 3 * GIB), ("25%", 3 * GIB), ("25 %", 3 * GIB), ("3GiB", 3 * GIB), (" 1GB ", 10**9), ("0%", 0)],
)
def test_headroom(headroom: str, size: int) -> None:
    """Headroom is a share of what is usable, a percentage of it, or a size."""
    assert headroom_bytes(headroom, 12 * GIB) == size


@pytest.mark.parametrize("headroom", ["1", "-0.1", "100%", "12GiB", "inf", "nan", "", "%", "1e999", "a tenth"])
def test_headroom_that_leaves_nothing(headroom: str) -> None:
    """Headroom that is no size, or leaves nothing of the device, is refused."""
    with pytest.raises(InvalidValue, match="--headroom"):
        headroom_bytes(headroom, 12 * GIB)


def test_card() -> None:
    """A budget alone, a card alone, and a budget on a card; total and usable bytes stay apart."""
    whole, budget, both = card("t4", None), card(None, "4GiB"), card("t4", "4GiB")
    assert whole.device.usable_bytes < whole.device.total_bytes
    assert budget.device.usable_bytes == both.device.usable_bytes == 4 * GIB
    assert (whole.name, budget.name, both.name) == ("T4", "4.00 GiB budget", "T4, 4.00 GiB budget")
    assert both.device.compute_capability == whole.device.compute_capability == (7, 5)
    with pytest.raises(InvalidValue, match="--gpu"):
        card(None, None)


def test_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer of PyTorch's two variables wins, and what is not modelled is put in words."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_settings() == AllocatorSettings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert allocator_settings() == AllocatorSettings(expandable_segments=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8")
    assert allocator_notes(allocator_settings()) == ("the allocator's setting garbage_collection_threshold:0.8",)
