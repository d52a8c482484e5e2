"""The GPUs and cloud instances of gpus.toml and instances.toml, found by almost any of their names.

A name as people type it, as a driver prints it and as the catalog has it becomes one key. A new GPU is one entry in
gpus.toml. A simulation runs on a `Device`: a GPU of the catalog, a memory budget, or a budget on a GPU.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from batchfinder.errors import InvalidValue, UnknownName
from batchfinder.units import MIB, format_bytes


def read_tables(file: str, kind: str) -> list[dict[str, Any]]:
    """Read the array of tables named `kind` from a file of this package, in the order of the file."""
    text = files("batchfinder.devices").joinpath(file).read_text(encoding="utf-8")
    tables: list[dict[str, Any]] = tomllib.loads(text)[kind]
    return tables


_SIZE = re.compile(r"(?<![a-z0-9.])(\d{1,6})\s*(?:gib|gb|g)(?![a-z0-9.])")
_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|corporation|memory|vram|ram|gpu")
_FORM = re.compile(r"sxm\d?|pcie|hbm\d?e?|oam|dgxs")
_PROVIDER = re.compile(r"(?:(?:ml|aws|amazon|ec2|sagemaker|azure|microsoft|gcp|google|cloud|standard)[^a-z0-9]+)+")


@dataclass(frozen=True, slots=True)
class GpuKey:
    """A GPU's name, taken apart."""

    model: str  # without vendor, size and punctuation: `v100sxm2`, `rtx3090`, `titanxpascal`
    size_gb: int | None

    @property
    def text(self) -> str:
        """One string for both: `v10032gb`."""
        return self.model if self.size_gb is None else f"{self.model}{self.size_gb}gb"


def gpu_key(name: str) -> GpuKey:
    """Take a GPU's name apart."""
    text = name.lower().replace("_", " ").replace("-", " ")
    sizes = _SIZE.findall(text)
    model = re.sub(r"[^a-z0-9]", "", _NOISE.sub("", _SIZE.sub(" ", text)))
    return GpuKey(model, int(sizes[0]) if sizes else None)


def instance_key(name: str) -> str:
    """Make an instance's name comparable: `ml.p3.2xlarge` to `p32xlarge`, `Standard_NC24s_v3` to `nc24sv3`."""
    text = name.strip().lower()
    prefix = _PROVIDER.match(text)
    return re.sub(r"[^a-z0-9]", "", text[prefix.end() :] if prefix else text)


def nearest(key: str, names: Mapping[str, str], limit: int = 5, cutoff: float = 0.5) -> tuple[str, ...]:
    """Find the known names most like one that is not known.

    Args:
        names: every known key and the name it stands for; several keys may stand for one name.
        cutoff: how alike they must be, from 0 to 1, as `difflib` counts.

    Returns:
        Names, best first, each once; empty when none is like it.
    """
    close = difflib.get_close_matches(key, names, n=4 * limit, cutoff=cutoff)
    return tuple(dict.fromkeys(names[match] for match in close))[:limit]


CAPABILITIES = {"bf16": (8, 0), "fp8": (8, 9)}
"""The first compute capability whose tensor cores multiply numbers of a type."""
_AMDS = {"bf16": ("CDNA2", "CDNA3", "CDNA4", "RDNA3", "RDNA4"), "fp8": ("CDNA3", "CDNA4", "RDNA4")}
"""AMD's architectures whose matrix cores do."""


_RESIDENT_THREADS = {
    (7, 5): 1024,
    (8, 6): 1536,
    (8, 7): 1536,
    (8, 9): 1536,
    (11, 0): 1536,
    (12, 0): 1536,
    (12, 1): 1536,
}
"""Per multiprocessor, where not 2048: "Technical Specifications per Compute Capability" in
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities."""

_TYPICAL_CARDS = {
    (7, 0): "V100 16GB",
    (7, 5): "T4",
    (8, 0): "A100 80GB",
    (8, 6): "RTX 3090",
    (8, 9): "RTX 4090",
    (9, 0): "H100 80GB",
    (10, 0): "B200",
    (10, 3): "B300",
    (12, 0): "RTX 5090",
}
"""A recording is for all cards of a compute capability. What Inductor and libraries of kernels decide by the number of
multiprocessors, buffers of a few MB, is that of this card of the catalog."""


