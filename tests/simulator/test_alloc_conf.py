"""Tests of the settings text."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.units import MIB

GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        ("expandable_segments:False,", AllocatorSettings()),
        ("max_split_size_mb:20", AllocatorSettings(max_split_size_bytes=20 * MIB)),
        ("max_non_split_rounding_mb:25", AllocatorSettings(max_non_split_rounding_bytes=25 * MIB)),
        ("large_segment_size_mb:11", AllocatorSettings(large_segment_bytes=11 * MIB)),
        (
            "large_segment_size_mb:12 , max_split_size_mb: 12",
            AllocatorSettings(large_segment_bytes=12 * MIB, max_split_size_bytes=12 * MIB),
        ),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_power2_divisions=(4,) * 16)),
        ("backend:native,pinned_use_background_threads:True,release_lock_on_cudamalloc:True", AllocatorSettings()),
    ],
)
def test_modelled_settings_are_read(conf: str, expected: AllocatorSettings) -> None:
    """Every modelled setting is read, blanks do not count, and settings of host memory change nothing."""
    assert AllocatorSettings.parse(conf) == expected


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("garbage_collection_threshold:0.8", ("garbage_collection_threshold:0.8",)),
        ("per_process_memory_fraction:0.5,expandable_segments:True", ("per_process_memory_fraction:0.5",)),
        ("throw_on_cudamalloc_oom:True", ("throw_on_cudamalloc_oom:True",)),
        ("backend:cudaMallocAsync", ("backend:cudaMallocAsync",)),
        ("bogus:[1,2]", ("bogus:[1,2] (not a setting of torch 2.13)",)),
    ],
)
def test_what_is_not_modelled_is_listed(conf: str, expected: tuple[str, ...]) -> None:
    """A setting that would change the answer and is left out, or that is unknown, is named."""
    assert AllocatorSettings.parse(conf).unmodelled == expected


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (
            "expandable_segments:true",
            "PYTORCH_CUDA_ALLOC_CONF expandable_segments: invalid value 'true'; expected True or False.",
        ),
        (
            "max_split_size_mb:19",
            "PYTORCH_CUDA_ALLOC_CONF max_split_size_mb: invalid value '19'; expected a whole number of MiB, at least "
            "20.",
        ),
        (
            "large_segment_size_mb:25,max_split_size_mb:22",
            "PYTORCH_CUDA_ALLOC_CONF max_split_size_mb: invalid value '22'; expected a whole number of MiB, at least "
            "25.",
        ),
        (
            "max_non_split_rounding_mb:19",
            "PYTORCH_CUDA_ALLOC_CONF max_non_split_rounding_mb: invalid value '19'; "
            "expected a whole number of MiB, at least 20.",
        ),
        (
            "large_segment_size_mb:10",
            "PYTORCH_CUDA_ALLOC_CONF large_segment_size_mb: invalid value '10'; "
            "expected a whole number of MiB, at least 11.",
        ),
        (
            "roundup_power2_divisions:3",
            "PYTORCH_CUDA_ALLOC_CONF roundup_power2_divisions: invalid value '3'; "
            "expected powers of two, as in 4 or [64:8,256:4,>:1].",
        ),
        (
            "roundup_power2_divisions:[300:2]",
            "PYTORCH_CUDA_ALLOC_CONF roundup_power2_divisions: invalid value '300'; "
            "expected powers of two, as in 4 or [64:8,256:4,>:1].",
        ),
        (
            "expandable_segments",
            "PYTORCH_CUDA_ALLOC_CONF: invalid value 'expandable_segments'; "
            "expected key:value pairs such as expandable_segments:True,max_split_size_mb:128.",
        ),
        (
            "a:b:c",
            "PYTORCH_CUDA_ALLOC_CONF: invalid value 'a:b:c'; "
            "expected key:value pairs such as expandable_segments:True,max_split_size_mb:128.",
        ),
    ],
)
def test_what_pytorch_refuses_is_refused(conf: str, message: str) -> None:
    """A text that torch 2.13 raises on is refused with the value and what would do."""
    with pytest.raises(InvalidValue) as caught:
        AllocatorSettings.parse(conf)
    assert str(caught.value) == message


# What AcceleratorAllocatorConfig::roundup_power2_divisions of torch 2.13.0's libc10 answered, called by ctypes, for
# 512 B, 32 KiB, 512 KiB, 1 MiB, 2, 4, 64, 128, 256, 512 MiB, 1, 2, 8, 32, 64, 128 GiB, 256 MiB - 1 and 256 MiB + 1.
ASKED = [1 << power for power in (9, 15, 19, 20, 21, 22, 26, 27, 28, 29, 30, 31, 33, 35, 36, 37)]
ASKED += [256 * MIB - 1, 256 * MIB + 1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("4", [4] * 18),
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4, 8, 8, 8, 8, 8, 1, 1]),
        ("[64:8,256:4,1024:4,>:1]", [8] * 7 + [0, 4, 0, 4, 1, 1, 1, 1, 1, 0, 4]),
        ("[64:8,256:4]", [8] * 7 + [0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4]),
        ("[131072:2,>:1]", [2] * 18),
        ("[16384:2,32768:4]", [2] * 13 + [4, 4, 4, 2, 2]),
    ],
)
def test_divisions_are_those_of_torch(value: str, expected: list[int]) -> None:
    """The divisions for a size are the ones torch 2.13.0 looked up for it."""
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{value}")
    assert [settings.divisions(size) for size in ASKED] == expected


def test_environment(monkeypatch):
    """The newer of PyTorch's two variables wins, and an error names the one that was read."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert AllocatorSettings.from_environment() == AllocatorSettings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert AllocatorSettings.from_environment() == AllocatorSettings(expandable_segments=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")
    with pytest.raises(InvalidValue, match=r"^PYTORCH_ALLOC_CONF max_split_size_mb: "):
        AllocatorSettings.from_environment()


@pytest.mark.parametrize(("installed", "by_address"), [("2.11.0+cu130", True), ("2.12.0", False), ("3.0.0a1", False)])
def test_equal_free_blocks_are_chosen_as_the_installed_pytorch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, by_address: bool
) -> None:
    """Since 2.12 by age; with settings of the environment's, and without."""
    folder = tmp_path / f"torch-{installed}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for conf in ("", "max_split_size_mb:64"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
        assert AllocatorSettings.from_environment().by_address is by_address
