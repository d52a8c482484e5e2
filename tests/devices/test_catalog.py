"""The catalog: names, GPUs and instances."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from batchfinder.devices import Gpu, Instance, all_gpus, all_instances, find_gpu, find_instance
from batchfinder.devices.catalog import GpuKey, gpu_key, instance_key, nearest, read_tables
from batchfinder.errors import UnknownName
from batchfinder.units import GIB


@pytest.mark.parametrize(("file", "kind"), [("gpus.toml", "gpu"), ("instances.toml", "instance")])
def test_reads_tables_in_order(file: str, kind: str) -> None:
    """Both files are part of the package, and every table of them has a name."""
    names = [table["name"] for table in read_tables(file, kind)]
    assert len(names) == len(set(names)) > 0


def test_torch_is_not_imported() -> None:
    """Looking up a GPU imports nothing heavy."""
    code = (
        "import sys, batchfinder.devices as devices; devices.find_instance('p3.2xlarge'); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


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


def test_form_is_dropped_where_no_gpu_has_it() -> None:
    """Board and memory type go, the model and the size stay."""
    assert find_gpu("NVIDIA H100 80GB HBM3e") is find_gpu("H100 80GB")
    assert find_gpu("Tesla P100-OAM-16GB") is find_gpu("P100 16GB")
    with pytest.raises(UnknownName, match="P100"):
        find_gpu("Tesla P100-OAM-80GB")


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


THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
CAPABILITIES = {
    "Kepler": {(3, 7)},
    "Maxwell": {(5, 2)},
    "Pascal": {(6, 0), (6, 1)},
    "Volta": {(7, 0)},
    "Turing": {(7, 5)},
    "Ampere": {(8, 0), (8, 6)},
    "Ada Lovelace": {(8, 9)},
    "Hopper": {(9, 0)},
    "Blackwell": {(10, 0), (10, 3), (12, 0)},
}

every_gpu = pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)


def rule_bytes(gpu: Gpu) -> int:
    """The rule for the context that gpus.toml states."""
    assert gpu.compute_capability is not None
    threads = THREADS_PER_MULTIPROCESSOR.get(gpu.compute_capability, 2048)
    return max(gpu.multiprocessors * threads * 2560, round(0.12 * GIB))


def test_enough_gpus() -> None:
    """At least 36 GPUs are known, and reading them again gives the same objects."""
    assert len(all_gpus()) >= 36
    assert all_gpus() is all_gpus()


def test_gpu_names_are_unique() -> None:
    """No two names or aliases mean the same to the look-up."""
    keys = [gpu_key(name).text for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)]
    assert len(keys) == len(set(keys))
    assert "" not in keys


@every_gpu
def test_found_by_own_names(gpu: Gpu) -> None:
    """Every GPU is found by its name and aliases, alone and with its own size."""
    for name in (gpu.name, *gpu.aliases):
        assert find_gpu(name) is gpu
        if gpu_key(name).size_gb is None:
            assert find_gpu(f"NVIDIA {name.upper()}-{gpu.class_gb}GB") is gpu


@every_gpu
def test_sources_are_given(gpu: Gpu) -> None:
    """Each figure has a source: an address or a quotation, unless the row says that it is an estimate."""
    assert gpu.context_source
    assert gpu.source.startswith(("https://", "log:")) or "memory_bytes" in gpu.estimated
    assert set(gpu.estimated) <= {"memory_bytes", "context_bytes"}


@every_gpu
def test_peaks_have_their_source(gpu: Gpu) -> None:
    """An address where there is a figure; bf16 and fp16 are alike where there are units for both, and above fp32."""
    peaks = gpu.bf16_tflops, gpu.fp16_tflops, gpu.fp32_tflops
    assert gpu.tflops_source.startswith("https://") == any(peaks)
    assert gpu.bf16_tflops in (None, gpu.fp16_tflops)
    assert gpu.bf16_tflops is None or gpu.multiplies("bf16")
    assert gpu.fp32_tflops is None or gpu.fp16_tflops is None or gpu.fp32_tflops < gpu.fp16_tflops


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("A100", "bf16-mixed", 312e12),
        ("A100", "bf16-true", 312e12),
        ("A100", "16-mixed", 312e12),
        ("A100", "fp32", 19.5e12),
        ("A10G", "bf16-mixed", 70e12),
        ("T4", "16-mixed", 65e12),
        ("T4", "bf16-mixed", None),
        ("B200", "fp32", None),
        ("L40S", "bf16-mixed", None),
        ("A100 40GB MIG 1g.5gb", "bf16-mixed", None),
    ],
)
def test_the_peak_is_of_the_precision(name: str, precision: str, peak: float | None) -> None:
    """Of tensor cores for 16 bits, without TF32 for fp32; none where the card has no such units or no source."""
    assert find_gpu(name).peak_flops(precision) == peak


@every_gpu
def test_total_is_near_the_class(gpu: Gpu) -> None:
    """The driver's total is 85 to 103 % of the size the card is sold as."""
    assert 0.85 <= gpu.memory_bytes / (gpu.class_gb * GIB) <= 1.03