class Multiprocessors(NamedTuple):
    """What CUDA divides work among: how many there are on a card, and the threads that one holds at a time."""

    number: int
    threads: int


def resident_threads(capability: tuple[int, int]) -> int:
    """The most threads that a multiprocessor of this compute capability holds at a time."""
    return _RESIDENT_THREADS.get(capability, 2048)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as software sees it; a card with two of them (K80, MI250X) counts as two.

    Attributes:
        class_gb: the marketing size, which tells cards of one family apart; not a capacity.
        memory_bytes: what the driver reports as total.
        context_bytes: what the CUDA context and libraries take of it before the first tensor.
        compute_capability: major and minor; None for AMD.
        architecture: the chip's family, with the gfx name for AMD.
        multiprocessors: streaming multiprocessors, or compute units for AMD.
        source: where `memory_bytes` comes from.
        context_source: where `context_bytes` comes from.
        estimated: the fields that are not figures printed for this card.
        bf16_tflops, fp16_tflops, fp32_tflops: the peak of dense matrix products of a type, in 10^12 FLOP/s; None where
            it is not known.
        tflops_source: where these come from.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    class_gb: int
    memory_bytes: int
    context_bytes: int
    compute_capability: tuple[int, int] | None
    architecture: str
    multiprocessors: int
    source: str
    context_source: str
    estimated: tuple[str, ...] = ()
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp32_tflops: float | None = None
    tflops_source: str = ""

    @property
    def usable_bytes(self) -> int:
        """What is left for the caching allocator of one process that has the card to itself."""
        return self.memory_bytes - self.context_bytes

    def multiplies(self, kind: str) -> bool:
        """Whether its tensor or matrix cores multiply numbers of a type: `bf16` or `fp8`."""
        if self.compute_capability is None:
            return self.architecture.startswith(_AMDS[kind])
        return self.compute_capability >= CAPABILITIES[kind]

    def peak_flops(self, precision: str) -> float | None:
        """The most FLOP/s of matrix products in a precision by Lightning's name, without TF32; None if not known."""
        if precision == "fp32":
            tflops = self.fp32_tflops
        else:
            tflops = self.bf16_tflops if precision.startswith("bf16") else self.fp16_tflops
        return None if tflops is None else 1e12 * tflops


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalog, by generation."""
    gpus = []
    for table in read_tables("gpus.toml", "gpu"):
        capability = None
        if table.get("compute_capability"):
            major, minor = table["compute_capability"].split(".")
            capability = int(major), int(minor)
        lists = {field: tuple(table.get(field, ())) for field in ("aliases", "estimated")}
        gpus.append(Gpu(**{**table, **lists, "compute_capability": capability}))
    return tuple(gpus)


def find_gpu(name: str, way_out: str = "") -> Gpu:
    """Find a GPU by a name as typed, or as a driver prints it.

    Case, spaces, hyphens, underscores and vendor words do not matter. A memory size must be the card's own. A family
    without a size means its smaller card (`V100` 16 GB, `A100` 40 GB), `H100` the SXM card, `Titan X` the Pascal one.

    Args:
        name: `v100-32gb`, `Tesla T4`, `NVIDIA GeForce RTX 3090`, `titan x maxwell`.
        way_out: the option that takes the memory of a card that is not in the catalog, which the error then tells.

    Raises:
        UnknownName: there is no such GPU; after a wrong size, the cards of its family are named, and for another name
            with a size those of that size with a name like it.
    """
    key = gpu_key(name)
    known = _gpus_by_key()
    # Without board and memory type: `NVIDIA H100 80GB HBM3` and `V100-SXM2-32GB` lose their tails.
    bare = GpuKey(_FORM.sub("", key.model), key.size_gb)
    for attempt in (key, bare):
        if attempt.text in known:
            return known[attempt.text]
    if key.size_gb is not None:  # the cards whose name differs from this one in the size only
        models = {key.model, bare.model}
        family = [gpu.name for gpu in all_gpus() if {gpu_key(each).model for each in (gpu.name, *gpu.aliases)} & models]
        if family:
            raise _unknown_gpu(name, family, way_out)
    of_size = {text: gpu.name for text, gpu in known.items() if key.size_gb in (None, gpu.class_gb)}
    like = nearest(key.text if key.size_gb is None else key.model, of_size, cutoff=_ALIKE)
    raise _unknown_gpu(name, like, way_out)


def _unknown_gpu(name: str, matches: Sequence[str], way_out: str) -> UnknownName:
    """The error; with an option as the way out, what to type for any card, or for the instance that was meant."""
    if not way_out:
        return UnknownName("GPU", name, matches)
    with suppress(UnknownName):
        found = find_instance(name)
        return UnknownName("GPU", name, (), f"{found.name} is an instance, of {found.num_gpus} x {found.gpu.name}.")
    size_gb = gpu_key(name).size_gb or 16
    hint = f"For any other card of {size_gb} GiB: {way_out} {size_gb}GiB. `batchfinder gpus` lists all."
    return UnknownName("GPU", name, matches, hint)


_ALIKE = 0.65
"""How alike a GPU's name must be to be named for another: `m2-max` is not to be answered with `MI250X`."""


