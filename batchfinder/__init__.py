"""Find the largest batch size that trains, with or without a GPU at hand.

Public names are loaded when they are first used, so that importing the package stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchfinder.accumulation import AccumulationPlan, plan_accumulation
    from batchfinder.errors import BatchFinderError
    from batchfinder.find import find_max_batch_size
    from batchfinder.huggingface.tune import tune_trainer
    from batchfinder.lightning.callback import BatchFinder
    from batchfinder.loop.executable import executable_batch_size
    from batchfinder.loop.sizes import TunedBatchSize, TunedBatchSizes
    from batchfinder.loop.tune import tune_batch_size
    from batchfinder.outcome import Measurement, Outcome, Shape, Stop, Trial, Verdict
    from batchfinder.probe import FunctionProbe, Probe
    from batchfinder.probing.atomic_update import AtomicUpdate
    from batchfinder.sampling.batch_sampler import LengthBucketBatchSampler
    from batchfinder.sampling.table import table_of
    from batchfinder.splitting.shares import split_batch
    from batchfinder.step.workload import Workload

_HOMES = {
    "AccumulationPlan": "accumulation",
    "AtomicUpdate": "probing.atomic_update",
    "BatchFinder": "lightning.callback",
    "BatchFinderError": "errors",
    "FunctionProbe": "probe",
    "LengthBucketBatchSampler": "sampling.batch_sampler",
    "Measurement": "outcome",
    "Outcome": "outcome",
    "Probe": "probe",
    "Shape": "outcome",
    "Stop": "outcome",
    "Trial": "outcome",
    "TunedBatchSize": "loop.sizes",
    "TunedBatchSizes": "loop.sizes",
    "Verdict": "outcome",
    "Workload": "step.workload",
    "executable_batch_size": "loop.executable",
    "find_max_batch_size": "find",
    "plan_accumulation": "accumulation",
    "split_batch": "splitting.shares",
    "table_of": "sampling.table",
    "tune_batch_size": "loop.tune",
    "tune_trainer": "huggingface.tune",
}

__all__ = [
    "AccumulationPlan",
    "AtomicUpdate",
    "BatchFinder",
    "BatchFinderError",
    "FunctionProbe",
    "LengthBucketBatchSampler",
    "Measurement",
    "Outcome",
    "Probe",
    "Shape",
    "Stop",
    "Trial",
    "TunedBatchSize",
    "TunedBatchSizes",
    "Verdict",
    "Workload",
    "executable_batch_size",
    "find_max_batch_size",
    "plan_accumulation",
    "split_batch",
    "table_of",
    "tune_batch_size",
    "tune_trainer",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"batchfinder.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
