"""The caching allocator's settings, read from `PYTORCH_ALLOC_CONF` or `PYTORCH_CUDA_ALLOC_CONF`."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from batchfinder.errors import InvalidValue
from batchfinder.units import MIB

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CUBLAS_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"  # how large they are, which the allocator does not decide
"""The environment variables that PyTorch reads, in its order; the first that is set counts."""

_INTERVALS = 16  # one rounding division per power of two from 1 MiB to 32 GiB; AllocatorConfig.cpp
_FIRST_INTERVAL = 20  # log2 of 1 MiB

_MODELLED = frozenset(
    {
        "expandable_segments",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "roundup_power2_divisions",
    }
)
# Pinned host memory, locks, the capture of graphs: nothing that a training step takes from the device depends on these.
_HARMLESS = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
# These change what is taken or when it fails. The garbage collector runs only under a memory fraction.
_KNOWN_UNMODELLED = frozenset(
    {"garbage_collection_threshold", "per_process_memory_fraction", "throw_on_cudamalloc_oom"}
)
_OLDEST_SEGMENT_FIRST = 2, 12
"""The first PyTorch that takes the oldest of equal free blocks: on the CUDA stub 2.12.0 and 2.13.0 were seen to, and
2.6.0, 2.9.0 and 2.11.0 not."""
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What `PYTORCH_CUDA_ALLOC_CONF` (now `PYTORCH_ALLOC_CONF`) changes about the rules of the allocator.

    The names, limits and defaults are those of torch 2.13's `AcceleratorAllocatorConfig`:
    https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h

    Attributes:
        expandable_segments: grow one mapped range per pool instead of taking a new segment each time.
        roundup_power2_divisions: into how many steps each power of two is divided when rounding a request up, for
            [1 MiB, 2 MiB), [2 MiB, 4 MiB), ... from 32 GiB on; 0 or 1 rounds to 512 B only. Empty for that everywhere.
        max_split_size_bytes: blocks of at least this size are never split; None for no limit.
        max_non_split_rounding_bytes: how much larger than the request such a block may be.
        large_segment_bytes: the segment that a large request under 10 MiB takes, and the page of expandable segments.
        by_address: no setting but a rule of PyTorch before 2.12: of free blocks of one size it took that at the lowest
            address, wherever cudaMalloc had put it. Since then it takes the one in the oldest segment.
        unmodelled: the settings that were given and that the simulation leaves out, as they were written.
    """

    expandable_segments: bool = False
    roundup_power2_divisions: tuple[int, ...] = ()
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    by_address: bool = False
    unmodelled: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, torch_version: str | None = None) -> AllocatorSettings:
        """Read the settings that PyTorch would use in this process.

        Args:
            torch_version: such as `2.6.0`; None for the version that is installed.

        Raises:
            InvalidValue: PyTorch would refuse them as well.
        """
        given = next(((conf, name) for name in VARIABLES if (conf := os.environ.get(name))), None)
        settings = cls() if given is None else cls.parse(given[0], option=given[1])
        with contextlib.suppress(PackageNotFoundError):
            major, minor = map(int, (torch_version or version("torch")).split(".")[:2])
            settings = replace(settings, by_address=(major, minor) < _OLDEST_SEGMENT_FIRST)
        return settings

    @classmethod
    def parse(cls, conf: str, *, option: str = "PYTORCH_CUDA_ALLOC_CONF") -> AllocatorSettings:
        """Read `expandable_segments:True,max_split_size_mb:128`.

        What does not touch device memory is accepted; what does and is not modelled, and what is not known at all,
        is listed in `unmodelled`.

        Args:
            conf: comma-separated `key:value`; a value may be a list in brackets. Blanks do not count.

        Raises:
            InvalidValue: the text or one of its values is one that PyTorch refuses as well.
        """
        text = "".join(conf.split())
        values: dict[str, str] = {}
        unmodelled: list[str] = []
        position = 0
        while position < len(text):
            match = _PAIR.match(text, position)
            if match is None or (match.end() < len(text) and text[match.end()] != ","):
                expected = "key:value pairs such as expandable_segments:True,max_split_size_mb:128"
                raise InvalidValue(option, conf, expected)
            position = match.end() + 1
            key, value = match.groups()
            if key in _MODELLED:
                values[key] = value
            elif key in _KNOWN_UNMODELLED or (key == "backend" and value != "native"):
                unmodelled.append(f"{key}:{value}")
            elif key != "backend" and key not in _HARMLESS:
                unmodelled.append(f"{key}:{value} (not a setting of torch 2.13)")
        expandable = values.get("expandable_segments", "False")
        if expandable not in ("True", "False"):
            raise InvalidValue(f"{option} expandable_segments", expandable, "True or False")
        segment = _mebibytes(option, values, "large_segment_size_mb", least=11) or 20 * MIB
        least = segment // MIB
        # One number for all sizes, or `[64:8,256:4,>:1]` with the start of an interval in MiB. The first interval given
        # also holds below it, `>` holds above the last one, and intervals in between that are not named are not rounded
        # (seen by calling the parser of torch 2.13.0).
        rounding = values.get("roundup_power2_divisions", "")
        divisions: list[int] = []
        if rounding and not rounding.startswith("["):
            divisions = [_power_of_two(option, rounding)] * _INTERVALS
        elif rounding:
            divisions = [0] * _INTERVALS
            last = -1
            for pair in rounding[1:-1].split(","):
                start, _, number = pair.partition(":")
                steps = 0 if number == "0" else _power_of_two(option, number)
                if start == ">":
                    divisions[last + 1 :] = [steps] * (_INTERVALS - last - 1)
                    continue
                index = min(_power_of_two(option, start).bit_length() - 1, _INTERVALS - 1)
                if last < 0:
                    divisions[:index] = [steps] * index
                divisions[index] = steps
                last = index
        return cls(
            expandable_segments=expandable == "True",
            roundup_power2_divisions=tuple(divisions),
            max_split_size_bytes=_mebibytes(option, values, "max_split_size_mb", least),
            max_non_split_rounding_bytes=_mebibytes(option, values, "max_non_split_rounding_mb", least) or 20 * MIB,
            large_segment_bytes=segment,
            unmodelled=tuple(unmodelled),
        )

    def divisions(self, nbytes: int) -> int:
        """The rounding divisions for a request; `AcceleratorAllocatorConfig::roundup_power2_divisions`."""
        if not self.roundup_power2_divisions:
            return 0
        interval = nbytes.bit_length() - 1 - _FIRST_INTERVAL
        return self.roundup_power2_divisions[min(max(interval, 0), _INTERVALS - 1)]


DEFAULT_SETTINGS = AllocatorSettings()
BEFORE_2_12 = AllocatorSettings(by_address=True)
"""PyTorch's defaults before that version."""


def _mebibytes(option: str, values: dict[str, str], key: str, least: int) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise InvalidValue(f"{option} {key}", value, f"a whole number of MiB, at least {least}")
    return int(value) * MIB


def _power_of_two(option: str, value: str) -> int:
    number = int(value) if value.isdecimal() else 0
    if number.bit_count() != 1:
        name = f"{option} roundup_power2_divisions"
        raise InvalidValue(name, value, "powers of two, as in 4 or [64:8,256:4,>:1]")
    return number