_OLDEST = (7, 5)
"""The compute capability that PyTorch's builds for CUDA 13 begin with."""


def smallest_gpus(
    usable_bytes: int, *, bf16: bool = False, oldest: tuple[int, int] = _OLDEST, communicators: int = 0, count: int = 3
) -> list[Gpu]:
    """The GPUs of the catalogue with the least memory of those that have so much for the allocator, whole ones.

    Args:
        bf16: whether they need units for bf16.
        oldest: the least compute capability.
        communicators: of NCCL, in which each takes part.

    Returns:
        At most `count`, the smallest first.
    """
    enough = [
        gpu
        for gpu in all_gpus()
        if device_for(gpu).among_others(communicators).usable_bytes >= usable_bytes
        and "MIG" not in gpu.name
        and (gpu.compute_capability or oldest) >= oldest
        and (gpu.multiplies("bf16") or not bf16)
    ]
    return sorted(enough, key=lambda gpu: (gpu.usable_bytes, gpu.name))[:count]


@cache
def _gpus_by_key() -> dict[str, Gpu]:
    """Every key a GPU is found by: each name and alias, as it stands and with the card's size."""
    known: dict[str, Gpu] = {}
    for gpu in all_gpus():
        for name in (gpu.name, *gpu.aliases):
            key = gpu_key(name)
            known[key.text] = gpu
            known.setdefault(GpuKey(key.model, gpu.class_gb).text, gpu)
    return known


@dataclass(frozen=True, slots=True)
class Instance:
    """A rented machine and the GPUs in it.

    Attributes:
        provider: `AWS`, `Azure` or `Google Cloud`.
        num_gpus: how many GPUs a process sees there.
    """

    name: str
    aliases: tuple[str, ...]
    provider: str
    gpu: Gpu
    num_gpus: int
    source: str


@cache
def all_instances() -> tuple[Instance, ...]:
    """Every instance of the catalog, by provider."""
    return tuple(
        Instance(**{**table, "aliases": tuple(table.get("aliases", ())), "gpu": find_gpu(table["gpu"])})
        for table in read_tables("instances.toml", "instance")
    )


def find_instance(name: str) -> Instance:
    """Find an instance by a name as typed.

    Case and punctuation do not matter; `ml.`, `Standard_` and the provider's name may be in front or missing.

    Args:
        name: `ml.p3.16xlarge`, `NC24s v3`, `Standard_ND96asr_v4`, `a2-highgpu-8g`.

    Raises:
        UnknownName: there is no such instance.
    """
    key = instance_key(name)
    known = {instance_key(each): found for found in all_instances() for each in (found.name, *found.aliases)}
    if key not in known:
        raise UnknownName("instance", name, nearest(key, {text: found.name for text, found in known.items()}))
    return known[key]


