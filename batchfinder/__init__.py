"""Find the largest batch size that trains, with or without a GPU at hand.

Public names are loaded when they are first used, so that importing the package stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchfinder.versions import __version__ as __version__

if TYPE_CHECKING:
    from batchfinder.accumulation import AccumulationPlan as AccumulationPlan
    from batchfinder.accumulation import plan_accumulation as plan_accumulation
    from batchfinder.data.bucket_sampler import LengthBucketBatchSampler as LengthBucketBatchSampler
    from batchfinder.data.size_table import from_json as from_json
    from batchfinder.data.size_table import table_of as table_of
    from batchfinder.data.size_table import to_json as to_json
    from batchfinder.data.size_table import to_lhotse as to_lhotse
    from batchfinder.data.split import split_batch as split_batch
    from batchfinder.errors import BatchFinderError as BatchFinderError
    from batchfinder.errors import CacheFailed as CacheFailed
    from batchfinder.errors import CardNeeded as CardNeeded
    from batchfinder.errors import CudaStubUnavailable as CudaStubUnavailable
    from batchfinder.errors import InvalidValue as InvalidValue
    from batchfinder.errors import MissingExtra as MissingExtra
    from batchfinder.errors import NotSplittable as NotSplittable
    from batchfinder.errors import OutOfMemory as OutOfMemory
    from batchfinder.errors import RankFailed as RankFailed
    from batchfinder.errors import RankLost as RankLost
    from batchfinder.errors import RecordingFailed as RecordingFailed
    from batchfinder.errors import SampleDoesNotFit as SampleDoesNotFit
    from batchfinder.errors import SamplesTooLong as SamplesTooLong
    from batchfinder.errors import UnknownName as UnknownName
    from batchfinder.errors import UserCodeFailed as UserCodeFailed
    from batchfinder.find import find_max_batch_size as find_max_batch_size
    from batchfinder.huggingface.tune import tune_trainer as tune_trainer
    from batchfinder.lightning.callback import BatchFinder as BatchFinder
    from batchfinder.loop.executable import executable_batch_size as executable_batch_size
    from batchfinder.loop.result import TunedBatchSize as TunedBatchSize
    from batchfinder.loop.result import TunedBatchSizes as TunedBatchSizes
    from batchfinder.loop.tune import tune_batch_size as tune_batch_size
    from batchfinder.memory_use.breakdown import Estimate as Estimate
    from batchfinder.memory_use.breakdown import Kinds as Kinds
    from batchfinder.memory_use.breakdown import OverTime as OverTime
    from batchfinder.probe import FunctionProbe as FunctionProbe
    from batchfinder.probe import Probe as Probe
    from batchfinder.recording.simulate import SimulatedTraining as SimulatedTraining
    from batchfinder.recording.simulate import simulate as simulate
    from batchfinder.recording.what_fits import Fit as Fit
    from batchfinder.recording.what_fits import WhatFits as WhatFits
    from batchfinder.report.estimate import Alternative as Alternative
    from batchfinder.report.estimate import EstimateFindings as EstimateFindings
    from batchfinder.report.sweep import SweepRow as SweepRow
    from batchfinder.results import Measurement as Measurement
    from batchfinder.results import SearchResult as SearchResult
    from batchfinder.results import Shape as Shape
    from batchfinder.results import StopReason as StopReason
    from batchfinder.results import Trial as Trial
    from batchfinder.results import Verdict as Verdict
    from batchfinder.sizing.estimate import estimate as estimate
    from batchfinder.sizing.sweep import SweepResult as SweepResult
    from batchfinder.sizing.sweep import sweep as sweep
    from batchfinder.sizing.what_fits import what_fits as what_fits
    from batchfinder.training.step import Workload as Workload

_PUBLIC = {
    "accumulation": ("AccumulationPlan", "plan_accumulation"),
    "data.bucket_sampler": ("LengthBucketBatchSampler",),
    "data.size_table": ("from_json", "table_of", "to_json", "to_lhotse"),
    "data.split": ("split_batch",),
    "errors": (
        "BatchFinderError",
        "CacheFailed",
        "CardNeeded",
        "CudaStubUnavailable",
        "InvalidValue",
        "MissingExtra",
        "NotSplittable",
        "OutOfMemory",
        "RankFailed",
        "RankLost",
        "RecordingFailed",
        "SampleDoesNotFit",
        "SamplesTooLong",
        "UnknownName",
        "UserCodeFailed",
    ),
    "find": ("find_max_batch_size",),
    "huggingface.tune": ("tune_trainer",),
    "lightning.callback": ("BatchFinder",),
    "loop.executable": ("executable_batch_size",),
    "loop.result": ("TunedBatchSize", "TunedBatchSizes"),
    "loop.tune": ("tune_batch_size",),
    "memory_use.breakdown": ("Estimate", "Kinds", "OverTime"),
    "probe": ("FunctionProbe", "Probe"),
    "recording.simulate": ("SimulatedTraining", "simulate"),
    "recording.what_fits": ("Fit", "WhatFits"),
    "report.estimate": ("Alternative", "EstimateFindings"),
    "report.sweep": ("SweepRow",),
    "results": ("Measurement", "SearchResult", "Shape", "StopReason", "Trial", "Verdict"),
    "sizing.estimate": ("estimate",),
    "sizing.sweep": ("SweepResult", "sweep"),
    "sizing.what_fits": ("what_fits",),
    "training.step": ("Workload",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"batchfinder.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
