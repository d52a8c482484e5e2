"""The memory of one size, by kind."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from batchfinder.memory_use.breakdown import NAMES, Kinds, bytes_by_kind, estimate, kind_of
from batchfinder.simulator.alloc_conf import BEFORE_2_12, AllocatorSettings
from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import alive_at, replay
from batchfinder.simulator.steady_state import simulate_steady_state
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import GIB, MIB
from tests.builders import few_layers, small
from tests.builders.small import HIDDEN, IN, OUT
from tests.conftest import Record

CONTEXT = 300 * MIB
PARAMETERS = 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
CARD = DeviceMemory(16 * GIB, 16 * GIB - CONTEXT)
CONFS = [AllocatorSettings(), AllocatorSettings(expandable_segments=True)]


@pytest.mark.parametrize("conf", CONFS, ids=["segments", "expandable"])
@pytest.mark.parametrize("usable", [15 * GIB, 40 * MIB], ids=["fits", "does not"])
def test_kinds_sum_to_the_peak(bert: Trace, mlp: Trace, conf: AllocatorSettings, usable: int) -> None:
    """The kinds sum to the peak exactly: to what is reserved and the context, on a card that has room and on none."""
    for trace in (bert, mlp):
        found = estimate(trace, DeviceMemory(16 * GIB, usable), CONTEXT, conf)
        card = DeviceMemory(16 * GIB, usable) if found.fits else UNLIMITED
        timeline = replay(trace.structure, trace.sizes, CachingAllocator(card, conf))
        assert sum(found.kinds.shown().values()) == found.peak_bytes == timeline.max_reserved_bytes + CONTEXT
        assert found.reserved_bytes == timeline.max_reserved_bytes
        assert found.kinds.context == CONTEXT
        assert min(found.kinds.shown().values()) >= 0
        assert found.kinds.fragmentation >= found.reserved_bytes - found.allocated_bytes
        assert found.fits == (usable == 15 * GIB)


def test_the_kinds_of_a_perceptron(mlp: Trace) -> None:
    """At the fullest moment, in the second step's backward, each kind has the bytes that can be counted by hand.

    Kept for the backward are the ReLU's output and the loss, a single number.
    """
    found = estimate(mlp, CARD, CONTEXT)
    kinds = found.kinds
    assert kinds.parameters == PARAMETERS
    assert kinds.optimizer == 2 * PARAMETERS
    assert kinds.inputs == 4 * 4096 * IN
    assert kinds.activations == 4 * 4096 * HIDDEN + 4
    assert kinds.workspace == 2 * 8_519_680
    assert found.peak is not None
    assert (found.peak.moment.step, found.peak.moment.stage) == (1, "backward")


def test_which_of_equal_free_blocks_is_taken_decides() -> None:
    """A segment of 80 MiB holds two blocks, of which the upper one is free, as is a younger segment of 40.

    Where the next 40 MiB go into the younger one, the lower block comes free beside the upper one, and both hold 80;
    else they are taken anew. By address they go into the younger one, which cudaMalloc puts below the other.
    """
    order, sizes = (0, 1, ~1, 2, 3, ~0, ~3, 4, ~2, 5), [size * MIB for size in (40, 80, 40, 40, 40, 80)]
    structure = TraceStructure(order, (), ("",) * 6, ("",) * 6, ("temporary",) * 6)
    trace = Trace(1, None, structure, tuple(sizes))
    assert estimate(trace, CARD).reserved_bytes == 120 * MIB
    assert estimate(trace, CARD, settings=BEFORE_2_12).reserved_bytes == 200 * MIB


def test_the_fullest_moment(bert: Trace) -> None:
    """The peak is the first moment with the most in live blocks, and what is alive then is what is counted."""
    found = estimate(bert, CARD, CONTEXT)
    timeline = replay(bert.structure, bert.sizes, CachingAllocator(CARD))
    assert found.peak is not None
    assert found.last_segment is not None
    assert found.peak.moment == timeline.allocated_peak
    assert found.last_segment.moment == timeline.reserved_peak
    assert found.allocated_bytes == timeline.max_allocated_bytes
    block = found.peak.moment.block
    assert list(found.alive) == alive_at(bert.structure, found.peak.moment.position)
    assert block == found.alive[-1]
    assert found.peak.tensor.bytes == bert.sizes[block]
    assert found.peak.tensor.operator == bert.structure.operators[block]
    assert found.peak.tensor.shape == bert.shapes[block]
    assert found.peak.to_json() == {
        "step": found.peak.moment.step,
        "stage": found.peak.moment.stage,
        "micro_batch": 0,
        "module": bert.structure.modules[block],
        "operator": bert.structure.operators[block],
        "requested_bytes": bert.sizes[block],
        "shape": bert.shapes[block],
    }


def test_later_steps_change_nothing(record: Record, bert: Trace, mlp: Trace) -> None:
    """Two steps show all there is: in four, neither the fullest moment nor what is reserved grows after the second."""
    longer = record(lambda: few_layers.build("bert-base"), 8, 64, steps=4), record(small.mlp, 4096, steps=4)
    for two, four in zip((bert, mlp), longer, strict=True):
        assert four.structure.marks[-1].step == 3
        short, long = estimate(two, CARD), estimate(four, CARD)
        assert (short.kinds, short.peak_bytes, short.peak) == (long.kinds, long.peak_bytes, long.peak)


@pytest.fixture(scope="module")
def frugal(record: Record) -> Trace:
    """A step that runs on less than it reserves where there is more, and goes on running."""
    return record(lambda: few_layers.build("bert-base"), 16, 64)


def test_the_smallest_card_is_the_smallest(frugal: Trace) -> None:
    """A step on a card of required_bytes goes on fitting, at 2 MiB less it does not."""
    found = estimate(frugal, CARD, CONTEXT)
    assert found.required_bytes < found.peak_bytes

    def fits(required: int) -> bool:
        memory = DeviceMemory(required, required - CONTEXT)
        return simulate_steady_state(frugal.structure, frugal.sizes, lambda: CachingAllocator(memory)).fits

    assert fits(found.required_bytes)
    assert not fits(found.required_bytes - 2 * MIB)


def test_what_never_settles_does_not_fit(bert: Trace) -> None:
    """A card on which the steps run, but each gives back the cache to do so, is too small; nothing failed there."""
    whole = estimate(bert, CARD, CONTEXT)
    tight = DeviceMemory(16 * GIB, whole.reserved_bytes - 2 * MIB)
    assert replay(bert.structure, bert.sizes, CachingAllocator(tight)).fits
    found = estimate(bert, tight, CONTEXT)
    assert (found.fits, found.oom) == (False, None)
    assert (found.kinds, found.peak_bytes, found.required_bytes) == (whole.kinds, whole.peak_bytes, whole.peak_bytes)


def test_fits_by_how_much(frugal: Trace) -> None:
    """It fits a card that has the peak exactly, and one of the smallest size; what it takes is less on that one."""
    whole = estimate(frugal, CARD, CONTEXT)
    exact = estimate(frugal, DeviceMemory(whole.peak_bytes, whole.reserved_bytes), CONTEXT)
    assert (exact.fits, exact.peak_bytes, exact.capacity_bytes) == (True, whole.peak_bytes, whole.peak_bytes)
    assert exact.num_alloc_retries == 0
    least = estimate(frugal, DeviceMemory(16 * GIB, whole.required_bytes - CONTEXT), CONTEXT)
    assert least.fits
    assert least.peak_bytes <= least.capacity_bytes == whole.required_bytes
    assert sum(least.kinds.shown().values()) == least.peak_bytes
    assert least.num_alloc_retries > 0


def test_does_not_fit(frugal: Trace) -> None:
    """On a card that is too small all figures are as on an unlimited one, and the failure is kept."""
    whole = estimate(frugal, CARD, CONTEXT)
    small = DeviceMemory(16 * GIB, whole.required_bytes - CONTEXT - 64 * MIB)
    found = estimate(frugal, small, CONTEXT)
    assert not found.fits
    assert found.oom is not None
    assert "CUDA out of memory" in found.oom.message
    assert (found.kinds, found.peak_bytes, found.peak) == (whole.kinds, whole.peak_bytes, whole.peak)
    assert found.required_bytes == whole.required_bytes == found.capacity_bytes + 64 * MIB


def test_a_limit_counts_as_the_card(bert: Trace) -> None:
    """Under a memory fraction the capacity is what is allowed."""
    found = estimate(bert, DeviceMemory(16 * GIB, 15 * GIB, 12 * GIB), CONTEXT)
    assert found.capacity_bytes == 12 * GIB + CONTEXT


def test_the_largest(bert: Trace) -> None:
    """The ten largest tensors come in order, are alive at the peak, and the first is BERT's embedding."""
    found = estimate(bert, CARD, CONTEXT)
    largest = found.largest()
    assert len(largest) == 10
    assert [tensor.bytes for tensor in largest] == sorted((bert.sizes[i] for i in found.alive), reverse=True)[:10]
    assert largest[0].to_json() == {
        "bytes": 4 * 30522 * 768,
        "shape": "float32[30522, 768]",
        "kind": "parameters",
        "module": "bert.embeddings.word_embeddings",
        "operator": "aten.empty_strided.default",
    }
    assert found.largest(2) == largest[:2]