NVLINK_COMMUNICATOR_BYTES = 688 * MIB
"""What one communicator of NCCL takes of each of more than two A100s with NVLink, outside the allocator.

Measured: https://github.com/NVIDIA/nccl/issues/964 (544 MB in a group of two). RCCL takes 0.65 GiB of an MI250X,
https://github.com/Lumi-supercomputer/LUMI-AI-Guide/issues/111. It is buffers of 4, 4.7 and 0.5 MiB, one for each
protocol, of every connection of every channel (https://github.com/NVIDIA/nccl/blob/v2.27.5-1/src/init.cc,
`DEFAULT_BUFFSIZE`, `DEFAULT_LL128_BUFFSIZE`, `DEFAULT_LL_BUFFSIZE`), and does not grow beyond two nodes
(https://github.com/NVIDIA/nccl/issues/986).
"""
PCIE_COMMUNICATOR_BYTES = NVLINK_COMMUNICATOR_BYTES // 12
"""The same without NVLink: 2 channels in place of 24, and the memory is linear in them (the same issue)."""
_NVLINK = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3))  # P100, V100, A100, H100 and H200, B200, B300

DEFAULT_COMPUTE_CAPABILITY = (8, 0)
"""An A100's: assumed for a budget without a GPU, and for AMD GPUs."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a simulation needs to know of a device.

    Attributes:
        total_bytes: what an out-of-memory message calls the total capacity.
        usable_bytes: what the caching allocator can reserve.
        compute_capability: decides which kernels the recorded step would run.
        assumed_capability: whether that is the default, as no NVIDIA GPU was named.
        context_bytes: what the CUDA context and libraries take beside what is usable; 0 where no card was named.
        communicator_bytes: what a communicator of NCCL takes besides, on several GPUs; 0 likewise.
        spare_bytes: what the card has beside a budget and the context.
        multiprocessors: how many it has; 0 where that is not known.
    """

    name: str
    total_bytes: int
    usable_bytes: int
    compute_capability: tuple[int, int]
    assumed_capability: bool = False
    context_bytes: int = 0
    communicator_bytes: int = 0
    spare_bytes: int = 0
    multiprocessors: int = 0

    @property
    def reduces_on(self) -> Multiprocessors:
        """What reductions are divided among; where it is not known that of `typical_gpu`."""
        number = self.multiprocessors or typical_gpu(self.compute_capability).multiprocessors
        return Multiprocessors(number, resident_threads(self.compute_capability))

    @property
    def has_bf16(self) -> bool:
        """Whether its tensor cores multiply bf16; so it is taken where the capability is assumed."""
        return self.compute_capability >= CAPABILITIES["bf16"]

    def among_others(self, communicators: int) -> Device:
        """The same as one of several GPUs that train together, with so many communicators of NCCL."""
        taken = communicators * self.communicator_bytes
        usable = max(1, self.usable_bytes - max(0, taken - self.spare_bytes))
        return replace(self, usable_bytes=usable, context_bytes=self.context_bytes + taken)

    def with_headroom(self, reserve_bytes: int) -> Device:
        """The same with less of it usable, at least one byte."""
        return replace(self, usable_bytes=max(1, self.usable_bytes - reserve_bytes))


@dataclass(frozen=True, slots=True)
class Price:
    """What an instance costs.

    Attributes:
        usd_per_hour: on demand; None where only a spot price is known.
        spot_usd_per_hour: for one that may be taken back; None where none is known.
        region: that it is for; empty where it is the same in all, or not said.
        as_of: when it was so; None where that is not said.
        source: where it is from.
    """

    usd_per_hour: float | None
    spot_usd_per_hour: float | None
    region: str
    as_of: date | None
    source: str

    @property
    def words(self) -> str:
        """Where and when it is so: `in us-east-1 as of 2026-07-20`, or where it is from."""
        where = f"in {self.region} " if self.region else ""
        return f"{where}as of {self.as_of}" if self.as_of is not None else f"{where}by {self.source}"

    def times(self, count: int) -> Price:
        """The price of so many of them."""
        on_demand, spot = self.usd_per_hour, self.spot_usd_per_hour
        return replace(
            self,
            usd_per_hour=None if on_demand is None else count * on_demand,
            spot_usd_per_hour=None if spot is None else count * spot,
        )


@dataclass(frozen=True, slots=True)
class Card:
    """A device as tables show it.

    Attributes:
        name: as it is shown: an instance's card by the instance's name, a real one by its short name.
        count: how many of it train side by side.
        price: of the instances that these are in; None where they are in none, or it is not known.
    """

    device: Device
    name: str
    count: int = 1
    price: Price | None = None


