"""Cards as they are asked for."""

from __future__ import annotations

import pytest

from batchfinder.devices import all_gpus
from batchfinder.devices.cards import card, instance_card, named_gpus
from batchfinder.errors import InvalidValue

GIB = 1 << 30


def test_card() -> None:
    """A budget alone, a card alone, and a budget on a card; total and usable bytes stay apart."""
    whole, budget, both = card("t4"), card(None, "4GiB"), card("t4", "4GiB")
    assert whole.device.usable_bytes < whole.device.total_bytes
    assert budget.device.usable_bytes == both.device.usable_bytes == 4 * GIB
    assert (whole.name, budget.name, both.name) == ("T4", "4.00 GiB budget", "T4, 4.00 GiB budget")
    assert both.device.compute_capability == whole.device.compute_capability == (7, 5)
    with pytest.raises(InvalidValue, match=r"^gpu: missing"):
        card(None, None)


def test_context() -> None:
    """What the CUDA context takes of a card, an instance's too, is not usable, and stands in the name."""
    usual, old = card("t4").device, card("t4", None, context="1.5GiB")
    assert old.name == "T4, 1.50 GiB context"
    assert old.device.usable_bytes == usual.total_bytes - 1.5 * GIB < usual.usable_bytes
    assert old.device.context_bytes == 1.5 * GIB
    assert card("t4", "4GiB", context="1.5GiB").name == "T4, 1.50 GiB context, 4.00 GiB budget"
    assert instance_card("g4dn.xlarge", context="1.5GiB").device == old.device
    for gpu, context in ((None, "1GiB"), ("t4", "40GiB"), ("t4", "much")):
        with pytest.raises(InvalidValue, match=r"^context: invalid value"):
            card(gpu, "4GiB", context=context)


def test_an_instances_gpus() -> None:
    """All of them, or as many as are asked for, which it must have."""
    assert (instance_card("p3.16xlarge").name, instance_card("p3.16xlarge").count) == ("p3.16xlarge: 8 x V100 16GB", 8)
    assert instance_card("p3.16xlarge", "12GiB", 2).name == "p3.16xlarge: 2 x V100 16GB, 12.00 GiB budget"
    with pytest.raises(InvalidValue, match=r"^gpus: invalid value 9; expected at most 8, the GPUs of p3\.16xlarge"):
        instance_card("p3.16xlarge", count=9)


def test_several_by_one_name() -> None:
    """Commas stand between names; `all` and `80GB+` are the catalogue's, of at least that size."""
    large = [gpu.name for gpu in all_gpus() if gpu.class_gb >= 80]
    assert named_gpus(["t4, v100", "80GB+"]) == ["t4", "v100", *large]
    assert named_gpus(["ALL"]) == [gpu.name for gpu in all_gpus()]
    with pytest.raises(InvalidValue, match=r"^gpu: invalid value '9999GB\+'; expected at most \d+GB\+"):
        named_gpus(["9999GB+"])