@every_gpu
def test_usable_is_total_less_context(gpu: Gpu) -> None:
    """Usable is less than total, by 0.1 to 0.75 GiB."""
    assert gpu.usable_bytes == gpu.memory_bytes - gpu.context_bytes
    assert 0.1 * GIB <= gpu.context_bytes <= 0.75 * GIB


@every_gpu
def test_no_attribute_is_just_memory(gpu: Gpu) -> None:
    """Total and usable cannot be mistaken for each other: nothing is called plainly `memory`."""
    assert not {"memory", "total", "vram"} & {field.name for field in dataclasses.fields(gpu)}


@every_gpu
def test_capability_fits_the_architecture(gpu: Gpu) -> None:
    """NVIDIA cards have their architecture's compute capability; AMD cards have a gfx name instead."""
    if gpu.vendor == "AMD":
        assert gpu.compute_capability is None
        assert "gfx" in gpu.architecture
    else:
        assert gpu.vendor == "NVIDIA"
        assert gpu.compute_capability in CAPABILITIES[gpu.architecture]


@pytest.mark.parametrize(
    "gpu",
    [gpu for gpu in all_gpus() if gpu.compute_capability is not None and gpu.compute_capability >= (6, 0)],
    ids=lambda gpu: gpu.name,
)
def test_context_follows_the_rule(gpu: Gpu) -> None:
    """Estimated contexts are the documented rule's, and measured ones are within 25 % of it or 0.16 GiB above."""
    if "context_bytes" in gpu.estimated:
        assert gpu.context_bytes == rule_bytes(gpu)
    else:
        assert 0.75 * rule_bytes(gpu) <= gpu.context_bytes <= max(1.25 * rule_bytes(gpu), rule_bytes(gpu) + 0.16 * GIB)


def test_published_k80() -> None:
    """The K80 has the 11.17 GiB in all and 10.59 GiB usable that the published notebook prints."""
    gpu = find_gpu("K80")
    assert round(gpu.memory_bytes / GIB, 2) == 11.17
    assert round(gpu.usable_bytes / GIB, 2) == 10.59


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("GeForce GTX TITAN X", 11.92),
        ("TITAN X (Pascal)", 11.91),
        ("Tesla P40", 22.38),
        ("Tesla P100-PCIE-16GB", 15.90),
        ("Tesla V100-SXM2-16GB", 15.78),
        ("Tesla V100-SXM2-32GB", 31.73),
        ("Tesla T4", 14.56),
        ("NVIDIA GeForce RTX 2080 Ti", 10.75),
        ("NVIDIA A100-SXM4-40GB", 39.39),
        ("NVIDIA A100 80GB PCIe", 79.15),
        ("NVIDIA A10G", 22.06),
        ("NVIDIA RTX A6000", 47.54),
        ("NVIDIA L4", 22.03),
        ("NVIDIA H100 80GB HBM3", 79.11),
        ("NVIDIA H200", 139.80),
        ("NVIDIA B200", 178.35),
        ("NVIDIA GB200", 184.31),
        ("NVIDIA A30 MIG 2g.12gb", 11.69),
        ("AMD Radeon RX 7900 XTX", 23.98),
        ("AMD Instinct MI300X", 191.98),
    ],
)
def test_driver_names_give_the_totals_drivers_print(name: str, gib: float) -> None:
    """A name as nvidia-smi prints it leads to the total that PyTorch's out-of-memory messages print for that card."""
    assert round(find_gpu(name).memory_bytes / GIB, 2) == gib


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("V100", "V100 16GB"),
        ("v100-32gb", "V100 32GB"),
        ("V100_32G", "V100 32GB"),
        ("Tesla V100 32GiB", "V100 32GB"),
        ("a100", "A100 40GB"),
        ("A100-80g", "A100 80GB"),
        ("h100", "H100 80GB"),
        ("h100 pcie 80gb", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("titan x", "Titan X Pascal"),
        ("Titan X (12GB RAM)", "Titan X Pascal"),
        ("titan x maxwell", "GTX Titan X"),
        ("gtx titan x", "GTX Titan X"),
        ("TITAN Xp", "Titan Xp"),
        ("rtx3090", "RTX 3090"),
        ("3090 24 GB", "RTX 3090"),
        ("1080ti", "GTX 1080 Ti"),
        ("titan rtx", "Titan RTX"),
        ("quadro rtx 8000", "Quadro RTX 8000"),
        ("rtx 4060 ti", "RTX 4060 Ti 8GB"),
        ("rtx 4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell"),
        ("a800", "A800 80GB"),
        ("h800", "H800 80GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA H200 MIG 3g.71gb", "H200 MIG 3g.71gb"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("a10g", "A10G"),
        ("A10", "A10"),
        ("L40S", "L40S"),
        ("GH200 480GB", "GH200"),
        ("instinct mi250x", "MI250X"),
    ],
)
def test_gpu_names_as_typed(name: str, expected: str) -> None:
    """Case, spaces, hyphens, vendor words and size suffixes do not matter; a bare family is its smaller card."""
    assert find_gpu(name).name == expected


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("v100-24gb", ("V100 16GB", "V100 32GB")),
        ("A100-SXM-64GB", ("A100 40GB", "A100 80GB")),
        ("rtx 3080 12gb", ("RTX 3080",)),
    ],
)
def test_wrong_size_is_a_miss(name: str, matches: tuple[str, ...]) -> None:
    """A size that the family does not have is never rounded to one it has: the family's cards are named."""
    with pytest.raises(UnknownName) as caught:
        find_gpu(name)
    assert caught.value.matches == matches