def test_nothing_at_all() -> None:
    """A step that allocates nothing has no peak, and a card of no more than the context will do."""
    trace = Trace(1, None, TraceStructure((), (StageMark(0, 0, "forward"),), (), (), ()), ())
    found = estimate(trace, CARD, CONTEXT)
    assert (found.peak, found.last_segment, found.largest()) == (None, None, ())
    assert found.peak_bytes == found.required_bytes == sum(found.kinds.shown().values()) == CONTEXT


def test_a_scaled_trace_has_no_shapes(bert: Trace) -> None:
    """Where shapes are not known they are left out."""
    tensor = estimate(replace(bert, shapes=()), CARD).largest(1)[0]
    assert tensor.shape == ""
    assert tensor.to_json()["shape"] is None


def test_to_json(bert: Trace) -> None:
    """Each kind has a figure of its own name, and they sum to the peak."""
    figures = estimate(bert, CARD, CONTEXT).to_json()
    kinds = ("parameters", "gradients", "optimizer", "activations", "temporary", "inputs", "workspace")
    total = sum(figures[f"{kind}_bytes"] for kind in (*kinds, "fragmentation", "context"))
    assert total == figures["peak_bytes"]
    assert figures["capacity_bytes"] == 16 * GIB
    assert figures["fits"] is True


