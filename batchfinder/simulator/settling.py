"""Whether a step that only just fits goes on fitting.

Near a card's limit the allocator cannot always go on from the segments it has: it gives back those that are wholly free
and takes others. A few steps later it has, as a rule, segments in which every later step fits, and it never does it
again; or it finds no room in one of those steps. Two steps cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.repeated import repeated
from batchfinder.simulator.replay import replay
from batchfinder.simulator.timeline import StageMemory, Timeline
from batchfinder.simulator.trace import Structure

MORE_STEPS = 8
"""Steps beyond the first two in which the allocator has to be through with it.

Of ResNet-50, BERT-large and DistilBERT on cards with just the memory of some size, each size above that size either
failed in the first four steps or had a step without in the first seven, and no later step of 24 failed.
"""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of a step that is taken again and again.

    Attributes:
        timeline: the trace's own, or the longer one in which it failed, whose moments are not the trace's.
        settled: whether a step went by in which the allocator kept its cache; True where one failed before.
    """

    timeline: Timeline
    settled: bool = True

    @property
    def fits(self) -> bool:
        """Whether it goes on fitting."""
        return self.timeline.fits and self.settled


def outlook(structure: Structure, sizes: Sequence[int], allocator: Callable[[], CachingAllocator]) -> Outlook:
    """Replay a trace; where the cache was given back on the way, with its last step `MORE_STEPS` more times.

    Args:
        structure: the events.
        sizes: for each block, the bytes asked for.
        allocator: returns a new one, made for the card and the settings in question.
    """
    timeline = replay(structure, sizes, allocator())
    if not timeline.fits or not timeline.num_alloc_retries:
        return Outlook(timeline)
    longer = repeated(structure, MORE_STEPS)
    if longer is None:
        return Outlook(timeline)
    steps = timeline.stages[-1].step + 1
    structure, origins = longer
    later = replay(structure, [sizes[i] for i in origins], allocator(), lambda stages: _kept(stages, steps))
    return Outlook(timeline, _kept(later.stages, steps)) if later.fits else Outlook(later)


def _kept(stages: Sequence[StageMemory], steps: int) -> bool:
    """Whether the last optimizer step, if it comes after so many others and has ended, did with the cache there was."""
    last = stages[-1]
    if last.step < steps or last.stage != "optimizer":
        return False
    before = next(stage for stage in reversed(stages) if stage.step < last.step)
    return last.num_alloc_retries == before.num_alloc_retries