@pytest.mark.parametrize("name", ["m2-max", "m2 max 64gb", "gaudi", "gaudi3 128gb", "tpu-v4", "a770"])
def test_what_is_no_card_of_cuda_or_rocm_is_like_none(name: str) -> None:
    """A name that has a few letters of a card's is not answered with that card."""
    with pytest.raises(UnknownName) as caught:
        find_gpu(name)
    assert caught.value.matches == ()


def test_a_size_in_the_name_is_the_size_of_what_is_named() -> None:
    """The cards that are named instead have as much memory as the name says."""
    with pytest.raises(UnknownName) as caught:
        find_gpu("rtx 4900 24gb")
    assert caught.value.matches[0] == "RTX 4090"
    assert {find_gpu(match).class_gb for match in caught.value.matches} == {24}


def test_near_miss_names_the_nearest_gpu() -> None:
    """A misspelt GPU is answered with at most five names, the likeliest first, each once."""
    with pytest.raises(UnknownName) as caught:
        find_gpu("rtx 3091")
    assert caught.value.kind == "GPU"
    assert caught.value.matches[0] == "RTX 3090"
    assert len(set(caught.value.matches)) == len(caught.value.matches) <= 5


@pytest.mark.parametrize("name", ["", "nvidia", "24gb", "NVIDIA GeForce RTX 3080 Laptop GPU", "Radeon VII"])
def test_not_a_known_gpu(name: str) -> None:
    """A vendor, a size or an unlisted card alone is a miss, and a laptop's card is not the desktop's."""
    with pytest.raises(UnknownName):
        find_gpu(name)


every_instance = pytest.mark.parametrize("instance", all_instances(), ids=lambda instance: instance.name)


def test_enough_instances() -> None:
    """Those of clouds, of who rents GPUs by the piece, and of notebooks."""
    assert len(all_instances()) >= 140
    known = {instance.provider for instance in all_instances()}
    assert {"AWS", "Azure", "Google Cloud", "Lambda", "RunPod", "CoreWeave", "Nebius"} < known
    assert {"Hugging Face", "Colab", "Kaggle"} < known


def test_instance_names_are_unique() -> None:
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
        ("p5.4xlarge", "H100 80GB", 1),
        ("g4-standard-384", "RTX PRO 6000 Blackwell", 8),
        ("NC40ads_H100_v5", "H100 NVL", 1),
        ("colab", "T4", 1),
        ("kaggle", "T4", 2),
        ("t4-small", "T4", 1),
        ("l40sx4", "L40S", 4),
        ("gpu_8x_h100_sxm5", "H100 80GB", 8),
        ("nebius-h200x8", "H200", 8),
    ],
)
def test_instance_names_as_typed(name: str, gpu: str, num_gpus: int) -> None:
    """The providers' instances have the GPUs the providers say, with or without a prefix in front."""
    instance = find_instance(name)
    assert (instance.gpu.name, instance.num_gpus) == (gpu, num_gpus)


@pytest.mark.parametrize(("name", "likely"), [("p3.4xlarge", "p3.2xlarge"), ("NC24s_v4", "Standard_NC24s_v3")])
def test_near_miss_names_the_nearest_instance(name: str, likely: str) -> None:
    """A size that a family does not have is a miss that names its neighbours, at most five."""
    with pytest.raises(UnknownName) as caught:
        find_instance(name)
    assert caught.value.kind == "instance"
    assert likely in caught.value.matches
    assert len(caught.value.matches) <= 5