def test_every_kind_has_a_name() -> None:
    """The names are those of all fields, in their order."""
    assert list(NAMES) == list(asdict(Kinds()))


def test_total() -> None:
    """The kinds sum to the total, whichever are shown."""
    kinds = Kinds(parameters=1, activations=20, fragmentation=300, context=4000)
    assert sum(kinds.shown().values()) == 4321


def test_communication_is_shown_where_there_is_some() -> None:
    """One GPU has no communication to speak of; every other kind is always shown."""
    assert list(Kinds().shown()) == [name for name in NAMES if name != "communication"]
    assert list(Kinds(communication=1).shown()) == list(NAMES)


def test_every_kind_of_a_recording_is_known(mlp: Trace, bert: Trace) -> None:
    """Whatever kind a recording gives a block, it has a place."""
    for trace in (mlp, bert):
        assert {kind_of(trace, block) for block in range(len(trace.sizes))} <= set(NAMES)


def test_bytes_are_those_asked_for(mlp: Trace) -> None:
    """Bytes by kind are the tensors' own, not the blocks'."""
    held = bytes_by_kind(mlp, range(len(mlp.sizes)))
    assert held["parameters"] == PARAMETERS
    assert held["gradients"] == 2 * PARAMETERS  # one set in each step
    assert held["optimizer"] == 2 * PARAMETERS
    assert sum(held.values()) == sum(mlp.sizes)
    assert bytes_by_kind(mlp, []) == {}


def test_an_unknown_kind_is_a_bug(mlp: Trace) -> None:
    """A kind without a place is not passed over."""
    structure = mlp.structure.__class__((0,), (), ("a",), ("",), ("new",))
    with pytest.raises(KeyError):
        kind_of(Trace(1, None, structure, (1,)), 0)
