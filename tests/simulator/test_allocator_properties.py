"""The allocator against a slow, obvious one on random requests, and the invariants that hold for any requests.

The reference keeps each segment as a list of [size, state] cells and looks at all of them every time. It was written
from the rules and shares nothing with the package but the settings.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.simulator.alloc_conf import BEFORE_2_12, AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.units import KIB, MIB

FREE, GAP = "free", "gap"
TOP = 1 << 52


def up(number: int, step: int) -> int:
    """The next multiple."""
    return (number + step - 1) // step * step


@dataclasses.dataclass
class Cells:
    """A segment, or a range of an expandable one."""

    address: int
    small: bool
    cells: list[list[Any]]  # [size, FREE | GAP | token]
    done: bool = False

    def tidy(self) -> None:
        merged: list[list[Any]] = []
        for size, state in self.cells:
            if merged and state in (FREE, GAP) and merged[-1][1] == state:
                merged[-1][0] += size
            elif size:
                merged.append([size, state])
        self.cells = merged

    def where(self, index: int) -> int:
        return self.address + sum(int(size) for size, _ in self.cells[:index])

    def fill(self, index: int, size: int, token: int, least: int) -> None:
        left = self.cells[index][0] - size
        if left >= least:
            self.cells[index : index + 1] = [[size, token], [left, FREE]]
        else:
            self.cells[index][1] = token


class Full(Exception):
    pass


class Reference:
    def __init__(self, memory: DeviceMemory, conf: AllocatorSettings) -> None:
        self.memory, self.conf = memory, conf
        self.segments: list[Cells] = []
        self.top = 0  # of expandable ranges, and of segments by age
        self.reservations: list[tuple[int, int]] = []
        self.max_allocated = self.max_reserved = self.retries = 0

    @property
    def allocated(self) -> int:
        return sum(size for s in self.segments for size, state in s.cells if state not in (FREE, GAP))

    @property
    def reserved(self) -> int:
        return sum(size for s in self.segments for size, state in s.cells if state != GAP)

    def rounded(self, nbytes: int) -> int:
        divisions = self.conf.roundup_power2_divisions
        parts = divisions[min(max(nbytes // MIB, 1).bit_length() - 1, 15)] if divisions else 0
        if parts <= 1 or nbytes <= 512 * parts:
            return up(nbytes, 512)
        power = 512
        while power * 2 <= nbytes:
            power *= 2
        return min(power + power * k // parts for k in range(parts + 1) if power + power * k // parts >= nbytes)

    def allocate(self, token: int, nbytes: int) -> None:
        size = self.rounded(nbytes)
        small = size <= MIB
        found = self.best(size, small) or self.grow(size, small)
        if not found and self.conf.max_split_size_bytes and self.release_oversize(size, small):
            found = self.grow(size, small)
        if not found:
            self.release()
            self.retries += 1
            found = self.grow(size, small)
        if not found:
            raise Full
        segment, index = found
        limit = self.conf.max_split_size_bytes or 10**18
        least = 512 if small or self.conf.expandable_segments else (MIB + 512 if size < limit else 10**18)
        segment.fill(index, size, token, least)
        self.max_allocated = max(self.max_allocated, self.allocated)

    def best(self, size: int, small: bool) -> tuple[Cells, int] | None:
        rows = []
        for segment in self.segments:
            for i, (length, state) in enumerate(segment.cells):
                if segment.small == small and state == FREE and length >= size:
                    after = segment.cells[i + 1] if i + 1 < len(segment.cells) else [0, None]
                    could_be = length + (after[0] if after[1] == GAP else 0)
                    rows.append((length, segment.where(i), could_be, segment, i))
        rows.sort(key=lambda row: row[:2])
        if not rows:
            return None
        row = rows[0]
        for other in rows[1:]:
            if other[2] >= row[2] or not self.conf.expandable_segments:
                break
            row = other
        limit = self.conf.max_split_size_bytes
        if limit and (
            (size < limit and row[0] >= limit)
            or (size >= limit and row[0] >= size + self.conf.max_non_split_rounding_bytes)
        ):
            return None
        return row[3], row[4]

    def grow(self, size: int, small: bool) -> tuple[Cells, int] | None:
        if size <= MIB:
            segment_bytes = 2 * MIB
        elif size < 10 * MIB:
            segment_bytes = self.conf.large_segment_bytes
        else:
            segment_bytes = up(size, 2 * MIB)
        if self.memory.allowed_bytes is not None and self.reserved + segment_bytes > self.memory.allowed_bytes:
            return None
        if self.conf.expandable_segments:
            return self.grow_range(size, small)
        if self.reserved + segment_bytes > self.memory.usable_bytes:
            return None
        self.segments.append(Cells(self.place(segment_bytes), small, [[segment_bytes, FREE]]))
        self.max_reserved = max(self.max_reserved, self.reserved)
        return self.segments[-1], 0

    def place(self, nbytes: int) -> int:
        """Where cudaMalloc puts a segment: in a reservation in use, from below; else in a new one, from above.

        By age it is where all that are younger lie above it.
        """
        if not self.conf.by_address:
            self.top += nbytes
            return self.top - nbytes
        used = [(s.address, s.where(len(s.cells))) for s in self.segments]
        self.reservations = [r for r in self.reservations if any(r[0] <= start < r[1] for start, _ in used)]
        for low, high in sorted(self.reservations):
            for start in sorted([low, *(end for _, end in used if low < end <= high)]):
                if start + nbytes <= high and not any(a < start + nbytes and start < b for a, b in used):
                    return start
        bound = TOP
        for low, high in sorted(self.reservations, reverse=True):
            if bound - high >= up(nbytes, 32 * MIB):
                break
            bound = low
        self.reservations.append((bound - up(nbytes, 32 * MIB), bound))
        return self.reservations[-1][0]

    def grow_range(self, size: int, small: bool) -> tuple[Cells, int] | None:
        page = 2 * MIB if small else self.conf.large_segment_bytes
        segment, start = self.lowest(size, small, page)
        while True:
            # Map, gap by gap, as much as is missing; then the cell at `start` is one free block that is large enough.
            length = segment.cells[start][0] if segment.cells[start][1] == FREE else 0
            if length >= size:
                return segment, start
            gap = start if length == 0 else start + 1
            wanted = up(min(size - length, segment.cells[gap][0]), page)
            if self.reserved + wanted > self.memory.usable_bytes:
                return None
            segment.cells[gap : gap + 1] = [[wanted, FREE], [segment.cells[gap][0] - wanted, GAP]]
            segment.tidy()
            self.max_reserved = max(self.max_reserved, self.reserved)

    def lowest(self, size: int, small: bool, page: int) -> tuple[Cells, int]:
        for segment in sorted(self.segments, key=lambda s: s.address):
            for i, (_, state) in enumerate(segment.cells):
                if segment.small != small or state != GAP:
                    continue
                start = i - 1 if i and segment.cells[i - 1][1] == FREE else i
                room = 0
                for length, other in segment.cells[start:]:
                    if other not in (FREE, GAP):
                        break
                    room += length
                if room >= size:
                    return segment, start
        total = self.memory.total_bytes
        length = up(max(1, total + total // 8), page)
        address = up(self.top, page)
        self.top = address + length
        self.segments.append(Cells(address, small, [[length, GAP]]))
        return self.segments[-1], 0

    def free(self, token: int) -> None:
        for segment in self.segments:
            for cell in segment.cells:
                if cell[1] == token:
                    cell[1] = FREE
            segment.tidy()

    def release(self) -> None:
        for segment in self.segments:
            if not self.conf.expandable_segments:
                continue
            page = 2 * MIB if segment.small else self.conf.large_segment_bytes
            cells: list[list[Any]] = []
            position = segment.address
            for length, state in segment.cells:
                start, end = up(position, page), (position + length) // page * page
                if state == FREE and end > start:
                    cells += [[start - position, FREE], [end - start, GAP], [position + length - end, FREE]]
                else:
                    cells.append([length, state])
                position += length
            was_mapped = any(state != GAP for _, state in segment.cells)
            segment.cells = cells
            segment.tidy()
            segment.done = was_mapped and len(segment.cells) == 1 and segment.cells[0][1] == GAP
        self.segments = [s for s in self.segments if not (s.done or (len(s.cells) == 1 and s.cells[0][1] == FREE))]

    def release_oversize(self, size: int, small: bool) -> bool:
        if self.conf.expandable_segments:
            return False
        limit = self.conf.max_split_size_bytes or 0
        wanted = max(size, limit)
        whole = [
            (s.cells[0][0], s.address, s)
            for s in self.segments
            if s.small == small and len(s.cells) == 1 and s.cells[0][1] == FREE and s.cells[0][0] >= limit
        ]
        whole.sort(key=lambda row: row[:2])
        enough = [row for row in whole if row[0] >= wanted]
        if enough:
            self.segments.remove(enough[0][2])
            return True
        released = 0
        while whole and released < wanted:
            length, _, segment = whole.pop()
            released += length
            self.segments.remove(segment)
        return released >= wanted

    def picture(self) -> list[tuple[int, int, bool]]:
        rows = []
        for segment in self.segments:
            for i, (length, state) in enumerate(segment.cells):
                if state != GAP:
                    rows.append((segment.where(i), length, state == FREE))
        return sorted(rows)


REQUESTS = st.one_of(
    st.sampled_from([1, 512, 513, MIB - 512, MIB, MIB + 1, 9 * MIB, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 20 * MIB]),
    st.integers(1, 40).map(lambda k: k * MIB),
    st.integers(1, 2000).map(lambda k: k * KIB),
    st.integers(1, 45 * MIB),
)
EVENT = st.one_of(
    REQUESTS.map(lambda nbytes: ("allocate", nbytes)),
    REQUESTS.map(lambda nbytes: ("allocate", nbytes)),
    REQUESTS.map(lambda nbytes: ("allocate", nbytes)),
    st.integers(0, 30).map(lambda which: ("free", which)),
    st.integers(0, 30).map(lambda which: ("free", which)),
    st.sampled_from([("empty_cache", 0), ("reset_peak", 0)]),
)
# Left to itself, Hypothesis makes lists of about five; what matters happens later.
EVENTS = st.integers(1, 50).flatmap(lambda length: st.lists(EVENT, min_size=length, max_size=length))
# Weights by repetition: the default rules are what almost everyone runs.
SETTINGS = st.sampled_from(
    [
        AllocatorSettings(),
        BEFORE_2_12,
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(roundup_power2_divisions=(4,) * 16),
        AllocatorSettings(by_address=True, roundup_power2_divisions=(0, 2, 8, 1, 4, *[2] * 11)),
        AllocatorSettings(max_split_size_bytes=20 * MIB),
        AllocatorSettings(by_address=True, max_split_size_bytes=24 * MIB, max_non_split_rounding_bytes=4 * MIB),
        AllocatorSettings(large_segment_bytes=12 * MIB),
        AllocatorSettings(expandable_segments=True, large_segment_bytes=12 * MIB, max_split_size_bytes=14 * MIB),
        AllocatorSettings(expandable_segments=True, roundup_power2_divisions=(2,) * 16),
    ]
)
MEMORIES = st.builds(
    lambda usable, extra, fraction: DeviceMemory(
        usable + extra, usable, None if fraction is None else usable * fraction // 100
    ),
    usable=st.one_of(st.integers(0, 160 * MIB), st.integers(0, 160).map(lambda k: k * MIB)),
    extra=st.integers(0, 30 * MIB),
    fraction=st.one_of(st.none(), st.none(), st.integers(0, 120)),
)


def check(allocator: CachingAllocator, live: dict[int, Block], requests: dict[int, int]) -> None:
    """What must hold after any event."""
    segments = allocator.segments()
    assert allocator.allocated == sum(block.size for block in live.values()) <= allocator.max_allocated
    assert allocator.requested == sum(requests[token] for token in live) <= allocator.allocated
    assert allocator.reserved == sum(segment.size_bytes for segment in segments) <= allocator.max_reserved
    assert allocator.reserved <= allocator.memory.usable_bytes
    end = 0
    seen = {}
    for segment in segments:
        assert end <= segment.address
        end = segment.address
        for block, following in zip(segment.blocks, [*segment.blocks[1:], None], strict=True):
            assert block.address == end
            assert block.size_bytes > 0
            assert not (block.free and following is not None and following.free)
            end += block.size_bytes
            seen[block.address] = block
        assert end == segment.address + segment.size_bytes
    assert sorted((block.address, block.size, requests[token]) for token, block in live.items()) == sorted(
        (block.address, block.size_bytes, block.requested_bytes) for block in seen.values() if not block.free
    )
    assert all(block.requested_bytes == 0 for block in seen.values() if block.free)
    listed = [block for pool in allocator._default_pools for block in pool]
    assert sorted((block.address, block.size) for block in listed) == sorted(
        (block.address, block.size_bytes) for block in seen.values() if block.free
    )
    for pool in allocator._default_pools:
        order = [(block.size, block.address) for block in pool]
        assert order == sorted(order)
        assert len(pool.blocks) == len(order)
        assert all(block.pool is pool and block.free for block in pool)


@pytest.mark.parametrize("examples", [300, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_agrees_with_the_reference(examples: int) -> None:
    """For random requests, memories and settings; see `agrees`."""
    settings(max_examples=examples, deadline=None, derandomize=True)(given(EVENTS, MEMORIES, SETTINGS)(agrees))()


def agrees(events: list[tuple[str, int]], memory: DeviceMemory, conf: AllocatorSettings) -> None:
    """After every event both have the same counters, the same blocks at the same addresses, and fail at the same."""
    allocator, reference = CachingAllocator(memory, conf), Reference(memory, conf)
    live: dict[int, Block] = {}
    requests: dict[int, int] = {}
    for token, (what, argument) in enumerate(events):
        if what == "allocate":
            requests[token] = argument
            try:
                reference.allocate(token, argument)
            except Full:
                with pytest.raises(SimulatedOutOfMemory) as caught:
                    allocator.allocate(argument)
                assert caught.value.allocated_bytes == reference.allocated
                assert caught.value.reserved_bytes == reference.reserved
            else:
                block = allocator.allocate(argument)
                assert block is not None
                live[token] = block
        elif what == "free" and live:
            token = list(live)[argument % len(live)]
            reference.free(token)
            allocator.free(live.pop(token))
        elif what == "empty_cache":
            reference.release()
            allocator.empty_cache()
        elif what == "reset_peak":
            reference.max_allocated, reference.max_reserved = reference.allocated, reference.reserved
            allocator.reset_peak()
        check(allocator, live, requests)
        assert (allocator.allocated, allocator.reserved) == (reference.allocated, reference.reserved)
        assert (allocator.max_allocated, allocator.max_reserved) == (reference.max_allocated, reference.max_reserved)
        assert allocator.num_alloc_retries == reference.retries
        blocks = [block for segment in allocator.segments() for block in segment.blocks]
        assert reference.picture() == [(block.address, block.size_bytes, block.free) for block in blocks]
    for block in live.values():
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.requested, allocator.reserved, allocator.segments()) == (0, 0, 0, ())
