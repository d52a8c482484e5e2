from __future__ import annotations

import pytest

from batchfinder.devices import Instance, all_gpus, all_instances, find_instance
from batchfinder.devices.catalog import instance_key
from batchfinder.errors import UnknownName

every_instance = pytest.mark.parametrize("instance", all_instances(), ids=lambda instance: instance.name)


def test_catalogue_is_large_enough() -> None:
    """At least 18 instances of three providers are known."""
    assert len(all_instances()) >= 18
    assert {instance.provider for instance in all_instances()} == {"AWS", "Azure", "Google Cloud"}


def test_names_are_unique() -> None:
    """No two names or aliases mean the same to the look-up."""
    keys = [instance_key(name) for instance in all_instances() for name in (instance.name, *instance.aliases)]
    assert len(keys) == len(set(keys))
    assert "" not in keys


@every_instance
def test_rows_are_whole(instance: Instance) -> None:
    """Every instance has a GPU of the catalogue, a possible number of them and a source, and is found by its names."""
    assert instance.gpu in all_gpus()
    assert instance.num_gpus in {1, 2, 4, 8, 16}
    assert "https://" in instance.source
    for name in (instance.name, *instance.aliases):
        assert find_instance(name) is instance


@pytest.mark.parametrize(
    ("name", "gpu", "num_gpus"),
    [
        ("ml.p3.2xlarge", "V100 16GB", 1),
        ("ml.p3.8xlarge", "V100 16GB", 4),
        ("ml.p3.16xlarge", "V100 16GB", 8),
        ("p3dn.24xlarge", "V100 32GB", 8),
        ("p2.xlarge", "K80", 1),
        ("P4D.24xlarge", "A100 40GB", 8),
        ("p4de.24xlarge", "A100 80GB", 8),
        ("aws p5.48xlarge", "H100 80GB", 8),
        ("p5e.48xlarge", "H200", 8),
        ("p5en.48xlarge", "H200", 8),
        ("g4dn.xlarge", "T4", 1),
        ("g5.xlarge", "A10G", 1),
        ("g5.48xlarge", "A10G", 8),
        ("g6.xlarge", "L4", 1),
        ("g6e.xlarge", "L40S", 1),
        ("Standard_NC24s_v3", "V100 16GB", 4),
        ("NC24s v3", "V100 16GB", 4),
        ("Standard_NC24", "K80", 4),
        ("azure ND96asr_v4", "A100 40GB", 8),
        ("ND96amsr_A100_v4", "A100 80GB", 8),
        ("NC24ads_A100_v4", "A100 80GB", 1),
        ("ND96isr_H100_v5", "H100 80GB", 8),
        ("a2-highgpu-1g", "A100 40GB", 1),
        ("gcp a2-highgpu-8g", "A100 40GB", 8),
        ("a2-ultragpu-8g", "A100 80GB", 8),
        ("google cloud a3-highgpu-8g", "H100 80GB", 8),
        ("g2-standard-4", "L4", 1),
    ],
)
def test_names_as_typed(name: str, gpu: str, num_gpus: int) -> None:
    """The providers' instances have the GPUs the providers say, with or without a prefix in front."""
    instance = find_instance(name)
    assert (instance.gpu.name, instance.num_gpus) == (gpu, num_gpus)


@pytest.mark.parametrize(("name", "likely"), [("p3.4xlarge", "p3.2xlarge"), ("NC24s_v4", "Standard_NC24s_v3")])
def test_near_miss_names_the_nearest(name: str, likely: str) -> None:
    """A size that a family does not have is a miss that names its neighbours, at most five."""
    with pytest.raises(UnknownName) as caught:
        find_instance(name)
    assert caught.value.kind == "instance"
    assert likely in caught.value.matches
    assert len(caught.value.matches) <= 5
