from __future__ import annotations

import pytest

from batchfinder.devices.catalog import GpuKey, gpu_key, instance_key, nearest


@pytest.mark.parametrize(
    ("name", "model", "size_gb"),
    [
        ("Tesla V100-SXM2-32GB", "v100sxm2", 32),
        ("a100_80g", "a100", 80),
        ("NVIDIA GeForce RTX 3090", "rtx3090", None),
        ("NVIDIA A10G", "a10g", None),
        ("MIG 1g.10gb", "mig1g10gb", None),
        ("Titan X (12GB RAM)", "titanx", 12),
    ],
)
def test_gpu_key(name: str, model: str, size_gb: int | None) -> None:
    """A size is a number of its own: the G of an A10G and a MIG slice are none."""
    assert gpu_key(name) == GpuKey(model, size_gb)


def test_form_is_dropped_on_request() -> None:
    """Board and memory type go, the model and the size stay."""
    assert gpu_key("NVIDIA H100 80GB HBM3").without_form() == GpuKey("h100", 80)
    assert gpu_key("Tesla P100-PCIE-16GB").without_form().text == "p10016gb"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ml.p3.2xlarge", "p32xlarge"),
        ("Standard_NC24s_v3", "nc24sv3"),
        ("Microsoft Azure Standard NC24s v3", "nc24sv3"),
        ("g2-standard-4", "g2standard4"),
        ("mlx.large", "mlxlarge"),
    ],
)
def test_instance_key(name: str, key: str) -> None:
    """A prefix is dropped in front only, and only as a word of its own."""
    assert instance_key(name) == key


def test_nearest_names_each_once() -> None:
    """Several keys of one name count once, and the limit holds."""
    names = {"v100": "V100", "v10016gb": "V100", "v10032gb": "V100 32GB", "p100": "P100"}
    assert nearest("v100x", names)[0] == "V100"
    assert sorted(nearest("v100x", names)) == sorted(set(nearest("v100x", names)))
    assert len(nearest("v100x", names, limit=1)) == 1
    assert nearest("zzz", names) == ()
