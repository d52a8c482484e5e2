"""The user's own training command on simulated GPUs: whether it fits, what takes its memory, its largest batch size."""

from batchfinder.programs.dry_run import DryRun, ProcessMemory, dry_run
from batchfinder.programs.find import CommandTemplate, FoundForCommand, find_for_command
from batchfinder.programs.placeholders import ConfigPlace
from batchfinder.programs.scratch import scratch_copy

__all__ = [
    "CommandTemplate",
    "ConfigPlace",
    "DryRun",
    "FoundForCommand",
    "ProcessMemory",
    "dry_run",
    "find_for_command",
    "scratch_copy",
]