@cache
def typical_gpu(capability: tuple[int, int]) -> Gpu:
    """A GPU of a compute capability, for what depends on more of it: an A100 where the catalogue has none."""
    if capability in _TYPICAL_CARDS:
        return find_gpu(_TYPICAL_CARDS[capability])
    known = (gpu for gpu in all_gpus() if gpu.compute_capability == capability)
    return next(known, None) or find_gpu(_TYPICAL_CARDS[DEFAULT_COMPUTE_CAPABILITY])


def device_for(gpu: Gpu, context_bytes: int | None = None) -> Device:
    """A whole card with nothing else on it.

    Args:
        context_bytes: what the CUDA context and libraries take of it; None for what the catalog says, of today's CUDA.

    Raises:
        InvalidValue: the context is negative or leaves nothing.
    """
    capability = gpu.compute_capability
    device = Device(
        gpu.name,
        gpu.memory_bytes,
        gpu.usable_bytes,
        capability or DEFAULT_COMPUTE_CAPABILITY,
        assumed_capability=capability is None,
        context_bytes=gpu.context_bytes,
        communicator_bytes=(
            NVLINK_COMMUNICATOR_BYTES if capability is None or capability in _NVLINK else PCIE_COMMUNICATOR_BYTES
        ),
        multiprocessors=gpu.multiprocessors,
    )
    if context_bytes is None:
        return device
    if not 0 <= context_bytes < gpu.memory_bytes:
        expected = f"less than the {format_bytes(gpu.memory_bytes)} of {gpu.name}"
        raise InvalidValue("context", format_bytes(context_bytes), expected)
    name = f"{gpu.name}, {format_bytes(context_bytes)} context"
    return replace(device, name=name, usable_bytes=gpu.memory_bytes - context_bytes, context_bytes=context_bytes)


def device_with_budget(budget_bytes: int, gpu: Gpu | None = None, context_bytes: int | None = None) -> Device:
    """A device of which the caching allocator of one process may reserve so many bytes in all.

    It is the limit of `torch.cuda.set_per_process_memory_fraction`: the CUDA context is not counted
    (`CUDACachingAllocator.cpp`: `allowed_memory_maximum`). On a named card the context still has to fit beside it, so
    no more than the card's own usable bytes are given out.

    Args:
        gpu: the card it is a part of; None for no card in particular.
        context_bytes: as in `device_for`.

    Raises:
        InvalidValue: the budget is not positive, or the context leaves nothing.
    """
    if budget_bytes <= 0:
        raise InvalidValue("budget", budget_bytes, "a positive number of bytes")
    budget = f"{format_bytes(budget_bytes)} budget"
    if gpu is not None and budget_bytes > gpu.memory_bytes:
        budget += " (more than it has)"
    if gpu is None:
        return Device(budget, budget_bytes, budget_bytes, DEFAULT_COMPUTE_CAPABILITY, assumed_capability=True)
    card = device_for(gpu, context_bytes)
    return replace(
        card,
        name=f"{card.name}, {budget}",
        total_bytes=min(budget_bytes, card.total_bytes),
        usable_bytes=min(budget_bytes, card.usable_bytes),
        spare_bytes=max(0, card.usable_bytes - budget_bytes),
    )


def without_bf16(precision: str, devices: Iterable[Device]) -> tuple[str, ...]:
    """The note on GPUs that are asked for bf16 and have no units for it, if there are any."""
    lacking = dict.fromkeys(device.name.partition(",")[0] for device in devices if not device.has_bf16)
    if not precision.startswith("bf16") or not lacking:
        return ()
    return (
        f"no bf16 units and no fused attention in bf16: {', '.join(lacking)}; --precision 16-mixed, fp16 with a loss "
        "scale, is for such GPUs",
    )


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """The fraction for `torch.cuda.set_per_process_memory_fraction` that comes to a limit to the byte.

    The allocator multiplies the fraction by the card's memory and drops what is no whole byte
    (`DeviceCachingAllocator::setMemoryFraction`). The quotient of the two, rounded down as floating-point numbers often
    are, comes to a byte less, and a segment that just fits is refused.

    Args:
        total_bytes: the real device's total memory, as `torch.cuda.get_device_properties` has it.
    """
    if limit_bytes >= total_bytes:
        return 1.0
    fraction = max(0.0, limit_bytes / total_bytes)
    return math.nextafter(fraction, 1.0) if int(fraction * total_bytes) < limit_bytes else fraction
