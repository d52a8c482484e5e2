"""The scratch memory of reductions, beside what PyTorch's CUDA build asked its allocator for."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch

from batchfinder.devices import Multiprocessors, device_for, find_gpu, resident_threads
from batchfinder.recording.kernel_memory import aten
from batchfinder.recording.reductions import reductions_of
from batchfinder.simulator.reductions import Reduction

T4, A100, H100 = (device_for(find_gpu(name)).reduces_on for name in ("T4", "A100 80GB", "H100 80GB"))
TOKENS = (768, 1)
CHANNELS_LAST = (802_816, 1, 14_336, 256)
HUGE = (161_480_704, 19_712, 77, 1)


def floats(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], half: bool = False) -> Reduction:
    """A sum of fp32, or of a half type."""
    width = 2 if half else 4
    return Reduction.of(shape, strides, dims, offset=0, element_bytes=width, partial_bytes=4, separate_sums=half)


@pytest.mark.parametrize(
    ("shape", "strides", "dims", "on_t4", "on_a100", "on_h100"),
    [
        ((1024, 768), TOKENS, (0,), 6_291_480, 6_291_480, 6_291_480),
        ((1024, 3072), (3072, 1), (0,), 22_020_192, 25_165_920, 25_165_920),
        ((8192, 3072), (3072, 1), (0,), 22_020_192, 113_246_304, 138_412_128),
        ((8192, 768), TOKENS, (0,), 21_233_688, 50_331_672, 50_331_672),
        ((65536, 4096), (4096, 1), (0,), 134_217_856, 134_217_856, 138_412_160),
        ((8192, 1000), (1000, 1), (0,), 20_480_032, 65_536_032, 65_536_032),
        ((8192, 1001), (1001, 1), (0,), 384_512, 1_793_920, 2_178_304),  # odd widths are read one by one
        ((128, 768), TOKENS, (0,), 0, 0, 0),
        ((8192, 768), TOKENS, (), 324, 1732, 2116),
        ((30522, 768), TOKENS, (1,), 0, 0, 0),
        ((64, 256, 56, 56), (802_816, 3136, 56, 1), (0, 2, 3), 0, 3072, 4096),
        ((64, 256, 56, 56), CHANNELS_LAST, (0, 2, 3), 25_690_120, 113_246_216, 138_412_040),
        ((16, 8192, 256, 77), HUGE, (0, 1, 2), 10_092_556, 10_092_556, 10_092_556),  # 10 GB, in parts
    ],
)
def test_figures_of_pytorch(
    shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], on_t4: int, on_a100: int, on_h100: int
) -> None:
    """What `tensor.sum(dims)` of fp32 took besides its output on the CUDA build 2.13.0 (`requested_bytes`)."""
    reduction = floats(shape, strides, dims)
    assert [sum(reduction.scratch(card)) for card in (T4, A100, H100)] == [on_t4, on_a100, on_h100]


def test_halves_have_sums_of_their_own_where_they_are_reduced_in_parts() -> None:
    """Of 77 outputs in fp32, and parts twice as large as those of fp32."""
    in_parts = floats((16, 8192, 256, 77), HUGE, (0, 1, 2), half=True).scratch(A100)
    assert (in_parts.sums, sum(in_parts)) == (77 * 4, 20_185_408)
    assert floats((8192, 768), TOKENS, (0,), half=True).scratch(A100).sums == 0


def test_nothing_without_multiprocessors() -> None:
    """As of a PyTorch that had no such buffers; and nothing of a tensor without elements."""
    assert sum(floats((8192, 3072), (3072, 1), (0,)).scratch(Multiprocessors(0, 2048))) == 0
    assert sum(floats((0, 3072), (3072, 1), (0,)).scratch(A100)) == 0


def test_dimensions_are_merged() -> None:
    """Batch and tokens lie one after another, and are one dimension; a size of one is none."""
    merged = floats((8, 1, 128, 768), (98_304, 98_304, 768, 1), (0, 2))
    assert (merged.shape, merged.strides, merged.reduced) == ((1024, 768), (768, 1), 1)
    transposed = floats((768, 8, 128), (1, 98_304, 768), (1, 2))
    assert (transposed.shape, transposed.strides) == ((1024, 768), (768, 1))


REDUCED: dict[str, Callable[[torch.Tensor, list[int]], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "sum": lambda x, dims: (aten.sum.dim_IntList, (x, dims), {}),
    "sum in fp32": lambda x, dims: (aten.sum.dim_IntList, (x, dims), {"dtype": torch.float32}),
    "mean": lambda x, dims: (aten.mean.dim, (x, dims), {}),
    "norm": lambda x, dims: (aten.linalg_vector_norm.default, (x, 2, dims), {}),
    "maximum": lambda x, dims: (aten.amax.default, (x, dims), {}),
    "maximum and its place": lambda x, dims: (aten.max.dim, (x, dims[0]), {}),
    "product": lambda x, dims: (aten.prod.dim_int, (x, dims[0]), {}),
    "truth": lambda x, dims: (aten.any.dim, (x, dims[0]), {}),
    "variance": lambda x, dims: (aten.var.correction, (x, dims), {}),
}
PYTORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""2.11 makes truth values of all elements before it reduces these."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("seed", range(4))
def test_random_reductions(seed: int) -> None:
    """Of random shapes, layouts and types, some of more than 2 GiB: all bytes that a GPU's allocator was asked for."""
    numbers, properties = random.Random(seed), torch.cuda.get_device_properties(0)
    threads = resident_threads((properties.major, properties.minor))
    assert threads == properties.max_threads_per_multi_processor
    card = Multiprocessors(properties.multi_processor_count, threads)
    sizes = [1, 2, 3, 5, 8, 12, 31, 64, 77, 128, 384, 768, 1000, 1024, 3072, 4096, 8192, 30522]
    most = torch.cuda.mem_get_info()[0] // 16
    took_scratch = tried = 0
    while tried < 300:
        shape = [numbers.choice(sizes) for _ in range(numbers.randint(1, 4))]
        if not 1000 < prod(shape) < most:
            continue
        dtype = numbers.choice([torch.float32, torch.float16, torch.bfloat16])
        x = torch.empty(shape, device="cuda", dtype=dtype)
        layout = numbers.choice(["plain", "plain", "permuted", "sliced", "expanded"])
        if layout == "permuted":
            x = x.permute(numbers.sample(range(x.dim()), x.dim()))
        elif layout == "sliced":
            x = x[..., min(2, x.size(-1) - 1) :]
        elif layout == "expanded":
            x = x.narrow(0, 0, 1).expand(shape)
        dims = sorted(numbers.sample(range(x.dim()), numbers.randint(1, x.dim())))
        name = numbers.choice([name for name in REDUCED if name != "truth" or PYTORCH >= (2, 13)])
        func, args, kwargs = REDUCED[name](x, dims)
        [reduction] = reductions_of(func, args, kwargs)
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        output = func(*args, **kwargs)
        seen = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        seen -= sum(each.nbytes for each in (output if isinstance(output, tuple) else (output,)))
        assert sum(reduction.scratch(card)) == seen, (name, dtype, shape, x.stride(), dims, reduction)
        took_scratch, tried = took_scratch + (seen > 0), tried + 1
        del x, args, output
    assert took_scratch > 50
