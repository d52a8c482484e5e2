"""A worked estimate of 2025-04-12: will Multimodal BERT training run out of memory on an ml.p3.16xlarge?"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class PaperEstimate:
    """What it assumes, and what it comes to.

    Attributes:
        source: its title.
        instance: the machine.
        batch_size: of all GPUs together.
        batch_size_per_gpu: of one.
        seq_len: tokens per sample.
        precision: of all tensors.
        tabular_features: numbers per sample beside the text.
        verdict: `fits`, or not.
        parameters: numbers by part of the model.
        mb_per_gpu: 10**6 bytes on one GPU, by what they are for, and in all.
    """

    source: str
    instance: str
    batch_size: int
    batch_size_per_gpu: int
    seq_len: int
    precision: str
    tabular_features: int
    verdict: str
    parameters: dict[str, int]
    mb_per_gpu: dict[str, int]


@functools.cache
def multimodal_bert() -> PaperEstimate:
    """The estimate's figures. Its source and its conditions are in multimodal_bert.toml."""
    return PaperEstimate(**tomllib.loads(files(__package__).joinpath("multimodal_bert.toml").read_text()))
