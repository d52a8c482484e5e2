"""What the thread "High GPU memory usage problem" printed: memory after each stage of two training steps."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What `torch.cuda` counted when a stage was over, in MiB.

    Attributes:
        step: 0 or 1.
        stage: `begin` (the model is on the GPU), `zero_grad`, `forward`, `loss`, `backward` or `optimizer`.
        allocated: in live blocks then.
        max_allocated: the most so far.
        reserved: taken from the card then; "cached" in those days.
        max_reserved: the most so far.
    """

    step: int
    stage: str
    allocated: int
    max_allocated: int
    reserved: int
    max_reserved: int


@dataclass(frozen=True, slots=True)
class Seq2SeqThread:
    """All that it printed.

    Attributes:
        source: its title.
        batch_size: sentence pairs.
        length: tokens of each sentence, on both sides.
        stages: in the order in which they were printed.
    """

    source: str
    batch_size: int
    length: int
    stages: tuple[StageFigures, ...]


@functools.cache
def seq2seq() -> Seq2SeqThread:
    """The thread's figures. Its source and its conditions are in seq2seq.toml."""
    table = tomllib.loads(files(__package__).joinpath("seq2seq.toml").read_text())
    return Seq2SeqThread(
        source=table["source"],
        batch_size=table["batch_size"],
        length=table["length"],
        stages=tuple(StageFigures(step, *row) for step in (0, 1) for row in table[f"step_{step}"]),
    )
